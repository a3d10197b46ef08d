use rule model_stage as compute_newton_scores with:
    input:
        checkpoint=checkpoint_input,
        selected=lambda wildcards: [
            f"{folder}/targets/{e}.h5"
            for e in specs.conditions
            if e == wildcards.experiment
        ],
    output:
        scores="<results>/scores/{experiment}/{checkpoint}.h5",
    log:
        "<results>/logs/compute_newton_scores/{experiment}/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_newton_scores/{experiment}/{checkpoint}.tsv"
    wildcard_constraints:
        experiment=any_of(specs.experiments),
    priority: scores_first
    params:
        code=code_of("compute_newton_scores"),
        signature=checkpoint_signature,
        spec=checkpoint_scores_spec,
        targets=lambda wildcards: specs.experiments.get(wildcards.experiment),
        question=lambda wildcards: specs.questions.get(wildcards.experiment),
        study_file=config["study"],
    message:
        "Scoring experiment {wildcards.experiment} by Gauss-Newton under checkpoint "
        "{wildcards.checkpoint}"


timed("compute_newton_scores/{e}/{c}", e=specs.experiments, c=specs.checkpoints)
