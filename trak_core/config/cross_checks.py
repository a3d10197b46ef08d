"""Check relations between config keys that the JSON Schema cannot express.

The config must already satisfy the schema and contain its defaults.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trak_core.errors import InputError
from trak_core.model_outputs.about_outputs import TABLE, about_output, output_name
from trak_core.settings import POOL, ProjectionKind, Weighting, removed_sizes, subset_size
from trak_core.settings.target_filter import Condition


def _refuse(code: str, setting: str, rules: Iterable[tuple[bool, str, Any]], remedy: str) -> None:
    """Raise an error if a config with ``setting`` breaks one of the rules for this setting.

    Each rule is a tuple of three parts: whether the config breaks the rule, the requirement in
    words, and the value in the config. ``remedy`` tells the user what to do.
    """
    for is_broken, requirement, value in rules:
        if is_broken:
            raise InputError(f"With `{setting}`, {requirement}. Found {value}. {remedy}", code=code)


def check_relations(config: Mapping[str, Any]) -> None:
    """Raise an error if settings are mutually exclusive or lack a setting that they need."""
    checks = check_exact, check_preconditioner, check_label_draws, check_experiments, check_lists
    for check in checks:
        check(config)
    if "evaluation" in config:
        check_removals(config)
        check_evaluation(config)


def check_exact(config: Mapping[str, Any]) -> None:
    """Raise an error for settings that cannot be combined with ``projection: exact``."""
    if not isinstance(projection := config["projection"], str):
        return
    keep, dtype = config["scoring"]["keep"], config["features_dtype"]
    shards = {"compute": config["compute"]["shards"]}
    shards |= {f"experiments.{name}": own["shards"] for name, own in config["experiments"].items()}
    rules: list[tuple[bool, str, Any]] = [
        (keep != "full", "scoring.keep must be full, as top_k needs projected features", keep),
        *((n != 1, "shards must be 1", f"{n} in {key}.shards") for key, n in shards.items()),
        (dtype != "float32", "no features are stored", f"features_dtype {dtype}"),
        (config["answers"]["tokens"], "scores cannot be split by token", "answers.tokens"),
    ]
    remedy = "Remove the setting that was found, or use a projection."
    _refuse("config.exact", f"projection: {projection}", rules, remedy)


def check_preconditioner(config: Mapping[str, Any]) -> None:
    """Raise an error for settings that cannot be combined with a ``preconditioner``."""
    if config["preconditioner"] == "none":
        return
    projection = config["projection"]
    rules = [
        ("training" in config, "checkpoints must contain the optimizer's state", "`training`"),
        (isinstance(projection, str), "gradients must be projected", f"`projection: {projection}`"),
    ]
    setting = f"preconditioner: {config['preconditioner']}"
    _refuse("config.preconditioner", setting, rules, "Remove one of the two settings.")


def check_label_draws(config: Mapping[str, Any]) -> None:
    """Raise an error for settings that cannot be combined with ``label_draws``."""
    if not (draws := config.get("label_draws", 0)):
        return
    output, scoring = config["model_output"], config["scoring"]
    about, weighting = about_output(output), scoring["weighting"]
    has_noise = about.is_own or about.has_loss_noise
    known = ", ".join(name for name, row in TABLE.items() if row.has_loss_noise)
    rules = [
        (draws < 0, "the number must be at least 0", draws),
        (not has_noise, f"model_output must be a function or one of {known}", output_name(output)),
        (weighting == Weighting.CURVATURE, "scoring.weighting must be plain", weighting),
        (scoring["normalize"], "gradients cannot be normalized", "scoring.normalize"),
    ]
    _refuse("config.label_draws", f"label_draws: {draws}", rules, "Change one of the two settings.")


def lists_of(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of each list of samples in the config's ``lists``, by the list's name.

    If a list has no ``experiment``, it is set to the config's only experiment, or to None if there
    are several.
    """
    lists, experiments = config.get("lists", []), list(config["experiments"])
    only = experiments[0] if len(experiments) == 1 else None
    settings = lists if isinstance(lists, Mapping) else {name: {} for name in lists}
    lists = {name: {"experiment": only} | dict(own) for name, own in settings.items()}
    if "select" in lists:
        lists["select"] = {"fraction": 0.05} | lists["select"]
    return lists


def removals_of(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of each file of results for ``evaluation.removals``, by the file's name.

    Each file is about models that are retrained without some training samples. One file can be for
    an experiment: its key ``by`` lists the methods that choose the samples to remove, which are
    ``top`` (the highest scores), ``random`` and the baselines. The other files are for lists: their
    ``by`` contains only the list's name, and ``fractions`` are the fractions of the training
    samples to remove (for ``select``, to keep). In both cases, the retrained models are evaluated
    on the targets of ``experiment``, which defaults to the list's experiment.
    """
    given, lists = config.get("evaluation", {}).get("removals", {}), lists_of(config)
    removals = {}
    if "experiment" in given:
        by = ["top", "random", *given["baselines"]]
        removals[given["experiment"]] = {**given, "by": by}
    for name in (key for key, own in given.items() if isinstance(own, Mapping)):
        about = lists.get(name, {})
        most = about.get("fraction")
        usual = [most / 4, most / 2, most] if most else [0.05, 0.1, 0.2]
        defaults = {"experiment": about.get("experiment"), "fractions": usual}
        removals[f"lists/{name}"] = {**defaults, **given[name], "by": [name], "list": name}
    return removals


def check_removals(config: Mapping[str, Any]) -> None:
    """Raise an error if ``evaluation.removals`` names a list that cannot be tested."""
    lists = lists_of(config)
    for about in removals_of(config).values():
        if (name := about.get("list")) is None:
            continue
        if name not in lists:
            raise InputError(
                "Every list in evaluation.removals must also be in `lists`, which contains "
                f"{', '.join(lists) or 'none'}. Found {name}.",
                code="config.removals_of_no_list",
            )
        if "pool" in lists[name]:
            raise InputError(
                "Lists in evaluation.removals must consist of training samples. Found select, "
                "which lists samples from a pool. Remove lists.select.pool, or remove select from "
                "evaluation.removals.",
                code="config.removals_of_pool",
            )
        most = lists[name].get("fraction", 1)
        if max(about["fractions"]) > most:
            raise InputError(
                f"evaluation.removals.{name}: fractions must be at most lists.{name}.fraction "
                f"({most}). Found {max(about['fractions'])}.",
                code="config.removals_fractions",
            )


def check_lists(config: Mapping[str, Any]) -> None:
    """Raise an error if a list cannot use its experiment, the model output or the projection."""
    lists, experiments = lists_of(config), list(config["experiments"])
    for name, about in lists.items():
        if about["experiment"] not in experiments:
            raise InputError(
                f"lists.{name}.experiment must be one of {', '.join(experiments)}. Found "
                f"{about['experiment'] or 'none'}.",
                code="config.list_experiment",
            )
    output = config["model_output"]
    if not about_output(output).better and lists.keys() - {"duplicates"}:
        raise InputError(
            "lists need a model output for which a larger value means a smaller loss. Found "
            f"{output_name(output)}. If larger values of your own model output do mean a smaller "
            "loss, add `larger_is_better: true` to the keys of model_output.",
            code="config.list_output",
        )
    pool = "pool" in lists.get("select", {})
    of_features = ["duplicates"] * ("duplicates" in lists) + ["select with a pool"] * pool
    for name in of_features if isinstance(config["projection"], str) else []:
        raise InputError(
            f"lists: {name} needs projected features. Found `projection: {config['projection']}`, "
            "which stores no features. Use a projection, or remove this list.",
            code="config.list_features",
        )
    if pool and POOL in experiments:
        raise InputError(
            f"With lists.select.pool, no experiment may have the name {POOL}. Found {POOL}. Rename "
            "this experiment.",
            code="config.pool_name",
        )


def check_experiments(config: Mapping[str, Any]) -> None:
    """Raise an error if an experiment's ``where`` is invalid or not its only key."""
    for name, about in config["experiments"].items():
        if "where" not in about:
            continue
        Condition.parse(about["where"])
        others = [key for key in ("targets", "data") if key in about]
        others += ["shards"] * (about["shards"] != 1)
        if others:
            raise InputError(
                f"experiments.{name}: an experiment with `where` must have no other key. Found "
                f"{others[0]} as well.",
                code="config.where_alone",
            )


def check_evaluation(config: Mapping[str, Any]) -> None:
    """Raise an error if ``evaluation`` is not possible with the other settings of the config."""
    evaluation, experiments = config["evaluation"], config["experiments"]
    lds, removals = {"subsets", "ground_truth"} & set(evaluation), evaluation.get("removals", {})
    if len(lds) == 2:
        raise InputError(
            "evaluation must have only one of `subsets` and `ground_truth`. Found both. Remove one "
            "of them.",
            code="config.two_truths",
        )
    named = [*evaluation.get("experiments", ())]
    named += [own["experiment"] for own in removals_of(config).values()]
    reasons = {
        "config.unknown_experiment": [name for name in named if name not in experiments],
        "config.evaluated_question": [n for n in named if "data" in experiments.get(n, ())],
    }
    for code, names in reasons.items():
        if names:
            raise InputError(
                "evaluation can use only experiments of the config whose targets are samples of "
                f"target_data(). Found {names[0]!r}. The config's experiments are "
                f"{', '.join(experiments)}.",
                code=code,
            )
    about = experiments.get(removals.get("experiment"), {})
    if about.get("targets") == "all" or "where" in about:
        raise InputError(
            "evaluation.removals needs an experiment whose `targets` are a list of ids. Found "
            f"{removals['experiment']} with `{'where' if 'where' in about else 'targets: all'}`.",
            code="config.removals_of_all",
        )
    if lds and all("data" in experiment for experiment in experiments.values()):
        raise InputError(
            "evaluation needs an experiment whose targets are samples of target_data(), with "
            "`targets` or `where` and without `data`. Found none.",
            code="config.no_own_targets",
        )
    trained = [key for key in ("subsets", "removals") if key in evaluation]
    if trained and "training" not in config:
        raise InputError(
            f"evaluation.{trained[0]} trains models, so the config must have the key `training`. "
            "Found none. For models that were retrained elsewhere, set evaluation.ground_truth.",
            code="config.no_training",
        )
    keep, output = config["scoring"]["keep"], config["model_output"]
    if (lds or "experiment" in removals) and keep != "full":
        raise InputError(
            "evaluation needs the full matrix of scores, so scoring.keep must be full. Found "
            f"{keep}.",
            code="config.incomplete_scores",
        )
    has_classes = about_output(output).labels_are_classes
    if lds and "same_class" in evaluation["baselines"] and not has_classes:
        raise InputError(
            "evaluation.baselines: same_class needs a model_output whose labels are classes. Found "
            f"{output_name(output)}. Remove same_class.",
            code="config.no_classes",
        )
    if not isinstance(projection := config["projection"], str):
        return
    keys = [key for key in ("sweep", "self_influence") if evaluation.get(key)]
    keys += ["baselines: gradient_dot"] * ("gradient_dot" in evaluation["baselines"])
    if keys:
        raise InputError(
            f"evaluation.{keys[0]} needs projected features. Found `projection: {projection}`, "
            "which stores no features.",
            code="config.evaluation_of_features",
        )


def check_columns(proj_dim: int, kind: str, evaluation: Mapping[str, Any]) -> None:
    """Raise an error if the stored features lack columns for a ``proj_dim`` of the sweep."""
    dims = evaluation.get("sweep", {}).get("proj_dim", ())
    nested = [projection for projection in ProjectionKind if projection.about.nested]
    wrong = [dim for dim in dims if dim > proj_dim or (dim < proj_dim and kind not in nested)]
    if wrong:
        raise InputError(
            "Each value in evaluation.sweep.proj_dim is the number of columns to use of the stored "
            f"features, which have {proj_dim}. This value must be at most {proj_dim} if "
            f"projection.kind is {' or '.join(nested)}, and exactly {proj_dim} for other kinds. "
            f"Found {wrong[0]} with {kind}.",
            code="config.sweep_columns",
        )


def check_sizes(evaluation: Mapping[str, Any], n_train: int) -> None:
    """Raise an error if an evaluation needs more training samples than exist."""
    fraction = evaluation.get("subsets", {}).get("fraction", 0.5)
    size = subset_size(n_train, fraction)
    if "subsets" in evaluation and not 0 < size < n_train:
        raise InputError(
            "evaluation.subsets.fraction must keep at least one training sample and leave out at "
            f"least one. Found {fraction}, which keeps {size} of {n_train}.",
            code="config.subset_size",
        )
    removals = evaluation.get("removals", {})
    n_removed = removed_sizes(removals["n_removed"], n_train) if "experiment" in removals else [0]
    if max(n_removed) >= n_train:
        raise InputError(
            f"evaluation.removals.n_removed must be below {n_train}, the number of training "
            f"samples. Found {max(n_removed)}.",
            code="config.too_many_removed",
        )


# Snakemake quotes paths on the command line of a job, and executors for clusters quote the whole
# line once more. Shells interpret these characters even inside nested quotes.
_SIGNS = "'\"`$\\\n\r"


def check_paths(config: Mapping[str, Any], others: Iterable[str]) -> None:
    """Raise an error if a path in a config contains a character that a shell interprets.

    ``others`` contains more paths to check: the config files, and the paths in the config's tables.
    """
    roles = [("a file", path) for path in others] + [("the working folder", str(Path.cwd()))]
    for role, path in [*_paths(config), *roles]:
        if sign := next((s for s in path if s in _SIGNS), None):
            raise InputError(
                "Paths are passed to jobs on a command line and must not contain "
                f"{' '.join(_SIGNS.split())}. Found {sign!r} in {path!r} ({role}). Rename the file "
                "or folder, or use a symbolic link.",
                code="config.shell_sign",
            )


def check_config_entries(entries: Iterable[str]) -> None:
    """Raise an error if a ``key=value`` of ``--config`` has a character that shells interpret."""
    for entry in entries:
        if sign := next((s for s in entry if s in "'\\\n\r"), None):
            raise InputError(
                "--config: executors for clusters pass values through a shell, so values must not "
                f"contain an apostrophe, a backslash or a line break. Found {sign!r} in {entry!r}. "
                "Write the values into a config file, and name the file after --configfile.",
                code="config.shell_value",
            )


def _paths(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of each setting in a config that is a path."""
    yield "study", config["study"]
    yield "model_output", output_name(config.get("model_output", ""))
    if isinstance(config["checkpoints"], str):
        yield "checkpoints", config["checkpoints"]
    for name, experiment in config["experiments"].items():
        for key in ("targets", "data"):
            if isinstance(experiment.get(key), str):
                yield f"experiments.{name}.{key}", experiment[key]
    for file in config["data_files"]:
        yield "data_files", file
    yield "lists.select.pool", lists_of(config).get("select", {}).get("pool", "")
    yield "evaluation.ground_truth", config.get("evaluation", {}).get("ground_truth", "")
    yield "compute.conda", config["compute"].get("conda", "")
