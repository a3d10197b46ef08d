"""Check files, the study, its checkpoints and the memory limit before the first job starts.

A separate process reads the study and its checkpoints. What it returns is stored in the results
folder with digests of all files that it read, so that the next run does not check unchanged files.
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
from trak_core.config.bind_study_arguments import builder_of
from trak_core.config.checkpoint_list import mixed_trainings, seeming_runs
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
# The tolerated difference between the clocks of this machine and of a file server.
_SKEW_SECONDS = 2
# The files that `bring_along` returned for any module of a workflow.
brought_along = list[str]()
_MAX_SOURCE_BYTES = 10_000_000  # Snakemake does not send larger files, and only prints a warning.


def run_preflight(
    specs: Specs, results: Path, config_files: Sequence[str] = (), *, is_stored: bool
) -> dict[str, str]:
    """Return hashes of the user's checkpoints and of ``ground_truth``, after checking the config.

    Args:
        specs: The config's specs.
        results: The results folder, in which the study's sizes and file digests are stored.
        config_files: Additional paths to check for characters that a shell interprets.
        is_stored: Whether Snakemake reads files from remote storage, not from this disk.
    """
    given = (checkpoint.path for checkpoint in specs.checkpoints.values())
    check_paths(specs.config, [*config_files, *filter(None, given)])
    checkpoints, truth = _own_files(specs, is_stored)
    paths = [*checkpoints, *truth]
    digests = path_digests(paths, results / _DIGESTS) if paths else {}
    _check_sizes(specs, _facts(specs, results / _RECORD, checkpoints, digests))
    return digests


def largest_weights_mb(specs: Specs, results: Path, checkpoint: str | None) -> int:
    """Return the MiB that a job needs for the weights of ``checkpoint``. None is the largest one.

    The sizes are from the preflight's record in ``results``. Without a record, the result is 0.
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


def _own_files(specs: Specs, is_stored: bool) -> tuple[dict[str, list[str | None]], list[str]]:
    """Return the user's files on this disk, or raise an error if one of them does not exist.

    Returns:
        For each checkpoint, the keys of its state dicts; and ``evaluation.ground_truth`` in a list.
    """
    if is_stored:
        if folders := [c.path for c in specs.checkpoints.values() if c.is_listed]:
            raise InputError(
                "Checkpoints in remote storage must be listed one by one. Found a folder that "
                f"contains several, such as {folders[0]}.",
                code="config.stored",
            )
        return {}, []
    here = f"(from {Path.cwd()})"
    checkpoints = defaultdict[str, list[str | None]](list)
    for checkpoint in specs.checkpoints.values():
        if checkpoint.path is not None and "://" not in checkpoint.path:
            checkpoints[checkpoint.path].append(checkpoint.state_dict)
    truth = [path for path in [specs.evaluation.get("ground_truth", "://")] if "://" not in path]
    if missing := [path for path in checkpoints if not Path(path).exists()]:
        raise InputError(
            f"Checkpoints must exist. Found nothing at: {', '.join(missing)} {here}.",
            code="config.missing_checkpoint",
        )
    bare = [path for path in checkpoints if _lacks_optimizer(Path(path))]
    if bare and specs.all_features.preconditioner is not None:
        raise InputError(
            f"With `preconditioner: adam`, checkpoints must be folders with {OPTIMIZER_FILE}, "
            "which a Trainer saves without save_only_model, or files of model and optimizer. Found "
            f"no optimizer in {', '.join(bare)}.",
            code="config.preconditioner",
        )
    if not all(Path(path).is_file() for path in truth):
        raise InputError(
            f"evaluation.ground_truth must exist. Found nothing at {truth[0]} {here}.",
            code="config.missing_ground_truth",
        )
    refuse_future([*checkpoints, *truth])
    return checkpoints, truth


def stored_signature(path: str, store: Any, results: Path) -> str:
    """Return a text that changes if a user's file in remote storage changes.

    The text is the size and time of ``store``, Snakemake's storage object of the file. If the
    storage is a folder on this machine, the text is a hash of the content. ``path`` is the file's
    path in the config, and ``results`` contains the record of hashes.
    """
    local_path = Path(store.query)
    if local_path.exists():
        return path_digests([str(local_path)], results / _DIGESTS)[str(local_path)]
    if not store.exists():
        raise InputError(
            f"{path} must be in its storage. Found nothing at {store.query}.", code="config.stored"
        )
    return f"{store.size()} {store.mtime()}"


def refuse_future(files: Iterable[str]) -> None:
    """Raise an error for files with times in the future. Snakemake would delete their results."""
    now = time.time()
    ahead = {file: Path(file).stat().st_mtime - now for file in files if Path(file).exists()}
    late = [file for file, seconds in ahead.items() if seconds > _SKEW_SECONDS]
    if late:
        raise InputError(
            f"{listed(late)}: a file's time must not be in the future, because Snakemake would "
            f"delete the results. Found a time that is {max(ahead.values()):.0f} s ahead. Set the "
            "clocks right, then `touch` these files.",
            code="config.future",
        )


def _lacks_optimizer(checkpoint: Path) -> bool:
    """Return whether the file names of a checkpoint show that it has no optimizer state."""
    if checkpoint.is_dir():
        return not (checkpoint / OPTIMIZER_FILE).is_file()
    return checkpoint.suffix == ".safetensors"


def bring_along(files: Sequence[Path]) -> list[str]:
    """Return the files that Snakemake must send to jobs without a shared disk."""
    outside = [file for file in files if not file.resolve().is_relative_to(Path.cwd())]
    large = [file for file in files if file.stat().st_size > _MAX_SOURCE_BYTES]
    for wrong, rule in ((outside, "lie in the working folder"), (large, "have at most 10 MB")):
        if wrong:
            raise InputError(
                "Without a shared disk, Snakemake sends the study, its modules, tables and "
                f"`data_files` to jobs. Each must {rule}. Found {', '.join(map(str, wrong))}.",
                code="config.sources",
            )
    paths = list(map(str, files))
    brought_along.extend(paths)
    return paths


def _request(specs: Specs) -> dict[str, Any]:
    """Return the arguments of ``preflight_study`` that do not depend on splits or checkpoints."""
    config = specs.config
    is_trained = "training" in config
    retrains = {"subsets", "removals"} & set(specs.evaluation)
    return {
        "study_file": config["study"],
        "model_output": output_name(config["model_output"]),
        "weighting": config["scoring"]["weighting"],
        "parameter_patterns": specs.all_features.parameter_patterns,
        "training": {r: specs.training_arguments(r) for r in specs.runs} if is_trained else None,
        "leaves_several": is_trained and any(specs.times(run) for run in specs.runs),
        "retraining": specs.training if retrains else None,
        "weighted": "subsets" in specs.evaluation and specs.random_subsets.run_seeds is not None,
        "describes": specs.measures("bm25"),
        "group_by": config.get("groups", []),
    }


def _facts(
    specs: Specs,
    record: Path,
    checkpoints: Mapping[str, list[str | None]],
    digests: Mapping[str, str],
) -> dict[str, Any]:
    """Return the study's sizes. Only splits and checkpoints that changed are read again."""
    request, known = _request(specs), read_record(record)
    common = [specs.made_of, stage_digest(_STAGE), request]
    inputs = {s: [specs.experiments.get(s), specs.targets_digest(s)] for s in specs.shards}
    inputs |= {f"checkpoint {path}": [parts, digests[path]] for path, parts in checkpoints.items()}
    keys = {name: content_digest(name, common, values) for name, values in inputs.items()}
    old = {name for name, key in known.get("keys", {}).items() if keys.get(name) == key}
    told = {split: text for split, text in known.get("told", {}).items() if split in old}
    print(*told.values(), sep="", end="", file=sys.stderr)
    for notice in filter(None, (f(specs.checkpoints) for f in (seeming_runs, mixed_trainings))):
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
    """Return whether a checkpoint's model may be large. For an adapter, the base model may be."""
    if not checkpoint.is_dir():
        return checkpoint.stat().st_size >= LARGE_BYTES
    files = [path for path in checkpoint.iterdir() if path.is_file()]
    is_adapter = any(path.name == ADAPTER_CONFIG for path in files)
    return is_adapter or sum(path.stat().st_size for path in files) >= LARGE_BYTES


def _preflight_in_a_process(request: Mapping[str, Any], builder: str) -> dict[str, Any]:
    """Return the result of ``preflight_study``. Errors name ``builder``, not ``make_model()``."""
    # Files are used instead of pipes, which processes that the study started would keep open.
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("request", "answer", "log")]
        files[0].write_text(json.dumps(request), encoding="utf-8")
        # Modules in the working folder, or next to the script, must not shadow installed ones.
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
            or f"{request['study_file']}: the study must load. Its process ended with exit status "
            f"{status} and without a message. Either it ran out of memory or it crashed.",
            code="config.preflight",
        )
    print(log, end="", file=sys.stderr)  # The log can contain notices, such as from transformers.
    reply = json.loads(answer)
    if refused := reply.get("refused"):
        raise InputError(refused.replace("make_model()", builder), code="config.preflight")
    return reply


def _check_sizes(specs: Specs, facts: Mapping[str, Any]) -> None:
    """Raise an error for settings that need more samples or memory than are available."""
    config, memory_mb = specs.config, specs.config["compute"]["memory_mb"]
    proj_dim = None
    if specs.is_projected:
        proj_dim = config["projection"]["proj_dim"]
        chosen = projection_of(specs.all_features.under(""), [(facts["n_params"],)])
        check_columns(chosen.proj_dim, chosen.kind, specs.evaluation)
    n_samples = facts["n_samples"]
    for split, n_shards in specs.shards.items():
        if n_shards > n_samples[split]:
            subject = "the training data" if split == TRAIN else f"experiment {split}"
            raise InputError(
                f"There must be at most as many shards as samples. Found {n_shards} shards and "
                f"{n_samples[split]} samples of {subject}.",
                code="compute.shards",
            )
    n_train = n_samples[TRAIN]
    n_targets = {name: n_samples[name] for name in specs.experiments}
    n_targets |= {name: min(n_targets[name], MOST_TARGETS) for name in specs.conditions}
    check_memory(config, n_train, n_targets, len(specs.checkpoints))
    if not specs.evaluation:
        return
    check_sizes(specs.evaluation, n_train)
    # If models were retrained elsewhere, the number of subsets is not known here.
    for experiment in specs.measured if "subsets" in specs.evaluation else []:
        evaluation_need(
            proj_dim=(proj_dim or 0) if specs.measures_features else 0,
            n_train=n_train,
            n_targets=n_targets[experiment],
            n_subsets=specs.evaluation["subsets"]["count"],
            n_checkpoints=len(specs.checkpoints),
            settings=specs.settings,
        ).check(memory_mb)
