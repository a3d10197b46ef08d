rule retrain_list:
    input:
        named_by=["<results>/lists/{kind}.csv"],
    output:
        retrained="<results>/retrained/lists/{kind}/{draw}.h5",
    log:
        "<results>/logs/retrain_list/{kind}/{draw}.log",
    benchmark:
        "<results>/benchmarks/retrain_list/{kind}/{draw}.tsv"
    wildcard_constraints:
        kind=any_of(specs.proofs),
        draw=r"\d+",
    conda:
        environment
    threads: 1
    resources:
        mem_mb=job_mb,
        batch_size=compute["batch_size"],
    params:
        code=code_of("retrain"),
        study_file=config["study"],
        spec=specs.list_retraining.as_dict(),
        naming=lambda wildcards: {
            "fractions": specs.proofs[wildcards.kind]["fractions"],
            "kind": wildcards.kind,
        },
    message:
        "Retraining by the list {wildcards.kind}, draw {wildcards.draw}"
    script:
        "../scripts/stage.py"


rule prove_list:
    input:
        scores=lambda wildcards: (
            f"{folder}/scores/{specs.proofs[wildcards.kind]['experiment']}.h5"
        ),
        retrained=lambda wildcards: [
            f"{folder}/retrained/lists/{wildcards.kind}/{draw}.h5"
            for draw in range(specs.proofs[wildcards.kind]["seeds"])
        ],
        listed="<results>/lists/{kind}.csv",
    output:
        proof="<results>/proof/{kind}.h5",
    log:
        "<results>/logs/prove_list/{kind}.log",
    benchmark:
        "<results>/benchmarks/prove_list/{kind}.tsv"
    wildcard_constraints:
        kind=any_of(specs.proofs),
    conda:
        environment
    threads: 1
    resources:
        mem_mb=job_mb,
    params:
        code=code_of("prove_list"),
        spec=specs.list_retraining.as_dict(),
    message:
        "Comparing the list {wildcards.kind} with random samples"
    script:
        "../scripts/stage.py"


for kind in specs.proofs:
    timed("retrain_list/{kind}/{d}", kind=kind, d=range(specs.proofs[kind]["seeds"]))
timed("prove_list/{kind}", kind=specs.proofs)
