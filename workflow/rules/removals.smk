removal_jobs = specs.removal_jobs
# The methods that choose the removed samples, for the job that compares removals.
methods = lambda w: specs.removals[w.removed]["by"]


def naming_samples(by):
    """Return the files from which the method `by` chooses samples to remove or to train on."""
    if by == "top":
        return [f"{folder}/scores/{specs.evaluation['removals']['experiment']}.h5"]
    if by == "embedding_cosine":
        return of_ends("embeddings/{c}.h5")
    return [f"{folder}/lists/{by}.csv"] if by in specs.lists else []


# The wildcard `by` is random, top (the highest scores for a target), a baseline, or a list.
use rule stage as retrain_removals with:
    input:
        named_by=lambda w: naming_samples(w.by),
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
        spec=lambda w: specs.removals_spec(w.by).as_dict(),
        naming=lambda w: removal_jobs[w.by][int(w.part)],
    message:
        "Retraining without, or only on, chosen samples: {wildcards.by}, part {wildcards.part}"


use rule stage as compare_removals with:
    input:
        scores=lambda w: f"{folder}/scores/{specs.removals[w.removed]['experiment']}.h5",
        retrained=lambda w: [
            f"{folder}/retrained/{by}/{part}.h5"
            for by in methods(w)
            for part in range(len(removal_jobs[by]))
        ],
        named_by=lambda w: [
            file for by in methods(w) for file in naming_samples(by) if by != "top"
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
        spec=lambda w: specs.removals_spec(methods(w)[0]).as_dict(),
        naming=lambda w: {by: removal_jobs[by] for by in methods(w)},
    message:
        "Comparing removals: {wildcards.removed}"
