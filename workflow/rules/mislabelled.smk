# The same stages once more, on checkpoints trained with some labels flipped.
mislabelled = ordered(evaluation["mislabelled"])


use rule train_checkpoint as train_mislabelled with:
    output:
        checkpoint="<results>/mislabelled/checkpoints/{checkpoint}.pt",
    log:
        "<results>/logs/train_mislabelled/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/train_mislabelled/{checkpoint}.tsv"
    params:
        mislabelled=mislabelled,
    message:
        "Training checkpoint {wildcards.checkpoint} with flipped labels"


use rule compute_features as compute_mislabelled_features with:
    input:
        checkpoint="<results>/mislabelled/checkpoints/{checkpoint}.pt",
    output:
        features="<results>/mislabelled/features/{checkpoint}.h5",
    log:
        "<results>/logs/compute_mislabelled_features/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_mislabelled_features/{checkpoint}.tsv"
    wildcard_constraints:
        checkpoint=any_of(checkpoints),
    params:
        signature=None,
        spec=lambda wildcards: ordered(
            features_settings
            | {
                "checkpoint": wildcards.checkpoint,
                "targets": None,
                "mislabelled": mislabelled,
            }
        ),
    message:
        "Projecting gradients of flipped labels under checkpoint {wildcards.checkpoint}"


use rule compute_normal_matrix as compute_mislabelled_normal_matrix with:
    input:
        features="<results>/mislabelled/features/{checkpoint}.h5",
    output:
        normal_matrix="<results>/mislabelled/normal_matrix/{checkpoint}.h5",
    log:
        "<results>/logs/compute_mislabelled_normal_matrix/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_mislabelled_normal_matrix/{checkpoint}.tsv"
    params:
        expected=lambda wildcards: ordered(
            expected_features(wildcards.checkpoint, "train")
            | {"mislabelled": mislabelled}
        ),
    message:
        "Summing the normal matrix of flipped labels, checkpoint {wildcards.checkpoint}"


rule find_mislabelled:
    input:
        features=of_checkpoints("{results}/mislabelled/features/{c}.h5", True),
        normal_matrices=of_checkpoints(
            "{results}/mislabelled/normal_matrix/{c}.h5", True
        ),
        original=f"{folder}/features/{next(iter(checkpoints))}/train.h5",
    output:
        mislabelled="<results>/mislabelled.h5",
    log:
        "<results>/logs/find_mislabelled.log",
    benchmark:
        "<results>/benchmarks/find_mislabelled.tsv"
    conda:
        "../envs/trak.yaml"
    # More would crash OpenBLAS's Cholesky factorization from proj_dim 16,384 on.
    threads: 1
    resources:
        gpu=0,
        mem_mb=job_mb,
        memory_mb=compute["memory_mb"],
        runtime=job_minutes,
    params:
        code=code_digest("trak_core.stages.find_flipped"),
        expected=ordered(expected_train_features() | {"mislabelled": mislabelled}),
        settings=influence_settings,
    message:
        "Looking for flipped labels"
    script:
        "../scripts/find_mislabelled.py"
