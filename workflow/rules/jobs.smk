# What each job needs to know, as functions of its wildcards; there are no rules here.
#
# Snakemake compares params as an unordered set of values, and each value as text: settings therefore
# go into one dict a job, with its keys sorted.


def targets_digest(split):
    return ids_digest(experiments[split]) if split in experiments else None


def checkpoint_path(wildcards):
    if "training" in config:
        return f"{config['results']}/checkpoints/{wildcards.checkpoint}.pt"
    return checkpoints[wildcards.checkpoint]


if "training" in config:
    checkpoint_input = checkpoint_path
else:
    # A user's own file counts by its size and time, in a param: Snakemake alone would miss one
    # that was replaced by an older file, or changed inside a folder.
    checkpoint_input = ancient(checkpoint_path)
    if workflow.is_main_process:
        gone = [path for path in checkpoints.values() if not Path(path).exists()]
        if gone:
            raise WorkflowError(
                f"Checkpoints must exist. Found nothing at: {', '.join(gone)} "
                f"(from {os.getcwd()})."
            )


def checkpoint_signature(wildcards):
    path = Path(checkpoint_path(wildcards))
    return None if "training" in config else stat_signature(path)


def training_arguments(wildcards):
    return ordered(config["training"] | checkpoints[wildcards.checkpoint])


# What decides the numbers of all features, or gramians, of this config.
features_settings = {
    "model_output": config["model_output"],
    "parameter_patterns": parameter_patterns,
    "projection": {"kind": EXACT} if exact else config["projection"],
    "dtype": "float64" if exact else config["features_dtype"],
    "study": study,
}


def features_spec(wildcards):
    """What decides the numbers of a split's features or gramian."""
    return ordered(
        features_settings
        | {
            "checkpoint": wildcards.checkpoint,
            "targets": experiments.get(wildcards.split),
        }
    )


def distortion_spec(wildcards):
    """What decides the numbers of a checkpoint's distortion; how features are stored does not."""
    return ordered(
        features_settings
        | {
            "checkpoint": wildcards.checkpoint,
            "targets": None,
            "dtype": "float64",
            "distortion": config["distortion"],
        }
    )


def expected_features(checkpoint, split):
    """What features or gramians must say of themselves to be used under today's config."""
    return ordered(
        features_settings
        | {
            "checkpoint": checkpoint,
            "split": split,
            "targets_digest": targets_digest(split),
        }
    )


def shards_of(wildcards):
    n = shards[wildcards.split]
    folder = f"{config['results']}/shards/{wildcards.checkpoint}/{wildcards.split}"
    return [f"{folder}/{i}-of-{n}.h5" for i in range(1, n + 1)]


def expected_scores(wildcards):
    """What each checkpoint's scores must say of themselves, and in which order."""
    return ordered(
        features_settings
        | {
            "experiment": wildcards.experiment,
            "targets_digest": targets_digest(wildcards.experiment),
            "checkpoints": list(checkpoints),
            "damping": scoring["damping"],
            "weighting": scoring["weighting"],
        }
    )


def checkpoint_scores(wildcards):
    return [
        f"{config['results']}/scores/{wildcards.experiment}/{c}.h5" for c in checkpoints
    ]


def streamed_features(wildcards):
    if scoring["keep"] == "full":
        return []
    return [f"{config['results']}/features/{c}/train.h5" for c in checkpoints]
