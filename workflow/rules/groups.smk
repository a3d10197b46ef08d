use rule stage as sum_groups with:
    input:
        scores="<results>/scores/{experiment}.h5",
        checkpoint_scores=of_checkpoints("scores/{experiment}/{c}.h5"),
        features=train_features,
    output:
        groups="<results>/groups/{experiment}.h5",
    log:
        "<results>/logs/sum_groups/{experiment}.log",
    benchmark:
        "<results>/benchmarks/sum_groups/{experiment}.tsv"
    params:
        code=code_of("sum_groups"),
        spec=scores_spec,
        group_by=config["groups"],
    message:
        "Summing scores of experiment {wildcards.experiment} by groups: {output.groups}"
