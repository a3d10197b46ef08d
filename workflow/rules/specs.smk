# Functions that return the files and params of a job, given the job's wildcards `w`.
#
# Snakemake compares the params of a job as a set of texts, and would not notice if two params
# exchanged their values. Therefore, all numbers are in one param (the spec), and the values of other
# params cannot be equal.
compute, scoring = config["compute"], config["scoring"]
folder, trained = config["results"], "training" in config
any_of = lambda names: "|".join(map(re.escape, names)) or "(?!)"


pathvars:
    results=config["results"],


wildcard_constraints:
    checkpoint=any_of(specs.checkpoints),
    experiment=any_of(specs.experiments),
    split=any_of(specs.shards),


def own_file(path):
    """Return the input of a rule for a user's file, and a text that changes with its content.

    The text is a param of the job, because Snakemake does not notice if the file is replaced by an
    older one, or if a file in a folder changes. In a process that only runs a job, the text is None,
    because the node may not have the file. The `prefix` of a module does not change the path.
    """
    if not stored and "://" not in path:
        return ancient(local(path)), digests.get(path)
    file = storage(path) if "://" in path else placed.apply_default_storage(path)
    if not workflow.is_main_process:
        return ancient(file), None
    store = get_flag_value(file, "storage_object")
    with explained():
        return ancient(file), preflight.stored_signature(path, store, results)


# The file of each checkpoint, and the text that changes with the file's content. This text is None
# for a checkpoint that the pipeline trains.
checkpoint_files = {
    id_: (f"{folder}/checkpoints/{id_}.pt", None) if trained else own_file(c.path)
    for id_, c in specs.checkpoints.items()
}
checkpoint_input = lambda w: checkpoint_files[w.checkpoint][0]
checkpoint_signature = lambda w: checkpoint_files[w.checkpoint][1]
features_spec = lambda w: specs.features(w.checkpoint, w.split).as_dict()
scores_spec = lambda w: specs.scores(w.experiment).as_dict()
checkpoint_scores_spec = lambda w: (
    specs.scores(w.experiment).under(w.checkpoint).as_dict()
)
split_targets = lambda w: specs.experiments.get(w.split)
split_question = lambda w: specs.questions.get(w.split)
question = lambda w: specs.questions.get(w.experiment)


def selected_targets(w):
    """Return a list with the file of selected targets, or [] without a `where` condition."""
    return [f"{folder}/targets/{w.split}.h5"] * (w.split in specs.conditions)


def of_checkpoints(pattern, checkpoints=specs.checkpoints):
    """Return a file for each checkpoint, whose id replaces `{c}` in `pattern`."""
    return [f"{folder}/{pattern}".replace("{c}", c) for c in checkpoints]


def of_ends(pattern):
    """Return a file for the last checkpoint of each run. The checkpoint's id replaces `{c}`."""
    return of_checkpoints(pattern, specs.self_influence.ends)


# With top_k, the files of single checkpoints contain no scores. Therefore, the rules that average
# scores compute them from features.
train_features = (
    of_checkpoints("features/{c}/train.h5") if scoring["keep"] == "top_k" else []
)


# The files that a config can request in addition to scores.
group_files = [
    f"{folder}/groups/{e}.h5" for e in specs.experiments if "groups" in config
]
evaluation_files = [f"{folder}/evaluation/{e}.h5" for e in specs.measured]
removals_files = [f"{folder}/removals/{name}.h5" for name in specs.removals]
self_influence_files = [f"{folder}/self_influence.h5"] * bool(
    specs.evaluation.get("self_influence")
)
# Pages show self-influences only if they are computed anyway, for an evaluation or a list.
known_self_influence = self_influence_files or (
    [f"{folder}/self_influence.h5"] * ("suspects" in specs.lists and specs.is_projected)
)
measured_files = evaluation_files + removals_files + self_influence_files


# None means no request for a GPU. On Kubernetes, even 0 would be a request.
gpu = 1 if compute["device"] == "cuda" else None
# `conda` is a file or the name of an environment. In a config, a path is relative to the working
# folder, but Snakemake would resolve it relative to this folder.
environment = compute.get("conda", "../envs/trak.yaml")
if "conda" in compute and environment.endswith((".yaml", ".yml")):
    environment = str(Path(environment).absolute())
# The priority of the rules for scores and pages, whose jobs should run before the evaluation.
scores_first = 10


def code_of(stage):
    """Return the name of a stage and a hash of the code that it may run."""
    return f"{stage} {stage_digest(stage_module(stage))}"


def job_mb(wildcards, attempt):
    # 1500 MiB are for the interpreter, torch and the study's data, in addition to the arrays.
    return attempt * (compute["memory_mb"] + 1500)


def model_job_mb(wildcards, attempt):
    # A job for several checkpoints loads one at a time, so it needs memory for the largest.
    name = getattr(wildcards, "checkpoint", None)
    weights = preflight.largest_weights_mb(specs, results, name)
    return job_mb(wildcards, attempt) + attempt * weights
