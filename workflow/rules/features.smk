use rule model_stage as compute_features with:
    input:
        checkpoint=checkpoint_input,
        selected=selected_targets,
    output:
        features="<results>/features/{checkpoint}/{split}.h5",
    log:
        "<results>/logs/compute_features/{checkpoint}/{split}.log",
    benchmark:
        "<results>/benchmarks/compute_features/{checkpoint}/{split}.tsv"
    wildcard_constraints:
        split=any_of([split for split, n in specs.shards.items() if n == 1]),
    # Many jobs wait for features. If they were computed last, cores would be idle at the end.
    priority: scores_first + 1
    params:
        code=code_of("compute_features"),
        signature=checkpoint_signature,
        spec=features_spec,
        targets=split_targets,
        question=split_question,
        study_file=config["study"],
    message:
        "Projecting gradients of {wildcards.split} under checkpoint {wildcards.checkpoint}"


use rule compute_features as compute_features_shard with:
    output:
        features=temp("<results>/shards/{checkpoint}/{split}/{shard}-of-{n_shards}.h5"),
    log:
        "<results>/logs/compute_features/{checkpoint}/{split}/{shard}-of-{n_shards}.log",
    benchmark:
        "<results>/benchmarks/compute_features/{checkpoint}/{split}/{shard}-of-{n_shards}.tsv"
    wildcard_constraints:
        shard=r"\d+",
        n_shards=r"\d+",
    message:
        "Projecting gradients of {wildcards.split}, shard {wildcards.shard} of "
        "{wildcards.n_shards}, under checkpoint {wildcards.checkpoint}"


use rule stage as join_shards with:
    input:
        shards=lambda w: [
            f"{folder}/shards/{w.checkpoint}/{w.split}/{i}-of-{specs.shards[w.split]}.h5"
            for i in range(1, specs.shards[w.split] + 1)
        ],
    output:
        features="<results>/features/{checkpoint}/{split}.h5",
    log:
        "<results>/logs/join_shards/{checkpoint}/{split}.log",
    benchmark:
        "<results>/benchmarks/join_shards/{checkpoint}/{split}.tsv"
    wildcard_constraints:
        split=any_of([split for split, n in specs.shards.items() if n > 1]),
    priority: scores_first
    params:
        code=code_of("join_shards"),
        spec=features_spec,
    message:
        "Joining shards of {wildcards.split} under checkpoint {wildcards.checkpoint}"


use rule stage as compute_normal_matrix with:
    input:
        features="<results>/features/{checkpoint}/train.h5",
    output:
        normal_matrix="<results>/normal_matrix/{checkpoint}.h5",
    log:
        "<results>/logs/compute_normal_matrix/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_normal_matrix/{checkpoint}.tsv"
    priority: scores_first
    threads: compute["threads"]
    params:
        code=code_of("compute_normal_matrix"),
        spec=lambda w: specs.normal_matrix(w.checkpoint).as_dict(),
    message:
        "Summing the normal matrix of checkpoint {wildcards.checkpoint}"


use rule stage as compute_scores with:
    input:
        train_path="<results>/features/{checkpoint}/train.h5",
        targets_path="<results>/features/{checkpoint}/{experiment}.h5",
        normal_matrix="<results>/normal_matrix/{checkpoint}.h5",
    output:
        scores="<results>/scores/{experiment}/{checkpoint}.h5",
    log:
        "<results>/logs/compute_scores/{experiment}/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_scores/{experiment}/{checkpoint}.tsv"
    priority: scores_first
    params:
        code=code_of("compute_scores"),
        spec=checkpoint_scores_spec,
        keep=scoring["keep"],
    message:
        "Scoring experiment {wildcards.experiment} under checkpoint {wildcards.checkpoint}"


use rule stage as compute_self_influence with:
    input:
        features=of_checkpoints("features/{c}/train.h5"),
        normal_matrices=of_checkpoints("normal_matrix/{c}.h5"),
    output:
        self_influence="<results>/self_influence.h5",
    log:
        "<results>/logs/compute_self_influence.log",
    benchmark:
        "<results>/benchmarks/compute_self_influence.tsv"
    params:
        code=code_of("compute_self_influence"),
        spec=specs.self_influence.as_dict(),
    message:
        "Computing self-influence"
