# Files and params of jobs, as functions of their wildcards; there are no rules here.
#
# Snakemake compares params as an unordered set of values, and each value as text. So numbers that
# could change places go into one spec, with its keys sorted. Beside it stand values that no other
# equals.
compute, scoring = config["compute"], config["scoring"]
folder, trained = config["results"], "training" in config
any_of = lambda names: "|".join(map(re.escape, names)) or "(?!)"


pathvars:
    results=config["results"],


wildcard_constraints:
    checkpoint=any_of(specs.checkpoints),
    experiment=any_of(specs.scored),
    split=any_of(specs.shards),
    shard=r"\d+",


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


train_features = (
    of_checkpoints("features/{c}/train.h5") if scoring["keep"] == "top_k" else []
)


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


# On Kubernetes 0 would be a request too.
gpu = 1 if compute["device"] == "cuda" else None
# A path of a conda environment's file would count from this folder, a name is one of an environment.
environment = compute.get("conda", "../envs/trak.yaml")
if "conda" in compute and environment.endswith((".yaml", ".yml")):
    environment = str(Path(environment).absolute())
# The priority of rules that make scores and figures: they run before trainings that only measure.
scores_first = 10


def code_of(stage):
    """The stage, by which its job is run, and a hash of the code that it may run."""
    return f"{stage} {stage_digest(stage_module(stage))}"


def job_mb(wildcards, attempt):
    # Interpreter, torch and a study's own data come on top of the arrays.
    return attempt * (compute["memory_mb"] + 1500)


def model_job_mb(wildcards, attempt):
    # And the weights of a large model: a job of several checkpoints has one at a time.
    asked = getattr(wildcards, "checkpoint", None)
    weights = largest_weights_mb(specs, results, asked)
    return job_mb(wildcards, attempt) + attempt * weights


def shards_of(wildcards):
    n = specs.shards[wildcards.split]
    shards = f"{folder}/shards/{wildcards.checkpoint}/{wildcards.split}"
    return [f"{shards}/{i}-of-{n}.h5" for i in range(1, n + 1)]


def scores_shards(wildcards):
    """The parts of an average, which is cut as training features are."""
    n = compute["shards"]
    shards = f"{folder}/scores/{wildcards.experiment}/shards"
    return [f"{shards}/{i}-of-{n}.h5" for i in range(1, n + 1)] if n > 1 else []
