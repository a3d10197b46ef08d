# The same stages once more, on checkpoints trained with some labels flipped.
use rule compute_features as compute_features_flipped with:
    input:
        checkpoint="<results>/flipped/checkpoints/{checkpoint}.pt",
    output:
        features="<results>/flipped/features/{checkpoint}.h5",
    log:
        "<results>/logs/compute_features_flipped/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_features_flipped/{checkpoint}.tsv"
    priority: 0
    params:
        signature=None,
        spec=features_spec_flipped,
        targets=None,
        question=None,
    message:
        "Projecting gradients of flipped labels under checkpoint {wildcards.checkpoint}"


use rule compute_normal_matrix as compute_normal_matrix_flipped with:
    input:
        features="<results>/flipped/features/{checkpoint}.h5",
    output:
        normal_matrix="<results>/flipped/normal_matrix/{checkpoint}.h5",
    log:
        "<results>/logs/compute_normal_matrix_flipped/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_normal_matrix_flipped/{checkpoint}.tsv"
    priority: 0
    params:
        spec=lambda wildcards: (
            specs.found_flipped.under(wildcards.checkpoint)
            .of_normal_matrix()
            .as_dict()
        ),
    message:
        "Summing the normal matrix of flipped labels, checkpoint {wildcards.checkpoint}"


rule find_flipped:
    input:
        features=of_checkpoints("flipped/features/{c}.h5"),
        normal_matrices=of_checkpoints("flipped/normal_matrix/{c}.h5"),
        # For the labels as they were.
        original=of_checkpoints("features/{c}/train.h5")[0],
    output:
        flipped="<results>/flipped.h5",
    log:
        "<results>/logs/find_flipped.log",
    benchmark:
        "<results>/benchmarks/find_flipped.tsv"
    conda:
        environment
    # More would crash OpenBLAS's Cholesky factorization from proj_dim 16,384 on.
    threads: 1
    resources:
        mem_mb=job_mb,
        memory_mb=compute["memory_mb"],
    params:
        code=code_of("find_flipped"),
        spec=specs.found_flipped.as_dict(),
    message:
        "Looking for flipped labels"
    script:
        "../scripts/stage.py"


flipped_jobs = "compute_features", "compute_normal_matrix"
timed("{job}_flipped/{c}", job=flipped_jobs, c=specs.checkpoints)
timed("find_flipped")
