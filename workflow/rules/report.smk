use rule stage as write_report with:
    input:
        # The report links to the pages of answers and lists.
        expand("<results>/answers/{experiment}.html", experiment=specs.experiments),
        expand("<results>/lists/{kind}.html", kind=specs.lists),
        scores=expand("<results>/scores/{experiment}.h5", experiment=specs.experiments),
        normal_matrices=(
            of_checkpoints("normal_matrix/{c}.h5") if specs.is_projected else []
        ),
        groups=group_files,
        evaluations=evaluation_files,
        removals=removals_files,
        self_influence=self_influence_files,
    output:
        report=report("<results>/report.html", category="report"),
    log:
        "<results>/logs/write_report.log",
    params:
        code=code_of("write_report"),
        digest=specs.study_digest,
        study_file=config["study"],
        config=specs.reported,
    message:
        "Writing the report: {output.report}"


if measured_files:

    # This report does not wait for the evaluation, because retraining models takes a long time.
    use rule write_report as write_report_first with:
        input:
            expand("<results>/answers/{experiment}.html", experiment=specs.experiments),
            scores=rules.write_report.input.scores,
            normal_matrices=rules.write_report.input.normal_matrices,
            groups=group_files,
            evaluations=[],
            removals=[],
            self_influence=[],
        output:
            report="<results>/first_report.html",
        log:
            "<results>/logs/write_report_first.log",
        priority: scores_first
        params:
            config={**specs.reported, "evaluation": "see report.html"},
        message:
            "Writing the first report: {output.report}"
