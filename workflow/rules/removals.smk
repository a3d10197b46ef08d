removal_jobs = specs.removal_jobs


def naming_samples(by):
    """Return the files from which the samples to remove, or to train on, are chosen."""
    if by == "top":
        return [f"{folder}/scores/{specs.evaluation['removals']['experiment']}.h5"]
    if by == "embedding_cosine":
        return of_ends("embeddings/{c}.h5")
    return [f"{folder}/lists/{by}.csv"] if by in specs.lists else []


# `by` is random, top (the largest scores of a target), a baseline, or a list.
use rule stage as retrain_removals with:
    input:
        named_by=lambda wildcards: naming_samples(wildcards.by),
    output:
        retrained="<results>/retrained/{by}/{part}.h5",
    log:
        "<results>/logs/retrain_removals/{by}/{part}.log",
    benchmark:
        "<results>/benchmarks/retrain_removals/{by}/{part}.tsv"
    wildcard_constraints:
        by=any_of(removal_jobs),
        part=r"\d+",
    resources:
        mem_mb=job_mb,
        batch_size=compute["batch_size"],
    params:
        code=code_of("retrain"),
        study_file=config["study"],
        spec=lambda wildcards: specs.removals_spec(wildcards.by).as_dict(),
        naming=lambda wildcards: removal_jobs[wildcards.by][int(wildcards.part)],
    message:
        "Retraining without or only on chosen samples: {wildcards.by}, part {wildcards.part}"


use rule stage as compare_removals with:
    input:
        scores=lambda wildcards: (
            f"{folder}/scores/{specs.removals[wildcards.removed]['experiment']}.h5"
        ),
        retrained=lambda wildcards: [
            f"{folder}/retrained/{by}/{part}.h5"
            for by in specs.removals[wildcards.removed]["by"]
            for part in range(len(removal_jobs[by]))
        ],
        named_by=lambda wildcards: [
            file
            for by in specs.removals[wildcards.removed]["by"]
            for file in naming_samples(by)
            if by != "top"
        ],
    output:
        removals="<results>/removals/{removed}.h5",
    log:
        "<results>/logs/compare_removals/{removed}.log",
    benchmark:
        "<results>/benchmarks/compare_removals/{removed}.tsv"
    wildcard_constraints:
        removed=any_of(specs.removals),
    params:
        code=code_of("compare_removals"),
        spec=lambda wildcards: (
            specs.removals_spec(specs.removals[wildcards.removed]["by"][0]).as_dict()
        ),
        naming=lambda wildcards: {
            by: removal_jobs[by] for by in specs.removals[wildcards.removed]["by"]
        },
    message:
        "Comparing removals: {wildcards.removed}"
