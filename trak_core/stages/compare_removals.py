"""Compare models retrained without chosen samples, or on them, with those of random samples.

For an experiment's targets the chosen samples are, for each target, those that help it most: what
is measured is the target's own output. Samples of a list are the same for all targets, of which
accuracy and loss are measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import (
    REMOVALS,
    RETRAINED,
    SCORES,
    Artifact,
    check_retrained,
    check_same,
    create,
    open_artifact,
    software,
)
from trak_core.evaluation.intervals import CONFIDENCE, accuracy_interval, mean_interval
from trak_core.model_outputs.about_outputs import About, about_output
from trak_core.spec import RetrainedSpec
from trak_core.stages._shared import embeddings_hashes, naming_in_file
from trak_core.system.files import file_digest

# The subset of all training samples, and what stands between two whose difference a row is.
EVERYTHING, LESS = "everything", " less "
# The smallest and largest numbers of measures; a difference is at least the largest, negated.
_BOUNDS = {"accuracy": (0.0, 1.0), "flips": (0.0, 1.0), "target_loss": (0.0, np.inf)}


def compare_removals(
    *,
    removals: Path,
    scores: Path,
    retrained: Sequence[Path],
    named_by: Sequence[Path] = (),
    spec: RetrainedSpec,
    naming: dict[str, Any],
    code: str,
) -> None:
    """Write what models retrained without chosen samples, or on them, make of targets.

    ``naming`` has the ``naming`` of each job that retrained, by what chose its samples: a list
    alone; or ``top`` (the scores), ``random`` and baselines. ``retrained`` has their files in this
    order, made for ``spec`` except for the name of the subsets. In ``named_by`` is the list, or
    what a baseline compares. ``scores`` are those of the experiment whose targets count.
    ``docs/reference/evaluation-files.md`` describes the tables.
    """
    with open_artifact(scores, SCORES) as file:
        targets, scores_hash = file.table("targets"), file.content_hash
        experiment = file.spec["experiment"]
    hashes, is_list = {"top": [scores_hash]}, spec.subsets == "list"
    if is_list:
        (kind,), target_ids = naming, targets["id"].tolist()
        hashes[kind] = [file_digest(path) for path in named_by]
    else:
        kind, target_ids = None, [target for job in naming["top"] for target in job["target_ids"]]
        hashes["embedding_cosine"] = embeddings_hashes(named_by)
    jobs = [(by, job) for by, own in naming.items() for job in own]
    files, read = [], {by: [] for by in naming}
    for (by, job), path in zip(jobs, retrained, strict=True):
        made_for = spec if is_list else replace(spec, subsets=f"without {by}")
        about = naming_in_file(job) | {"named_by": hashes.get(by, [])}
        file, *values = _read(path, job.get("target_ids", target_ids), made_for, about)
        files.append(file)
        read[by].append(values)
    sizes = files[0].spec["sizes"]
    for file in files:
        check_same("numbers of samples", sizes, file.spec["sizes"], file)
    outputs, predictions = {}, {}
    for by, own in read.items():
        for kept, parts in zip((outputs, predictions), zip(*own, strict=True), strict=True):
            kept.update(_by_subset(by, parts, spec, len(sizes)))
    about, labels = about_output(spec.model_output), targets["label"].to_numpy()
    whole = outputs[EVERYTHING], predictions[EVERYTHING]
    values = {
        subset: measures(about, f, predictions[subset], labels)
        if is_list
        else effects(f, predictions[subset], *whole)
        for subset, f in outputs.items()
    }
    summary, table = removal_tables(values, sizes, target_ids)
    file_spec = spec.as_dict() | {"experiment": experiment, "list": kind, "scores": scores_hash}
    file_spec["retrained"] = [file.content_hash for file in files]
    counts = {"n_trainings": whole[0].shape[2], "n_targets": len(target_ids)}
    provenance = software(code, "cpu", "numpy", "pandas")
    with create(
        removals, REMOVALS, file_spec, provenance, confidence=CONFIDENCE, **counts
    ) as writer:
        writer.table("summary", summary, ["measure", "subset", "n"])
        writer.table("targets", table, ["measure", "subset", "n", "target_id"])
    print(summary.to_string(index=False))


def _read(
    path: Path, target_ids: Sequence[Any], spec: RetrainedSpec, about: Mapping[str, Any]
) -> tuple[Artifact, np.ndarray, np.ndarray]:
    """Return a file of retrained models, and outputs and predictions, shape (models, m)."""
    with open_artifact(path, replace(RETRAINED, rule="retrain_removals")) as file:
        check_retrained(file, spec, **about)
        place = {target: i for i, target in enumerate(file.columns("outputs"))}
        columns = [place[target] for target in target_ids]
        outputs, predictions = (
            file.matrix(key)[:][:, columns] for key in ("outputs", "predictions")
        )
        return file, outputs, predictions


def _by_subset(
    by: str, parts: Sequence[np.ndarray], spec: RetrainedSpec, n_sizes: int
) -> dict[str, np.ndarray]:
    """Return what files of jobs by one choice hold by subset, (sizes, draws, trainings, m).

    Each part has shape (models, m), in the order in which ``retrain`` trains.
    """
    if spec.subsets == "list":
        of_draws = np.stack(parts, axis=1)[:, None]
        everything, own, random = np.split(of_draws, [1, 1 + n_sizes])
        return {EVERYTHING: everything, "list": own, "random": random}
    if by == "random":
        (of_all,) = (part.reshape(-1, spec.seeds, part.shape[1]) for part in parts)
        random = of_all[1:].reshape(n_sizes, spec.draws, *of_all.shape[1:])
        return {EVERYTHING: of_all[:1, None], "random": random}
    # A group's models are those without the first samples of one of its targets.
    own = [
        part.reshape(m := part.shape[1], n_sizes, spec.seeds, m).diagonal(axis1=0, axis2=3)
        for part in parts
    ]
    return {by: np.concatenate(own, axis=-1)[:, None]}


def measures(
    about: About, outputs: np.ndarray, predictions: np.ndarray, labels: np.ndarray
) -> dict[str, np.ndarray]:
    """Return what models make of targets, one number a model and target, float64.

    ``output`` is f. For classes there are ``accuracy``, 1 where the prediction is the label, and
    ``target_loss``, -log p of the label, which is log(1 + exp(-f)); in a regression that is half
    the squared error. Other model outputs have no loss that follows from f. Outputs and predictions
    have shape (..., m), the targets' labels (m,).
    """
    f = outputs.astype(np.float64)
    if about.labels_are_classes:
        right = (predictions == labels).astype(np.float64)
        return {"accuracy": right, "target_loss": np.logaddexp(0, -f), "output": f}
    if about.weighs_by_curvature:  # and no classes: a regression
        return {"target_loss": (labels - f) ** 2 / 2, "output": f}
    return {"output": f}


def effects(
    outputs: np.ndarray, predictions: np.ndarray, before: np.ndarray, said_before: np.ndarray
) -> dict[str, np.ndarray]:
    """Return how models differ from those of the same seed that saw everything, float64.

    ``change`` is that of f, and where predictions are classes ``flips`` is 1 where they are others.
    The models that saw everything have no change: their own outputs are ``output``.
    """
    if outputs is before:
        return {"output": before.astype(np.float64)}
    changes = {"change": outputs.astype(np.float64) - before}
    if predictions.dtype.kind != "f":
        changes["flips"] = (predictions != said_before).astype(np.float64)
    return changes


def removal_tables(
    values: Mapping[str, Mapping[str, np.ndarray]], sizes: Sequence[int], target_ids: Sequence[Any]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return ``summary``, means over trainings and targets, and ``targets``, over trainings alone.

    ``values`` has, by subset and measure, shape (sizes, draws, trainings, m); ``everything`` has
    one size, 0. The first other subset is compared with the rest. What is subtracted belongs to
    models of one seed, so that what a seed does cancels.
    """
    summary, targets = [], []
    for measure in dict.fromkeys(name for own in values.values() for name in own):
        # With other random samples in each draw, their mean is the number of one training.
        means = {s: own[measure].mean(axis=1) for s, own in values.items() if measure in own}
        first, *others = [subset for subset in means if subset != EVERYTHING] or [EVERYTHING]
        less = {f"{first}{LESS}{other}": means[first] - means[other] for other in others}
        least, most = _BOUNDS.get(measure, (-np.inf, np.inf))
        interval = accuracy_interval if most == 1 else mean_interval
        for subset, numbers in (means | less).items():
            lowest = -most if subset in less else least
            for n, part in zip([0] if subset == EVERYTHING else sizes, numbers, strict=True):
                low, high = interval(part)
                row = measure, subset, n, float(part.mean()), max(low, lowest), min(high, most)
                summary.append(row)
                if subset not in less:
                    about = {"measure": measure, "subset": subset, "n": n, "target_id": target_ids}
                    targets.append(pd.DataFrame(about | {"mean": part.mean(axis=0)}))
    columns = ["measure", "subset", "n", "mean", "low", "high"]
    return pd.DataFrame(summary, columns=columns), pd.concat(targets, ignore_index=True)
