# Files and params of jobs, as functions of their wildcards; there are no rules here.
#
# Snakemake compares params as an unordered set of values, and each value as text. So numbers that
# could change places go into one spec, with its keys sorted. Beside it stand values that no other
# equals.
folder = config["results"]
trained = "training" in config


def own_file(path):
    """A user's own file, in a store or on this disk; a module's `prefix` doesn't move it."""
    if not stored and "://" not in path:
        return ancient(local(path))
    modifier = workflow.modifier.path_modifier
    file = storage(path) if "://" in path else modifier.apply_default_storage(path)
    store = get_flag_value(file, "storage_object")
    if workflow.is_main_process and not store.exists():
        refuse(f"{path} must be in its store. Found nothing at {store.query}.")
    return ancient(file)


@cache
def own_signature(file):
    """Return what tells a user's file, where jobs are planned: a node may not have it.

    Snakemake alone would miss a file replaced by an older one, or changed inside a folder.
    """
    if not workflow.is_main_process:
        return None
    store = get_flag_value(file, "storage_object")
    # A folder of this machine can be a store.
    here = Path(store.query if store else file)
    if not here.exists():
        return f"{store.size()} {store.mtime()}"
    return stat_signature(here) if stored else checkpoint_signatures(results).of(here)


own_checkpoints = (
    {} if trained else {id_: own_file(c.path) for id_, c in specs.checkpoints.items()}
)


def checkpoint_input(wildcards):
    if trained:
        return f"{folder}/checkpoints/{wildcards.checkpoint}.pt"
    return own_checkpoints[wildcards.checkpoint]


def checkpoint_signature(wildcards):
    return None if trained else own_signature(own_checkpoints[wildcards.checkpoint])


def all_signatures(wildcards):
    """Signatures of all checkpoints of a user's, as one text."""
    if trained or not workflow.is_main_process:
        return None
    return " ".join(own_signature(file) for file in own_checkpoints.values())


@cache
def features_spec_of(checkpoint, split):
    # Once for all shards of a split, and their join.
    return specs.features(checkpoint, split).as_dict()


def features_spec(wildcards):
    return features_spec_of(wildcards.checkpoint, wildcards.split)


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
    config["study"] if mentions(Path(config["study"]), {"class_names"}) else None
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
    jobs = list(workflow.dag.jobs)
    scores = {
        f"{folder}/scores/{job.wildcards.experiment}.h5"
        for job in jobs
        if job.rule.name in ("average_scores", "compute_exact_scores")
    }
    if scores:
        logger.info(f"Scores: {', '.join(sorted(scores))}")
    answers = {
        f"{folder}/answers/{job.wildcards.experiment}.html"
        for job in jobs
        if job.rule.name == "draw_influences"
    }
    if answers:
        logger.info(f"Answers: {', '.join(sorted(answers))}")
    lists = {str(job.output[0]) for job in jobs if "listed" in dict(job.output.items())}
    if lists:
        logger.info(f"Lists: {', '.join(sorted(lists))}")
    groups = {str(job.output[0]) for job in jobs if job.rule.name == "sum_groups"}
    if groups:
        logger.info(f"Groups: {', '.join(sorted(groups))}")
    if any(job.rule.name == "write_report" for job in jobs):
        written = Path(folder, "report.html")
        logger.info(f"Report: {written}")
        # One on this disk is another run's if this one's is in a store.
        is_here = written.exists() and not stored
        page = written.read_text(encoding="utf-8") if is_here else ""
        for measure in re.findall('<p class="fit">(.*?)</p>', page):
            logger.info(unescape(measure))
        titles = "; ".join(re.findall('<div class="warning">\n<h3>(.*?)</h3>', page))
        if titles:
            logger.warning(f"The report warns: {unescape(titles)}.")


def naming_samples(by):
    """The files that name samples which models are retrained without, or on, by a choice of them."""
    if by == "top":
        return [f"{folder}/scores/{specs.evaluation['removals']['experiment']}.h5"]
    if by == "embedding_cosine":
        return of_ends("embeddings/{c}.h5")
    return [f"{folder}/lists/{by}.csv"] if by in specs.lists else []
