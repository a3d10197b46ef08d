"""Check keys and paths of a config, and fill in the defaults that follow from other keys.

For a config that its schema accepts; standard library only.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trak_core.errors import InputError
from trak_core.model_outputs.about_outputs import TABLE, about_output, output_name
from trak_core.spec import (
    GAUSS_NEWTON,
    POOL,
    Combine,
    ProjectionKind,
    Weighting,
    removed_sizes,
    subset_size,
)
from trak_core.spec.target_filter import MOST_TARGETS, Condition

_FEATURES_ONLY = ("sweep", "self_influence")


def check_exact(config: Mapping[str, Any]) -> None:
    """Refuse what scores without projected features can't do, for a config with defaults."""
    if not isinstance(way := config["projection"], str):
        return
    shards = {"compute.shards": config["compute"]["shards"]} | {
        f"experiments.{name}.shards": experiment["shards"]
        for name, experiment in config["experiments"].items()
    }
    keep, dtype = config["scoring"]["keep"], config["features_dtype"]
    cuts = config["answers"]["tokens"]
    pairs = "shards must be 1: all training samples count in one job"
    rules = [
        (keep != "full", "scoring.keep must be full: top_k streams projected features", keep),
        *((n != 1, pairs, f"{n} in {key}") for key, n in shards.items()),
        (dtype != "float32", "no features are stored", f"features_dtype {dtype}"),
        (cuts, "there are no features to cut scores by", "answers.tokens"),
    ]
    if way == GAUSS_NEWTON:
        known = [name for name, row in TABLE.items() if row.has_loss_hessian]
        output, scoring = config["model_output"], config["scoring"]
        unknown = f"the loss's Hessian must be known: model_output {', '.join(known)}"
        norm = "scoring.combine must be another: what it divides by isn't computed"
        plain = "scoring.weighting must be plain: the matrix has all curvature of the loss"
        rules += [
            (not about_output(output).has_loss_hessian, unknown, output_name(output)),
            (scoring["combine"] == Combine.UNIT_AVERAGE, norm, Combine.UNIT_AVERAGE),
            (scoring["weighting"] == Weighting.CURVATURE, plain, Weighting.CURVATURE),
            (scoring["normalize"], "gradients keep their lengths", "scoring.normalize"),
        ]
    _refuse("config.exact", f"projection: {way}", rules, "Leave it out, or take a projection.")


def check_preconditioner(config: Mapping[str, Any]) -> None:
    """Refuse second moments that are not there, or where nothing takes them."""
    if config["preconditioner"] == "none":
        return
    projection = config["projection"]
    rules = [
        ("training" in config, "checkpoints must bring their optimizer's state", "`training`"),
        (isinstance(projection, str), "gradients must be projected", f"`projection: {projection}`"),
    ]
    setting = f"preconditioner: {config['preconditioner']}"
    _refuse("config.preconditioner", setting, rules, "Leave either out.")


def lists_of(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a config's lists by name, each with its settings and the experiment that counts.

    That is the config's only one, unless the list names one; None where there are several.
    """
    given, experiments = config.get("lists", []), list(config["experiments"])
    only = experiments[0] if len(experiments) == 1 else None
    settings = given if isinstance(given, Mapping) else {name: {} for name in given}
    lists = {name: {"experiment": only} | dict(own) for name, own in settings.items()}
    if "select" in lists:
        lists["select"] = {"fraction": 0.05} | lists["select"]
    return lists


def removals_of(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is compared with random removals, by the name of its file, with its settings.

    ``by`` says what chooses samples: for an experiment's targets ``random``, ``top`` (the scores)
    and baselines; a ``list`` alone. Then ``experiment`` is the one whose targets are looked at,
    that of the list unless another is named, and ``fractions`` are the parts of the training
    samples that are left out, or kept.
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
    """Refuse removals of lists that are not made, or of samples that aren't trained on."""
    lists = lists_of(config)
    for about in removals_of(config).values():
        name = about.get("list")
        if name is None:
            continue
        if name not in lists:
            raise InputError(
                f"evaluation.removals must name lists of the config, under `lists`. Found {name} "
                f"and `lists` of {', '.join(lists) or 'none'}.",
                code="config.removals_of_no_list",
            )
        if "pool" in lists[name]:
            raise InputError(
                "evaluation.removals trains on the study's train_data(). Found select, whose "
                "samples are a pool's: leave it out, and compare models that you train on them.",
                code="config.removals_of_pool",
            )
        most = lists[name].get("fraction", 1)
        if max(about["fractions"]) > most:
            raise InputError(
                f"evaluation.removals.{name} must have fractions of the list, at most lists.{name}."
                f"fraction, {most}. Found {max(about['fractions'])}. Raise that of the list.",
                code="config.removals_fractions",
            )


def check_lists(config: Mapping[str, Any]) -> None:
    """Refuse lists of an experiment that is not there, or that nobody named out of several."""
    lists, experiments = lists_of(config), list(config["experiments"])
    for name, about in lists.items():
        if about["experiment"] not in experiments:
            example = f"lists: {{{name}: {{experiment: {experiments[0]}}}}}"
            raise InputError(
                f"lists: {name} must have the experiment whose targets count, one of "
                f"{', '.join(experiments)}. Found {about['experiment'] or 'none'}. Write "
                f"`{example}`, say.",
                code="config.list_experiment",
            )
    blamed = lists.get("suspects", {}).get("experiment")
    if blamed and "minus" in config["experiments"][blamed]:
        raise InputError(
            "lists: suspects needs targets whose labels are right, which its samples harm. Found "
            f"{blamed}, a difference of two means. Name the experiment that has the targets.",
            code="config.suspects_of_difference",
        )
    better = about_output(output := config["model_output"]).better
    if not better and lists.keys() - {"duplicates"}:
        raise InputError(
            "lists need a model output that says what improves a target. Found "
            f"{output_name(output)}, which doesn't. If a larger f always means a smaller loss, "
            "add `larger_is_better: true` to the keys of model_output.",
            code="config.list_output",
        )
    pool = "pool" in lists.get("select", {})
    of_features = ["duplicates"] * ("duplicates" in lists) + ["select with a pool"] * pool
    for name in lists if better == "closer" else of_features:
        if "mean" in config["experiments"][compared := lists[name.split()[0]]["experiment"]]:
            raise InputError(
                f"lists: {name} needs targets of an experiment's own. Found {compared}, which is a "
                "mean. Name the experiment that has the targets.",
                code="config.list_of_mean",
            )
    for name in of_features if isinstance(config["projection"], str) else []:
        raise InputError(
            f"lists: {name} compares projected features. Found `projection: "
            f"{config['projection']}`, which keeps none. Leave it out, or take a projection.",
            code="config.list_features",
        )
    if pool and POOL in experiments:
        raise InputError(
            f"experiments: none must be called {POOL} where lists.select has a pool, whose files "
            f"are called so. Found {POOL}. Rename it.",
            code="config.pool_name",
        )


def check_conditions(config: Mapping[str, Any]) -> None:
    """Refuse descriptions of targets that can't be read, and what they can't be combined with."""
    for name, about in config["experiments"].items():
        if "where" not in about:
            continue
        Condition.parse(about["where"])
        beside = [key for key in ("targets", "data") if key in about]
        beside += ["shards"] * (about["shards"] != 1)
        if beside:
            raise InputError(
                f"experiments.{name}: `where` must stand alone: it chooses {MOST_TARGETS} targets "
                "at most, out of all of the study's target_data(). "
                f"Found {beside[0]} beside it. Leave either out.",
                code="config.where_alone",
            )


def check_means(config: Mapping[str, Any]) -> None:
    """Refuse means of experiments that are not there, or are means themselves."""
    experiments = config["experiments"]
    own = [name for name, about in experiments.items() if "mean" not in about]
    for name, about in experiments.items():
        beside = [key for key in ("targets", "data", "where") if key in about]
        beside += ["shards"] * (about["shards"] != 1)
        if "mean" in about and beside:
            raise InputError(
                f"experiments.{name}: `mean` must stand alone, or with `minus`: its one target is "
                f"made of other experiments'. Found {beside[0]} beside it. Leave either out.",
                code="config.mean_alone",
            )
        named = [about[key] for key in ("mean", "minus") if key in about]
        wrong = [experiment for experiment in named if experiment not in own]
        if wrong or ("minus" in about and len(set(named)) < 2):
            raise InputError(
                f"experiments.{name}: `mean` must name an experiment with targets of its own, and "
                f"`minus` another one, out of {', '.join(own) or 'none'}. Found "
                f"{' and '.join(named)}.",
                code="config.mean_of",
            )


def _refuse(code: str, setting: str, rules: Iterable[tuple[bool, str, Any]], remedy: str) -> None:
    """Raise the first rule that is broken: each says whether it is, what must hold, what stands."""
    for is_broken, must, value in rules:
        if is_broken:
            raise InputError(f"With `{setting}`, {must}. Found {value}. {remedy}", code=code)


def check_evaluation(config: Mapping[str, Any]) -> None:
    """Refuse an evaluation that its study cannot have, for a config with defaults."""
    evaluation = config["evaluation"]
    lds, removals = {"subsets", "ground_truth"} & set(evaluation), evaluation.get("removals", {})
    if len(lds) == 2:
        raise InputError(
            "evaluation must have `subsets`, to retrain here, or `ground_truth`, a file of models "
            "retrained elsewhere. Found both.",
            code="config.two_truths",
        )
    # And `baselines`, but they have a default.
    alone = [key for key in ("experiments", "sweep") if evaluation.get(key, []) != []]
    if alone and not lds:
        raise InputError(
            f"evaluation.{alone[0]} is about scores measured against retrained models: it needs "
            "evaluation.subsets, to retrain here ({} will do), or evaluation.ground_truth. Found "
            "neither.",
            code="config.no_truth",
        )
    named = [*evaluation.get("experiments", ())]
    named += [own["experiment"] for own in removals_of(config).values()]
    unknown = [name for name in named if name not in config["experiments"]]
    if unknown:
        raise InputError(
            f"evaluation must name experiments of the study: {', '.join(config['experiments'])}. "
            f"Found {unknown[0]!r}.",
            code="config.unknown_experiment",
        )
    questions = [name for name in named if "data" in config["experiments"][name]]
    if questions:
        raise InputError(
            "evaluation must name experiments whose targets are the study's own: models are "
            f"retrained to explain target_data(). Found {questions[0]}, which brings its own "
            "`data`.",
            code="config.evaluated_question",
        )
    means = [name for name in named if "mean" in config["experiments"][name]]
    if means:
        raise InputError(
            "evaluation must name experiments with targets of their own, about which retrained "
            f"models are asked. Found {means[0]}, which is made of means. Name what it is made of.",
            code="config.evaluated_mean",
        )
    about = config["experiments"][removals["experiment"]] if "experiment" in removals else {}
    if about.get("targets") == "all" or "where" in about:
        means = "where" if "where" in about else "targets: all"
        raise InputError(
            "evaluation.removals takes the first of its experiment's `targets`, which must be ids. "
            f"Found `{means}` of {removals['experiment']}. Name those to remove for in an "
            "experiment of their own.",
            code="config.removals_of_all",
        )
    experiments = config["experiments"].values()
    if lds and all({"data", "mean"} & set(experiment) for experiment in experiments):
        raise InputError(
            "An evaluation explains the study's own targets: some experiment must have `targets` "
            "without `data`. Found none.",
            code="config.no_own_targets",
        )
    trained = [key for key in ("subsets", "removals") if key in evaluation]
    if trained and "training" not in config:
        raise InputError(
            f"evaluation.{trained[0]} trains models: the config must have `training`, and the "
            "study a function train(). Found no `training`. Models that were retrained elsewhere "
            "can be given as evaluation.ground_truth.",
            code="config.no_training",
        )
    if (lds or "experiment" in removals) and config["scoring"]["keep"] != "full":
        raise InputError(
            "An evaluation needs all scores: scoring.keep must be full. Found "
            f"{config['scoring']['keep']}.",
            code="config.incomplete_scores",
        )
    if lds and "same_class" in evaluation["baselines"]:
        classes = [name for name, row in TABLE.items() if row.labels_are_classes]
        output = output_name(config["model_output"])
        if output not in classes:
            raise InputError(
                "evaluation.baselines: same_class needs labels that are classes, with model_output "
                f"{' or '.join(classes)}. Found {output}. Leave it out.",
                code="config.no_classes",
            )
    _check_dimensions(config["projection"], evaluation)


def _check_dimensions(projection: Mapping[str, Any] | str, evaluation: Mapping[str, Any]) -> None:
    """Refuse what needs features where there are none, and columns that can't be taken alone."""
    if isinstance(projection, str):
        keys = [key for key in _FEATURES_ONLY if evaluation.get(key)]
        keys += ["baselines: gradient_dot"] * ("gradient_dot" in evaluation["baselines"])
        if keys:
            raise InputError(
                f"evaluation.{keys[0]} works on projected features. Found "
                f"`projection: {projection}`. Leave it out, or take a projection.",
                code="config.evaluation_of_features",
            )
        return
    if "kind" in projection:
        check_columns(projection["proj_dim"], projection["kind"], evaluation)


def check_columns(proj_dim: int, kind: str, evaluation: Mapping[str, Any]) -> None:
    """Refuse to measure columns that can't be taken alone of a projection of this kind and size."""
    dims = evaluation.get("sweep", {}).get("proj_dim", ())
    nested = [projection for projection in ProjectionKind if projection.about.nested]
    wrong = [dim for dim in dims if dim > proj_dim or (dim < proj_dim and kind not in nested)]
    if wrong:
        raise InputError(
            "evaluation.sweep.proj_dim takes the first columns of the projection: at most "
            f"projection.proj_dim, {proj_dim}, and fewer for {' and '.join(nested)} only. "
            f"Found {wrong[0]} with {kind}; projection.kind names another.",
            code="config.sweep_columns",
        )


def check_sizes(evaluation: Mapping[str, Any], n_train: int, n_targets: Mapping[str, int]) -> None:
    """Refuse an evaluation of more samples, or more of an experiment's targets, than there are."""
    fraction = evaluation.get("subsets", {}).get("fraction", 0.5)
    size = subset_size(n_train, fraction)
    if "subsets" in evaluation and not 0 < size < n_train:
        raise InputError(
            "evaluation.subsets.fraction must keep at least one training sample, and leave out "
            f"one. Found {fraction}, which keeps {size} of {n_train}.",
            code="config.subset_size",
        )
    removals = evaluation.get("removals", {})
    if "experiment" not in removals:
        return
    n_removed = removed_sizes(removals["n_removed"], n_train)
    if max(n_removed) >= n_train:
        raise InputError(
            f"evaluation.removals.n_removed must be at most {n_train - 1}, with {n_train} training "
            f"samples. Found {max(n_removed)}.",
            code="config.too_many_removed",
        )
    if removals["targets"] > (m := n_targets[removals["experiment"]]):
        raise InputError(
            "evaluation.removals.targets must be at most the targets of its experiment. "
            f"Found {removals['targets']}; there are {m}.",
            code="config.too_few_targets",
        )


# Snakemake quotes paths on jobs' command lines, and executors of clusters wrap these once more for
# a shell. These signs end a quoted word, or count within one.
_SIGNS = "'\"`$\\\n\r"


def check_paths(config: Mapping[str, Any], others: Iterable[str]) -> None:
    """Refuse shell signs in every path of a config, in ``others`` and in the working folder.

    ``others`` are the config's own files and what its tables name.
    """
    for role, path in [
        *_paths(config),
        *(("a file", path) for path in others),
        ("the working folder", str(Path.cwd())),
    ]:
        sign = next((s for s in path if s in _SIGNS), None)
        if sign is not None:
            raise InputError(
                f"Paths must be without signs that a shell reads: {' '.join(_SIGNS.split())}. Jobs "
                f"get them on a command line. Found {sign!r} in {path!r}, {role}. Rename it, or "
                "give a link of another name.",
                code="config.shell_sign",
            )


def check_given(entries: Iterable[str]) -> None:
    """Refuse what ``--config`` says, if Snakemake would quote it for a shell so that parts run."""
    for entry in entries:
        sign = next((s for s in entry if s in "'\\\n\r"), None)
        if sign is not None:
            raise InputError(
                "--config: on an executor of clusters, values must be without apostrophe, "
                f"backslash and ends of lines, because a shell reads them. Found {sign!r} in "
                f"{entry!r}. Write it into a file, and name that by --configfile.",
                code="config.shell_value",
            )


def _paths(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each path that a config says, with its key."""
    yield "study", config["study"]
    yield "model_output", output_name(config.get("model_output", ""))
    checkpoints = config["checkpoints"]
    if isinstance(checkpoints, str):
        yield "checkpoints", checkpoints
    elif "training" not in config:
        for name, entry in checkpoints.items():
            yield f"checkpoints.{name}", entry if isinstance(entry, str) else str(entry["path"])
    for name, experiment in config["experiments"].items():
        for key in ("targets", "data"):
            if isinstance(experiment.get(key), str):
                yield f"experiments.{name}.{key}", experiment[key]
    for file in config["data_files"]:
        yield "data_files", file
    if "pool" in lists_of(config).get("select", {}):
        yield "lists.select.pool", lists_of(config)["select"]["pool"]
    truth = config.get("evaluation", {}).get("ground_truth")
    if truth is not None:
        yield "evaluation.ground_truth", truth
    if "conda" in config["compute"]:
        yield "compute.conda", config["compute"]["conda"]
