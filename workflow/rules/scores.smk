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
    message:
        "Averaging scores of experiment {wildcards.experiment} over checkpoints"


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
        token_scores=(
            ["<results>/token_scores/{experiment}.h5"]
            if config["answers"]["tokens"]
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
