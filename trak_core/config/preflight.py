"""Before any job, refuse missing files, a study that fails, misfit checkpoints, too little memory.

A process of its own reads the study and its checkpoints: a fork of the process that will fork for
jobs, where there is one. Its answer stays in the results folder under keys of all that it read, so
that a further start costs nothing.
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
from trak_core.config.cross_checks import check_columns, check_paths, check_sizes
from trak_core.config.memory_needs import LARGE_BYTES, check_memory, evaluation_need, weights_mb
from trak_core.config.specs_from_config import Specs
from trak_core.dependency_digests import content_digest, stage_digest
from trak_core.errors import InputError, listed
from trak_core.model_outputs.about_outputs import output_name
from trak_core.spec import ADAPTER_CONFIG, OPTIMIZER_FILE, POOL, TRAIN, projection_of
from trak_core.spec.target_filter import MOST_TARGETS
from trak_core.system.files import path_digests, read_record, write_record

_RECORD, _DIGESTS = "study.json", "checkpoints.json"
_STAGE = "trak_core.stages.preflight_study"
_SCRIPT = Path(__file__).parents[1] / "stages/preflight_study.py"
# Clocks of this machine and of a file server differ by so much without harm.
_SKEW_SECONDS = 2
# What is in Snakemake's list of configs without being one, from all modules of a workflow.
brought_along = list[str]()
_MAX_SOURCE_BYTES = 10_000_000  # Snakemake leaves out a larger file, and only warns


def run_preflight(
    specs: Specs, results: Path, config_files: Sequence[str] = (), *, is_stored: bool
) -> dict[str, str]:
    """Refuse what some job would stop at later; the folder ``results`` keeps what was read.

    Files that are ``is_stored`` lie in a store, which Snakemake reads.

    Returns:
        Hashes of the content of the user's checkpoints and retrained models on this disk, by path.
    """
    listed = (checkpoint.path for checkpoint in specs.checkpoints.values())
    check_paths(specs.config, [*config_files, *filter(None, listed)])
    _check_files(specs, is_stored)
    checkpoints = {} if is_stored else _own_checkpoints(specs)
    own = [] if is_stored else [*checkpoints, *_own_truth(specs)]
    digests = path_digests(own, results / _DIGESTS) if own else {}
    _check_sizes(specs, _facts(specs, results / _RECORD, checkpoints, digests))
    return digests


def largest_weights_mb(specs: Specs, results: Path, checkpoint: str | None) -> int:
    """Return the MiB of a checkpoint's weights in a job, or of the largest one's for None.

    They follow from what the folder's preflight found; 0 before it.
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


def _check_files(specs: Specs, is_stored: bool) -> None:
    """Refuse checkpoints or retrained models that are not there."""
    if is_stored:
        listed = [c.path for c in specs.checkpoints.values() if c.is_listed]
        if listed:
            raise InputError(
                "Checkpoints in a store must be named one by one: jobs elsewhere can't look into a "
                f"folder here. Found a folder of several, with {listed[0]}; name each in it."
            )
        return
    here = f"(from {Path.cwd()})"
    own = _own_checkpoints(specs)
    missing = [path for path in own if not Path(path).exists()]
    if missing:
        raise InputError(
            f"Checkpoints must exist. Found nothing at: {', '.join(missing)} {here}.",
            code="config.missing_checkpoint",
        )
    bare = [path for path in own if _lacks_optimizer(Path(path))]
    if bare and specs.all_features.preconditioner is not None:
        raise InputError(
            "With `preconditioner: adam`, checkpoints must be folders that hold "
            f"{OPTIMIZER_FILE}, as a Trainer saves it without save_only_model, or files of "
            f"model and optimizer. Found no optimizer in {', '.join(bare)}. Name only those "
            "that have one, or leave `preconditioner` out."
        )
    own_truth = _own_truth(specs)
    if not all(Path(path).is_file() for path in own_truth):
        raise InputError(
            f"evaluation.ground_truth must exist. Found nothing at {own_truth[0]} {here}.",
            code="config.missing_ground_truth",
        )
    refuse_future([*own, *own_truth])


def stored_signature(path: str, store: Any, results: Path) -> str:
    """Return what tells a user's file in a store, which is Snakemake's object of it.

    A folder of this machine can be a store, whose content counts as anywhere on this machine.
    """
    here = Path(store.query)
    if here.exists():
        return path_digests([str(here)], results / _DIGESTS)[str(here)]
    if not store.exists():
        raise InputError(
            f"{path} must be in its store. Found nothing at {store.query}.", code="config.stored"
        )
    return f"{store.size()} {store.mtime()}"


def _own_truth(specs: Specs) -> list[str]:
    """Return the path of a user's retrained models on this disk, if there is one."""
    truth = specs.evaluation.get("ground_truth")
    return [truth] if truth is not None and "://" not in truth else []


def refuse_future(files: Iterable[str]) -> None:
    """Refuse files of a later time than now: Snakemake would delete what is made of them."""
    now = time.time()
    ahead = {file: Path(file).stat().st_mtime - now for file in files if Path(file).exists()}
    late = [file for file, seconds in ahead.items() if seconds > _SKEW_SECONDS]
    if late:
        raise InputError(
            f"{listed(late)}: a file must have been written in the past. Found a time that is "
            f"{max(ahead.values()):.0f} s from now: Snakemake would delete what a job makes of it. "
            "Mend the clock of the machine that wrote it, or of this one; or give such files "
            "today's time by `touch`.",
            code="config.future",
        )


def _own_checkpoints(specs: Specs) -> dict[str, list[str | None]]:
    """Return the paths of checkpoints on this disk that the pipeline doesn't train.

    Each has the state dicts that are taken of it.
    """
    own = defaultdict[str, list[str | None]](list)
    for checkpoint in specs.checkpoints.values():
        if checkpoint.path is not None and "://" not in checkpoint.path:
            own[checkpoint.path].append(checkpoint.state_dict)
    return own


def _lacks_optimizer(checkpoint: Path) -> bool:
    """Return whether a checkpoint's kind tells, unread, that no optimizer's state is in it."""
    if checkpoint.is_dir():
        return not (checkpoint / OPTIMIZER_FILE).is_file()
    return checkpoint.suffix == ".safetensors"


def bring_along(files: Sequence[Path]) -> list[str]:
    """Return files for jobs that share no disk with Snakemake; refuse what it would not bring."""
    outside = [file for file in files if not file.resolve().is_relative_to(Path.cwd())]
    large = [file for file in files if file.stat().st_size > _MAX_SOURCE_BYTES]
    for wrong, rule in ((outside, "lie in the working folder"), (large, "have 10 MB at most")):
        if wrong:
            raise InputError(
                "Without a shared disk jobs get the study, the modules beside it, tables and "
                f"`data_files` with the workflow's sources: each must {rule}. Found "
                f"{', '.join(map(str, wrong))}. What is larger, or elsewhere, the study itself can "
                "fetch.",
                code="config.sources",
            )
    brought_along.extend(map(str, files))
    return list(map(str, files))


def _request(specs: Specs) -> dict[str, Any]:
    """Return the arguments of ``preflight_study`` that are the same for every split."""
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
    """Return sizes of the study, and keys of splits and checkpoints; read only what has a new key.

    So an experiment can be added where training data are no more.
    """
    request, shards, known = _request(specs), specs.shards, read_record(record)
    common = [specs.made_of, stage_digest(_STAGE), request]
    decisive = {
        s: [specs.experiments.get(s), shards[s], specs.targets_digest(s)] for s in shards
    } | {f"checkpoint {path}": [parts, digests[path]] for path, parts in checkpoints.items()}
    keys = {name: content_digest(name, common, own) for name, own in decisive.items()}
    old = {name for name, key in known.get("keys", {}).items() if keys.get(name) == key}
    if old == keys.keys():
        return known
    new = {path: c for path, c in checkpoints.items() if f"checkpoint {path}" not in old}
    request |= {
        "splits": {split: specs.experiments.get(split) for split in shards if split not in old},
        "shards": shards,
        "checkpoints": new,
        "questions": specs.questions,
        "conditions": specs.conditions,
        "without_numbers": any(_is_large(Path(path)) for path in checkpoints),
    }
    facts = _preflight_in_a_process(request, builder_of(specs.config))
    facts["n_samples"] = known.get("n_samples", {}) | facts["n_samples"]
    kept = [path for path in known.get("renamed", []) if f"checkpoint {path}" in old]
    facts |= {"keys": keys, "renamed": kept + facts["renamed"]}
    write_record(record, facts, must=False)
    return facts


def _is_large(checkpoint: Path) -> bool:
    """Return whether a checkpoint's model takes long to build, as an adapter's base may."""
    if not checkpoint.is_dir():
        return checkpoint.stat().st_size >= LARGE_BYTES
    files = [path for path in checkpoint.iterdir() if path.is_file()]
    is_adapter = any(path.name == ADAPTER_CONFIG for path in files)
    return is_adapter or sum(path.stat().st_size for path in files) >= LARGE_BYTES


def _preflight_in_a_process(request: Mapping[str, Any], builder: str) -> dict[str, Any]:
    """Return the sizes that ``preflight_study`` computes in a process of its own.

    Its error messages name ``builder`` in place of ``make_model()``.
    """
    # Files, not pipes: a process that the study leaves behind would hold these open.
    with tempfile.TemporaryDirectory() as name:
        asked, answer, said = (Path(name, file) for file in ("asked", "answer", "said"))
        asked.write_text(json.dumps(request), encoding="utf-8")
        # Modules in the working folder, or beside the script, must not shadow installed ones.
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        fork = Fork(_SCRIPT, [str(asked), str(answer), str(said)], environment)
        try:
            status = _waited(fork)
        except BaseException:
            fork.kill()
            raise
        texts = [
            file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
            for file in (answer, said)
        ]
    sizes, told = texts
    if status or not sizes:
        raise InputError(
            told.strip()
            or f"{request['study_file']}: the study must load. The process of the preflight "
            f"ended with exit status {status} and without a message: out of memory, or "
            "a crash.",
            code="config.preflight",
        )
    # Such as notices of transformers', which are no errors.
    print(told, end="", file=sys.stderr)
    reply = json.loads(sizes)
    if "refused" in reply:
        refused = reply["refused"].replace("make_model()", builder)
        raise InputError(refused, code="config.preflight")
    return reply


def _waited(fork: Fork) -> int:
    """Return the exit status of a process. Report once a minute that it still runs."""
    minutes = 0
    while (status := fork.wait(60)) is None:
        minutes += 1
        print(
            f"The study and its checkpoints have been read for {minutes} min before the first "
            "job. Ctrl-C ends it.",
            file=sys.stderr,
        )
    return status


def _check_sizes(specs: Specs, facts: Mapping[str, Any]) -> None:
    """Refuse what the study's sizes, and the memory of a job, don't allow."""
    config, memory_mb = specs.config, specs.config["compute"]["memory_mb"]
    proj_dim = None
    if specs.is_projected:
        proj_dim = config["projection"]["proj_dim"]
        chosen = projection_of(specs.all_features.under(""), [(facts["n_params"],)])
        check_columns(chosen.proj_dim, chosen.kind, specs.evaluation)
    n_targets = {split: facts["n_samples"][split] for split in specs.shards}
    n_targets |= {name: min(n_targets[name], MOST_TARGETS) for name in specs.conditions}
    n_train = n_targets.pop(TRAIN)
    # Its scores are never in memory together.
    n_targets.pop(POOL, None)
    check_memory(
        memory_mb,
        proj_dim=proj_dim,
        newton_params=facts["n_params"] if specs.is_newton else None,
        n_train=n_train,
        n_targets=n_targets,
        n_checkpoints=len(specs.checkpoints),
        keep=config["scoring"]["keep"],
        top=config["scoring"]["top"],
        divides=specs.self_influence.norm_power is not None,
    )
    if not specs.evaluation:
        return
    check_sizes(specs.evaluation, n_train, n_targets)
    # Models retrained elsewhere are counted when they are read.
    for experiment in specs.measured if "subsets" in specs.evaluation else []:
        evaluation_need(
            proj_dim=(proj_dim or 0) if specs.measures_features else 0,
            n_train=n_train,
            n_targets=n_targets[experiment],
            n_subsets=specs.evaluation["subsets"]["count"],
            n_checkpoints=len(specs.checkpoints),
            settings=specs.settings,
        ).check(memory_mb)
