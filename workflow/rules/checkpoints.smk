# The jobs of one rule can have different output files only by wildcards. Runs that save checkpoints
# at different times have output files with different suffixes, so they need separate rules.
for number, (ends, runs) in enumerate(specs.trained_together if trained else []):
    rule_name = f"train_checkpoint_{number + 1}" if number else "train_checkpoint"

    rule:
        name:
            rule_name
        output:
            checkpoints=[f"<results>/checkpoints/{{run}}{end}.pt" for end in ends],
        log:
            "<results>/logs/train_checkpoint/{run}.log",
        benchmark:
            "<results>/benchmarks/train_checkpoint/{run}.tsv"
        wildcard_constraints:
            run=any_of(runs),
        priority: scores_first
        conda:
            environment
        threads: 1
        resources:
            mem_mb=job_mb,
        params:
            code=code_of("train_checkpoint"),
            digest=specs.study_digest,
            study_file=config["study"],
            arguments=lambda w: specs.training_arguments(w.run),
            times=lambda w: specs.times(w.run),
        message:
            "Training {wildcards.run}"
        script:
            "../scripts/stage.py"
