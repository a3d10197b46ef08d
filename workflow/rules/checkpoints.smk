# One rule for the runs whose files are named alike, and one more for them with flipped labels. What a
# rule leaves can differ by its wildcards alone, and runs may have other times each.
trainings = {"train_checkpoint": ("", None)}
if "flipped" in specs.evaluation:
    trainings["train_checkpoint_flipped"] = ("flipped/", specs.flipped)
for rule_name, (place, flipped) in trainings.items():
    for number, (ends, runs) in enumerate(specs.trained_together if trained else []):

        rule:
            name:
                f"{rule_name}_{number + 1}" if number else rule_name
            output:
                checkpoints=[
                    f"<results>/{place}checkpoints/{{run}}{end}.pt" for end in ends
                ],
            log:
                f"<results>/logs/{rule_name}/{{run}}.log",
            benchmark:
                f"<results>/benchmarks/{rule_name}/{{run}}.tsv"
            wildcard_constraints:
                run=any_of(runs),
            priority: 0 if flipped else scores_first
            conda:
                environment
            threads: 1
            resources:
                mem_mb=job_mb,
            params:
                code=code_of("train_checkpoint"),
                digest=specs.digests["training"],
                study_file=config["study"],
                arguments=lambda wildcards: specs.training_arguments(wildcards.run),
                times=lambda wildcards: specs.times(wildcards.run),
                flipped=flipped,
            message:
                f"Training {{wildcards.run}}{' with flipped labels' if flipped else ''}"
            script:
                "../scripts/stage.py"

        timed(f"{rule_name}/{{run}}", run=runs)
