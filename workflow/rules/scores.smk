use rule stage as average_scores with:
    input:
        checkpoint_scores=of_checkpoints("scores/{experiment}/{c}.h5"),
        features=train_features,
    output:
        scores="<results>/scores/{experiment}.h5",
    log:
        "<results>/logs/average_scores/{experiment}.log",
    benchmark:
        "<results>/benchmarks/average_scores/{experiment}.tsv"
    priority: scores_first
    params:
        code=code_of("average_scores"),
        spec=scores_spec,
        defaults=specs.defaults,
        columns=specs.output.columns,
        top=scoring["top"],
        output_words=specs.output_words,
        study_file=config["study"] if specs.has_columns else None,
        question=question,
        mean_of=lambda w: specs.mean_of(w.experiment),
    message:
        "Averaging scores of experiment {wildcards.experiment} over checkpoints"


if specs.means:

    use rule stage as average_targets with:
        input:
            members=lambda w: [
                f"{folder}/scores/{e}/{w.checkpoint}.h5"
                for e in specs.means[w.experiment]
            ],
        output:
            scores="<results>/scores/{experiment}/{checkpoint}.h5",
        log:
            "<results>/logs/average_targets/{experiment}/{checkpoint}.log",
        benchmark:
            "<results>/benchmarks/average_targets/{experiment}/{checkpoint}.tsv"
        wildcard_constraints:
            experiment=any_of(specs.means),
        priority: scores_first
        params:
            code=code_of("average_targets"),
            spec=checkpoint_scores_spec,
        message:
            "Averaging targets for {wildcards.experiment} under checkpoint {wildcards.checkpoint}"


use rule model_stage as compute_token_scores with:
    input:
        scores="<results>/scores/{experiment}.h5",
        checkpoints=[file for file, _ in checkpoint_files.values()],
        train_paths=of_checkpoints("features/{c}/train.h5"),
        targets_paths=of_checkpoints("features/{c}/{experiment}.h5"),
        normal_matrices=of_checkpoints("normal_matrix/{c}.h5"),
    output:
        token_scores="<results>/token_scores/{experiment}.h5",
    log:
        "<results>/logs/compute_token_scores/{experiment}.log",
    benchmark:
        "<results>/benchmarks/compute_token_scores/{experiment}.tsv"
    priority: scores_first
    params:
        code=code_of("compute_token_scores"),
        signature=[signature for _, signature in checkpoint_files.values() if signature],
        spec=scores_spec,
        question=question,
        study_file=config["study"],
    message:
        "Splitting scores of experiment {wildcards.experiment} by tokens and layers"


use rule stage as draw_influences with:
    input:
        scores="<results>/scores/{experiment}.h5",
        self_influence=known_self_influence,
        token_scores=lambda w: (
            [f"{folder}/token_scores/{w.experiment}.h5"]
            if config["answers"]["tokens"] and w.experiment in specs.experiments
            else []
        ),
    output:
        answer=report("<results>/answers/{experiment}.html", category="answers"),
        texts="<results>/answers/{experiment}.h5",
    log:
        "<results>/logs/draw_influences/{experiment}.log",
    benchmark:
        "<results>/benchmarks/draw_influences/{experiment}.tsv"
    priority: scores_first
    params:
        code=code_of("draw_influences"),
        digest=specs.study_digest,
        study_file=config["study"],
        question=question,
    message:
        "Drawing the influences on experiment {wildcards.experiment}: {output.answer}"
