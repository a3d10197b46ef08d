# Asked for by name: `snakemake compare --config compare=<another run's results>`.
if workflow.is_main_process:
    gone = [
        path
        for experiment in experiments
        if not (path := Path(config["compare"], "scores", f"{experiment}.h5")).exists()
    ]
    if gone:
        raise WorkflowError(
            "`compare` must be the results folder of a run with the same experiments. Found "
            f"nothing at: {', '.join(map(str, gone))}."
        )


rule compare_runs:
    input:
        ours=[f"{folder}/scores/{experiment}.h5" for experiment in experiments],
        theirs=[
            ancient(f"{config['compare']}/scores/{experiment}.h5")
            for experiment in experiments
        ],
    output:
        comparison="<results>/comparison.h5",
    log:
        "<results>/logs/compare_runs.log",
    benchmark:
        "<results>/benchmarks/compare_runs.tsv"
    conda:
        "../envs/trak.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=job_mb,
        runtime=job_minutes,
    params:
        code=code_digest("trak_core.stages.compare_runs"),
        signature=[
            stat_signature(Path(config["compare"], "scores", f"{experiment}.h5"))
            for experiment in experiments
        ],
        settings=ordered({"experiments": list(experiments), "top": scoring["top"]}),
    message:
        "Comparing two runs; the table is in {log}"
    script:
        "../scripts/compare_runs.py"
