removals_baselines = specs.evaluation["removals"]["baselines"]


rule retrain_without_random:
    output:
        retrained="<results>/retrained/random.h5",
    log:
        "<results>/logs/retrain_without_random.log",
    benchmark:
        "<results>/benchmarks/retrain_without_random.tsv"
    conda:
        environment
    threads: 1
    resources:
        mem_mb=job_mb,
        batch_size=compute["batch_size"],
    params:
        code=code_of("retrain"),
        study_file=config["study"],
        spec=specs.random_removals.as_dict(),
    message:
        "Retraining on everything, and without random samples"
    script:
        "../scripts/stage.py"


use rule retrain_without_random as retrain_without_top with:
    input:
        named_by=["<results>/scores/{experiment}.h5"],
    output:
        retrained="<results>/retrained/{experiment}/{group}.h5",
    log:
        "<results>/logs/retrain_without_top/{experiment}/{group}.log",
    benchmark:
        "<results>/benchmarks/retrain_without_top/{experiment}/{group}.tsv"
    wildcard_constraints:
        group=r"\d+",
    params:
        spec=specs.top_removals.as_dict(),
        naming=lambda wildcards: {
            "scores_spec": scores_spec(wildcards),
            "target_ids": specs.removal_groups()[int(wildcards.group) - 1],
        },
    message:
        "Retraining without the most helpful samples, targets of group {wildcards.group}"


use rule retrain_without_random as retrain_without_baseline with:
    input:
        named_by=lambda wildcards: (
            of_ends("embeddings/{c}.h5")
            if wildcards.baseline == "embedding_cosine"
            else []
        ),
    output:
        retrained="<results>/retrained/{experiment}/{baseline}/{group}.h5",
    log:
        "<results>/logs/retrain_without_baseline/{experiment}/{baseline}/{group}.log",
    benchmark:
        "<results>/benchmarks/retrain_without_baseline/{experiment}/{baseline}/{group}.tsv"
    wildcard_constraints:
        group=r"\d+",
        baseline=any_of(removals_baselines),
    params:
        spec=lambda wildcards: (
            specs.top_removals.as_dict() | {"subsets": f"top by {wildcards.baseline}"}
        ),
        naming=lambda wildcards: {
            "checkpoints": specs.self_influence.ends,
            "digest": removals_digest(wildcards.baseline),
            "embeddings_spec": specs.embeddings.as_dict(),
            "target_ids": specs.removal_groups()[int(wildcards.group) - 1],
        },
    message:
        "Retraining without the first samples of {wildcards.baseline}, targets of group {wildcards.group}"


rule compare_removals:
    input:
        scores="<results>/scores/{experiment}.h5",
        random="<results>/retrained/random.h5",
        top=[
            f"{folder}/retrained/{{experiment}}/{i + 1}.h5"
            for i in range(len(specs.removal_groups()))
        ],
        bm25=removals_of("bm25"),
        embedding_cosine=removals_of("embedding_cosine"),
        embeddings=(
            of_ends("embeddings/{c}.h5")
            if "embedding_cosine" in removals_baselines
            else []
        ),
    output:
        removals="<results>/removals/{experiment}.h5",
    log:
        "<results>/logs/compare_removals/{experiment}.log",
    benchmark:
        "<results>/benchmarks/compare_removals/{experiment}.tsv"
    wildcard_constraints:
        experiment=any_of([specs.evaluation["removals"]["experiment"]]),
    conda:
        environment
    threads: 1
    resources:
        mem_mb=job_mb,
    params:
        code=code_of("compare_removals"),
        spec=specs.random_removals.as_dict(),
        groups=specs.removal_groups(),
        digest=removals_digest("bm25"),
    message:
        "Comparing removals for experiment {wildcards.experiment}"
    script:
        "../scripts/stage.py"


groups = range(1, len(specs.removal_groups()) + 1)
removals_experiment = specs.evaluation["removals"]["experiment"]
timed("retrain_without_random")
timed("retrain_without_top/{e}/{group}", e=removals_experiment, group=groups)
timed(
    "retrain_without_baseline/{e}/{baseline}/{group}",
    e=removals_experiment,
    baseline=removals_baselines,
    group=groups,
)
timed("compare_removals/{e}", e=removals_experiment)
