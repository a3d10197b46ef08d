rule retrain_without_random:
    output:
        retrained="<results>/retrained/random.h5",
    log:
        "<results>/logs/retrain_without_random.log",
    benchmark:
        "<results>/benchmarks/retrain_without_random.tsv"
    conda:
        "../envs/trak.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=job_mb,
        runtime=job_minutes,
        batch_size=compute["batch_size"],
    params:
        code=code_digest("trak_core.stages.retrain_without"),
        study=config["study"],
        settings=ordered(removals() | {"experiment": None, "targets": []}),
    message:
        "Retraining on everything, and without random samples"
    script:
        "../scripts/retrain_without.py"


use rule retrain_without_random as retrain_without_top with:
    input:
        scores="<results>/scores/{experiment}.h5",
    output:
        retrained="<results>/retrained/{experiment}/{group}.h5",
    log:
        "<results>/logs/retrain_without_top/{experiment}/{group}.log",
    benchmark:
        "<results>/benchmarks/retrain_without_top/{experiment}/{group}.tsv"
    wildcard_constraints:
        group=r"\d+",
    params:
        settings=lambda wildcards: ordered(
            removals()
            | {
                "experiment": {"experiment": wildcards.experiment, "study": study},
                "targets": removals_groups()[int(wildcards.group) - 1],
            }
        ),
    message:
        "Retraining without the most helpful samples, targets of group {wildcards.group}"


rule compare_removals:
    input:
        scores="<results>/scores/{experiment}.h5",
        random="<results>/retrained/random.h5",
        top=[
            f"{folder}/retrained/{{experiment}}/{i + 1}.h5"
            for i in range(len(removals_groups()))
        ],
    output:
        removals="<results>/removals/{experiment}.h5",
    log:
        "<results>/logs/compare_removals/{experiment}.log",
    benchmark:
        "<results>/benchmarks/compare_removals/{experiment}.tsv"
    wildcard_constraints:
        experiment=any_of([evaluation["removals"]["experiment"]]),
    conda:
        "../envs/trak.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=job_mb,
        runtime=job_minutes,
    params:
        code=code_digest("trak_core.stages.compare_removals"),
        settings=ordered(
            {
                "draws": evaluation["removals"]["draws"],
                "groups": removals_groups(),
                "n_removed": evaluation["removals"]["n_removed"],
                "seeds": evaluation["removals"]["seeds"],
                "spec": removals(),
            }
        ),
    message:
        "Comparing removals for experiment {wildcards.experiment}"
    script:
        "../scripts/compare_removals.py"
