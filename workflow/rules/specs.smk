# Files and params of jobs, as functions of their wildcards; there are no rules here.
#
# Snakemake compares params as an unordered set of values, and each value as text. So numbers that
# could change places go into one spec, with its keys sorted. Beside it stand values that no other
# equals.
folder = config["results"]
trained = "training" in config


def own_file(path):
    """A user's own file, which a module's `prefix` doesn't move, and what tells its content.

    Snakemake alone would miss a file replaced by an older one, or changed inside a folder. Only
    where jobs are planned: a node may not have it.
    """
    if not stored and "://" not in path:
        return ancient(local(path)), digests.get(path)
    file = storage(path) if "://" in path else placed.apply_default_storage(path)
    if not workflow.is_main_process:
        return ancient(file), None
    store = get_flag_value(file, "storage_object")
    with explained():
        return ancient(file), stored_signature(path, store, results)


own_checkpoints = (
    {} if trained else {id_: own_file(c.path) for id_, c in specs.checkpoints.items()}
)


def checkpoint_input(wildcards):
    if trained:
        return f"{folder}/checkpoints/{wildcards.checkpoint}.pt"
    return own_checkpoints[wildcards.checkpoint][0]


def checkpoint_signature(wildcards):
    return None if trained else own_checkpoints[wildcards.checkpoint][1]


def features_spec(wildcards):
    return specs.features(wildcards.checkpoint, wildcards.split).as_dict()


def embeddings_spec(wildcards):
    return specs.embeddings.under(wildcards.checkpoint).as_dict()


def checkpoint_scores_spec(wildcards):
    return specs.checkpoint_scores(wildcards.experiment, wildcards.checkpoint).as_dict()


def scores_spec(wildcards):
    return specs.scores(wildcards.experiment).as_dict()


def split_targets(wildcards):
    return specs.experiments.get(wildcards.split)


def selected_targets(wildcards):
    """The file that says which targets a description matches, if there is one."""
    return [
        f"{folder}/targets/{e}.h5" for e in specs.conditions if e == wildcards.split
    ]


def split_question(wildcards):
    return specs.questions.get(wildcards.split)


def of_checkpoints(pattern, of=specs.checkpoints):
    """One file a checkpoint; the pattern's other wildcards stay."""
    return [f"{folder}/{pattern}".replace("{c}", c) for c in of]


def of_ends(pattern):
    """One file for each run, of its last checkpoint."""
    return of_checkpoints(pattern, specs.self_influence.ends)


# The study, where lists may have its names of classes.
naming_study = (
    config["study"] if mentions(Path(config["study"]), "class_names") else None
)


def list_scores(kind):
    """The scores that a list is made of: of training samples, or of a pool."""
    of = "pool" if kind == "select" and specs.pool is not None else "scores"
    return f"{folder}/{of}/{specs.lists[kind]['experiment']}.h5"


def shards_of(wildcards):
    n = specs.shards[wildcards.split]
    shards = f"{folder}/shards/{wildcards.checkpoint}/{wildcards.split}"
    return [f"{shards}/{i}-of-{n}.h5" for i in range(1, n + 1)]


train_features = (
    of_checkpoints("features/{c}/train.h5") if scoring["keep"] == "top_k" else []
)


def scores_shards(wildcards):
    """The parts of an average, which is cut as training features are."""
    n = compute["shards"]
    shards = f"{folder}/scores/{wildcards.experiment}/shards"
    return [f"{shards}/{i}-of-{n}.h5" for i in range(1, n + 1)] if n > 1 else []


# The files that Snakemake's `benchmark:` leaves. In a store they are inputs of the report. Elsewhere
# it reads what is there, so that nothing runs again where they were deleted.
timings = []


def timed(job, /, **names):
    timings.extend(expand(f"<results>/benchmarks/{job}.tsv", **names))


# The files that a config wants beside scores: none for what it leaves out.
group_files = [f"{folder}/groups/{e}.h5" for e in specs.scored if "groups" in config]
evaluation_files = [f"{folder}/evaluation/{e}.h5" for e in specs.measured]
removals_files = [f"{folder}/removals/{name}.h5" for name in specs.removals]
self_influence_files = [f"{folder}/self_influence.h5"] * bool(
    specs.evaluation.get("self_influence")
)
# What pages show of training samples, where something else needs it too.
known_self_influence = self_influence_files or (
    [f"{folder}/self_influence.h5"] * ("suspects" in specs.lists and specs.is_projected)
)
measured_files = [*(evaluation_files + removals_files + self_influence_files)]


def name_results():
    """Say where a run has put what its user wants to read."""
    kinds = {
        "Scores": [f"{folder}/scores/{e}.h5" for e in specs.scored],
        "Answers": [f"{folder}/answers/{e}.html" for e in specs.scored],
        "Lists": [f"{folder}/lists/{kind}.csv" for kind in specs.lists],
        "Groups": group_files,
        "Report": [f"{folder}/report.html"],
    }
    for kind, files in kinds.items():
        there = [file for file in files if stored or Path(file).exists()]
        if there:
            logger.info(f"{kind}: {', '.join(sorted(there))}")
    if not stored:
        measures, warnings = told_by_report(results)
        for measure in measures:
            logger.info(measure)
        if warnings:
            logger.warning(f"The report warns: {'; '.join(warnings)}.")


def naming_samples(by):
    """The files that name samples which models are retrained without, or on, by a choice of them."""
    if by == "top":
        return [f"{folder}/scores/{specs.evaluation['removals']['experiment']}.h5"]
    if by == "embedding_cosine":
        return of_ends("embeddings/{c}.h5")
    return [f"{folder}/lists/{by}.csv"] if by in specs.lists else []
