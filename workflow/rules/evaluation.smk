rule retrain_subsets:
    output:
        retrained="<results>/retrained/{first}-{last}.h5",
    log:
        "<results>/logs/retrain_subsets/{first}-{last}.log",
    benchmark:
        "<results>/benchmarks/retrain_subsets/{first}-{last}.tsv"
    wildcard_constraints:
        first=r"\d+",
        last=r"\d+",
    conda:
        "../envs/trak.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=job_mb,
        runtime=job_minutes,
        batch_size=compute["batch_size"],
    params:
        code=code_digest("trak_core.stages.retrain_subsets"),
        study=config["study"],
        settings=lambda wildcards: ordered(
            {
                "arguments": config["training"],
                "model_output": config["model_output"],
                "seeds": evaluation["subsets"]["seeds"],
                "seed": evaluation["subsets"]["seed"],
                "study_digest": study,
            }
        ),
    message:
        "Retraining on halves {wildcards.first} to {wildcards.last}"
    script:
        "../scripts/retrain_subsets.py"


rule compute_embeddings:
    input:
        checkpoint=checkpoint_input,
    output:
        embeddings="<results>/embeddings/{checkpoint}.h5",
    log:
        "<results>/logs/compute_embeddings/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_embeddings/{checkpoint}.tsv"
    conda:
        "../envs/trak.yaml"
    threads: compute["threads"]
    resources:
        gpu=int(compute["device"] == "cuda"),
        mem_mb=job_mb,
        runtime=job_minutes,
        device=compute["device"],
        batch_size=compute["batch_size"],
    params:
        code=code_digest("trak_core.stages.compute_embeddings"),
        signature=checkpoint_signature,
        spec=lambda wildcards: ordered(
            expected_embeddings() | {"checkpoint": wildcards.checkpoint}
        ),
        study=config["study"],
    message:
        "Embedding all samples under checkpoint {wildcards.checkpoint}"
    script:
        "../scripts/compute_embeddings.py"


rule evaluate_scores:
    input:
        scores="<results>/scores/{experiment}.h5",
        checkpoint_scores=checkpoint_scores,
        retrained=retrained_files() if measured else [],
        train=of_checkpoints("{results}/features/{c}/train.h5", looks_at_features),
        targets=evaluated_targets,
        normal_matrices=of_checkpoints(
            "{results}/normal_matrix/{c}.h5", looks_at_features
        ),
        embeddings=of_checkpoints("{results}/embeddings/{c}.h5", embedded),
    output:
        evaluation="<results>/evaluation/{experiment}.h5",
    log:
        "<results>/logs/evaluate_scores/{experiment}.log",
    benchmark:
        "<results>/benchmarks/evaluate_scores/{experiment}.tsv"
    conda:
        "../envs/trak.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=job_mb,
        memory_mb=compute["memory_mb"],
        runtime=job_minutes,
    params:
        code=code_digest("trak_core.stages.evaluate_scores"),
        signature=(
            stat_signature(Path(evaluation["ground_truth"]))
            if "ground_truth" in evaluation
            else None
        ),
        expected=lambda wildcards: ordered(
            {
                "expected": expected_final_scores(wildcards),
                "expected_embeddings": expected_embeddings()
                | {"checkpoints": list(checkpoints)},
                "expected_retrained": expected_retrained(),
            }
        ),
        settings=ordered(
            {
                "baselines": evaluation.get("baselines", []),
                "trak": evaluation.get("trak", []),
                "sweep": evaluation.get("sweep"),
            }
        ),
    message:
        "Measuring the scores of experiment {wildcards.experiment}"
    script:
        "../scripts/evaluate_scores.py"


rule compute_self_influence:
    input:
        features=of_checkpoints("{results}/features/{c}/train.h5", True),
        normal_matrices=of_checkpoints("{results}/normal_matrix/{c}.h5", True),
    output:
        self_influence="<results>/self_influence.h5",
    log:
        "<results>/logs/compute_self_influence.log",
    benchmark:
        "<results>/benchmarks/compute_self_influence.tsv"
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
        code=code_digest("trak_core.stages.compute_self_influence"),
        expected=ordered(expected_train_features()),
        settings=influence_settings,
    message:
        "Computing self-influence"
    script:
        "../scripts/compute_self_influence.py"
