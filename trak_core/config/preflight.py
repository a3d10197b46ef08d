"""Check files, the study, its checkpoints and the memory limit before the first job starts.

A separate process reads the study and its checkpoints. Its result is stored in the results folder,
with digests of all files that it read, so that the next run does not read unchanged files again.
"""

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_forks.server import Fork
from trak_core.config.bind_study_arguments import BASE_WEIGHTS, builder_of
from trak_core.config.checkpoint_list import mixed_runs, seeming_runs, unread_weights
from trak_core.config.cross_checks import check_columns, check_paths, check_sizes
from trak_core.config.memory_needs import LARGE_BYTES, check_memory, evaluation_need, weights_mb
from trak_core.config.specs_from_config import Specs
from trak_core.dependency_digests import content_digest, stage_digest
from trak_core.errors import InputError, listed
from trak_core.model_outputs.about_outputs import output_name
from trak_core.runtime.files import path_digests, read_record, write_record
from trak_core.settings import ADAPTER_CONFIG, OPTIMIZER_FILE, TRAIN, projection_of
from trak_core.settings.target_filter import MOST_TARGETS

_RECORD, _DIGESTS = "study.json", "checkpoints.json"
_STAGE = "trak_core.stages.preflight_study"
_SCRIPT = Path(__file__).parents[1] / "stages/preflight_study.py"
# The largest difference that is tolerated between the clocks of this machine and a file server.
_SKEW_SECONDS = 2
# All files that `bring_along` has returned. They are added to Snakemake's list of config files, and
# the check of config files must skip them.
brought_along = list[str]()
_MAX_SOURCE_BYTES = 10_000_000  # Snakemake does not send larger files, and only prints a warning.


def run_preflight(
    specs: Specs, results: Path, config_files: Sequence[str] = (), *, is_stored: bool
) -> dict[str, str]:
    """Check the user's files, the study, the checkpoints and the memory limit.

    Args:
        specs: The config, and the settings of jobs that are derived from it.
        results: The results folder. It stores digests of the files, and what the checks read, such
            as the number of training samples.
        config_files: More paths to check for characters that a shell interprets.
        is_stored: Whether Snakemake reads files from remote storage, not from this disk.

    Returns:
        A digest of each checkpoint that is on this disk, and of ``ground_truth``, by path.
    """
    paths = (checkpoint.path for checkpoint in specs.checkpoints.values())
    check_paths(specs.config, [*config_files, *filter(None, paths)])
    checkpoints, truth = _user_files(specs, is_stored)
    paths = [*checkpoints, *truth]
    digests = path_digests(paths, results / _DIGESTS) if paths else {}
    _check_sizes(specs, _facts(specs, results / _RECORD, checkpoints, digests))
    return digests


def largest_weights_mb(specs: Specs, results: Path, checkpoint: str | None) -> int:
    """Return how many MiB a job needs for the weights of ``checkpoint``.

    If ``checkpoint`` is None, this is the largest value of all checkpoints. The sizes are from the
    record that ``run_preflight`` wrote to ``results``. If there is no record, return 0.
    """
    facts = read_record(results / _RECORD)
    names = list(specs.checkpoints) if checkpoint is None else [checkpoint]
    return max(
        weights_mb(
            facts.get("model_bytes", 0),
            path := specs.checkpoints[name].path,
            reads_optimizer=specs.all_features.preconditioner is not None,
            is_renamed=path in facts.get("renamed", []),
        )
        for name in names
    )


def _user_files(specs: Specs, is_stored: bool) -> tuple[dict[str, list[str | None]], list[str]]:
    """Return the user's checkpoints and ``ground_truth``, after checking that all of them exist.

    Returns:
        A mapping from the path of each checkpoint to the config's ``state_dict`` keys for this
        path, and a list with the path of ``evaluation.ground_truth``. Both contain only paths on
        this disk.
    """
    if is_stored:
        if folders := [c.path for c in specs.checkpoints.values() if c.is_in_folder]:
            raise InputError(
                "In remote storage, each checkpoint must have its own entry in `checkpoints`. "
                "Found an entry for a folder that contains several checkpoints, such as "
                f"{folders[0]}.",
                code="config.stored",
            )
        return {}, []
    here = f"(relative to {Path.cwd()})"
    checkpoints = defaultdict[str, list[str | None]](list)
    for checkpoint in specs.checkpoints.values():
        if checkpoint.path is not None and "://" not in checkpoint.path:
            checkpoints[checkpoint.path].append(checkpoint.state_dict)
    truth = [path for path in [specs.evaluation.get("ground_truth", "://")] if "://" not in path]
    if missing := [path for path in checkpoints if not Path(path).exists()]:
        raise InputError(
            f"All checkpoints must exist. Found nothing at {', '.join(missing)} {here}.",
            code="config.missing_checkpoint",
        )
    bare = [path for path in checkpoints if _lacks_optimizer(Path(path))]
    if bare and specs.all_features.preconditioner is not None:
        raise InputError(
            "With `preconditioner: adam`, each checkpoint must contain the optimizer's state. The "
            f"checkpoint must be a folder with {OPTIMIZER_FILE}, which a Trainer saves unless "
            "save_only_model is set, or one file with the model and the optimizer. Found no "
            f"optimizer in {', '.join(bare)}.",
            code="config.preconditioner",
        )
    if not all(Path(path).is_file() for path in truth):
        raise InputError(
            f"evaluation.ground_truth must be a file. Found no file at {truth[0]} {here}.",
            code="config.missing_ground_truth",
        )
    refuse_future([*checkpoints, *truth])
    return checkpoints, truth


def stored_signature(path: str, store: Any, results: Path) -> str:
    """Return a text that changes whenever a user's file in remote storage changes.

    The text consists of the size and the modification time of ``store``, which is Snakemake's
    object for the file. If the storage is a folder on this machine, the text is instead a digest of
    the content, which is kept in the folder ``results``. ``path`` is the file's path in the config.
    """
    local_path = Path(store.query)
    if local_path.exists():
        return path_digests([str(local_path)], results / _DIGESTS)[str(local_path)]
    if not store.exists():
        raise InputError(
            f"{path}: the file must exist. Found nothing at {store.query}.", code="config.stored"
        )
    return f"{store.size()} {store.mtime()}"


def refuse_future(files: Iterable[str]) -> None:
    """Raise an error if the modification time of a file is in the future.

    Snakemake would consider all results from such a file outdated, and delete them.
    """
    now = time.time()
    ahead = {file: Path(file).stat().st_mtime - now for file in files if Path(file).exists()}
    late = [file for file, seconds in ahead.items() if seconds > _SKEW_SECONDS]
    if late:
        raise InputError(
            f"{listed(late)}: a file's modification time must not be in the future. Otherwise, "
            "Snakemake would delete results from this file as outdated. Found a time that is "
            f"{max(ahead.values()):.0f} s ahead. Correct the clock, then `touch` these files.",
            code="config.future",
        )


def _lacks_optimizer(checkpoint: Path) -> bool:
    """Return whether a checkpoint contains no optimizer state, judging only by file names."""
    if checkpoint.is_dir():
        return not (checkpoint / OPTIMIZER_FILE).is_file()
    return checkpoint.suffix == ".safetensors"


def bring_along(files: Sequence[Path]) -> list[str]:
    """Return the paths of ``files``, which Snakemake sends to jobs that cannot read this disk.

    Raise an error if Snakemake would not send a file.
    """
    # Weights of an adapter's base model are not sent. They must exist on each machine.
    files = [file for file in files if not any(map(file.match, BASE_WEIGHTS))]
    outside = [file for file in files if not file.resolve().is_relative_to(Path.cwd())]
    large = [file for file in files if file.stat().st_size > _MAX_SOURCE_BYTES]
    for wrong, rule in ((outside, "be in the working folder"), (large, "have at most 10 MB")):
        if wrong:
            raise InputError(
                "Without a shared disk, Snakemake sends the study, its modules, tables and "
                f"`data_files` to jobs. Each file must {rule}. This is not true for "
                f"{', '.join(map(str, wrong))}.",
                code="config.sources",
            )
    paths = list(map(str, files))
    brought_along.extend(paths)
    return paths


def _request(specs: Specs) -> dict[str, Any]:
    """Return the part of the request for ``preflight_study`` that is about the whole config."""
    config = specs.config
    is_trained = "training" in config
    retrains = {"subsets", "removals"} & set(specs.evaluation)
    return {
        "study_file": config["study"],
        "model_output": output_name(config["model_output"]),
        "weighting": config["scoring"]["weighting"],
        "parameter_patterns": specs.all_features.parameter_patterns,
        "training": {r: specs.training_arguments(r) for r in specs.runs} if is_trained else None,
        "saves_several": is_trained and any(specs.times(run) for run in specs.runs),
        "retraining": specs.training if retrains else None,
        "describes": specs.measures("bm25"),
        "group_by": config.get("groups", []),
    }


def _facts(
    specs: Specs,
    record: Path,
    checkpoints: Mapping[str, list[str | None]],
    digests: Mapping[str, str],
) -> dict[str, Any]:
    """Return the result of ``preflight_study``, such as the number of samples in each split.

    A split or a checkpoint is read only if it changed since ``record`` was written. ``checkpoints``
    is from ``_user_files``, and ``digests`` contains a digest of each of these checkpoints.
    """
    request, known = _request(specs), read_record(record)
    common = [specs.study_and_output_digest, stage_digest(_STAGE), request]
    inputs = {s: [specs.experiments.get(s), specs.targets_digest(s)] for s in specs.shards}
    inputs |= {f"checkpoint {path}": [parts, digests[path]] for path, parts in checkpoints.items()}
    keys = {name: content_digest(name, common, values) for name, values in inputs.items()}
    old = {name for name, key in known.get("keys", {}).items() if keys.get(name) == key}
    told = {split: text for split, text in known.get("told", {}).items() if split in old}
    print(*told.values(), sep="", end="", file=sys.stderr)
    checks = seeming_runs, mixed_runs, unread_weights
    for notice in filter(None, (check(specs.checkpoints) for check in checks)):
        print(f"Notice: {notice}", file=sys.stderr)
    if old == keys.keys():
        return known
    new = {path: c for path, c in checkpoints.items() if f"checkpoint {path}" not in old}
    request |= {
        "splits": {s: specs.experiments.get(s) for s in specs.shards if s not in old},
        "checkpoints": new,
        "questions": specs.questions,
        "conditions": specs.conditions,
        "without_numbers": any(_is_large(Path(path)) for path in checkpoints),
    }
    facts = _preflight_in_a_process(request, builder_of(specs.config))
    facts["n_samples"] = known.get("n_samples", {}) | facts["n_samples"]
    facts["told"] |= told
    kept = [path for path in known.get("renamed", []) if f"checkpoint {path}" in old]
    facts |= {"keys": keys, "renamed": kept + facts["renamed"]}
    write_record(record, facts)
    return facts


def _is_large(checkpoint: Path) -> bool:
    """Return whether a checkpoint's model may be large.

    For an adapter, the answer is yes, because its size does not show that of its base model.
    """
    if not checkpoint.is_dir():
        return checkpoint.stat().st_size >= LARGE_BYTES
    files = [path for path in checkpoint.iterdir() if path.is_file()]
    is_adapter = any(path.name == ADAPTER_CONFIG for path in files)
    return is_adapter or sum(path.stat().st_size for path in files) >= LARGE_BYTES


def _preflight_in_a_process(request: Mapping[str, Any], builder: str) -> dict[str, Any]:
    """Return the result of ``preflight_study``, after running it in a separate process.

    In error messages, ``builder`` replaces make_model(), for users who did not write this function.
    """
    # Requests and answers are files. A pipe would stay open if the study started other processes.
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("request", "answer", "log")]
        files[0].write_text(json.dumps(request), encoding="utf-8")
        # Modules in the working folder, or next to the script, must not shadow installed modules.
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        fork = Fork(_SCRIPT, list(map(str, files)), environment)
        try:
            minutes = 0
            while (status := fork.wait(60)) is None:
                minutes += 1
                print(f"Still reading the study after {minutes} min.", file=sys.stderr)
        except BaseException:
            fork.kill()
            raise
        answer, log = (
            file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
            for file in files[1:]
        )
    if status or not answer:
        raise InputError(
            log.strip()
            or f"{request['study_file']}: the study must load without an error. The process that "
            f"loads it ended with exit status {status} and without a message, so it ran out of "
            "memory or crashed.",
            code="config.preflight",
        )
    print(log, end="", file=sys.stderr)  # The log can contain notices of transformers or others.
    reply = json.loads(answer)
    if refused := reply.get("refused"):
        raise InputError(refused.replace("make_model()", builder), code="config.preflight")
    return reply


def _check_sizes(specs: Specs, facts: Mapping[str, Any]) -> None:
    """Raise an error if a job would need more samples, features or memory than there are."""
    config, memory_mb = specs.config, specs.config["compute"]["memory_mb"]
    proj_dim = None
    if specs.is_projected:
        proj_dim = config["projection"]["proj_dim"]
        chosen = projection_of(specs.all_features.under(""), [(facts["n_params"],)])
        check_columns(chosen.proj_dim, chosen.kind, specs.evaluation)
    n_samples = facts["n_samples"]
    for split, n_shards in specs.shards.items():
        if n_shards > n_samples[split]:
            kind = "training samples" if split == TRAIN else f"targets of experiment {split}"
            raise InputError(
                f"The number of shards must be at most the number of samples. Found {n_shards} "
                f"shards for {n_samples[split]} {kind}.",
                code="compute.shards",
            )
    n_train = n_samples[TRAIN]
    n_targets = {name: n_samples[name] for name in specs.experiments}
    n_targets |= {name: min(n_targets[name], MOST_TARGETS) for name in specs.conditions}
    check_memory(config, n_train, n_targets, len(specs.checkpoints))
    if not specs.evaluation:
        return
    check_sizes(specs.evaluation, n_train)
    # If the models were retrained elsewhere, the number of subsets is not known here.
    for experiment in specs.measured if "subsets" in specs.evaluation else []:
        evaluation_need(
            proj_dim=(proj_dim or 0) if specs.measures_features else 0,
            n_train=n_train,
            n_targets=n_targets[experiment],
            n_subsets=specs.evaluation["subsets"]["count"],
            n_checkpoints=len(specs.checkpoints),
            settings=specs.settings,
        ).check(memory_mb)
