"""Compare the effect of removing chosen training samples with that of removing random samples.

For a target, models were retrained without the samples that help it most, and the change in the
target's model output is measured. For a list, models were retrained without the listed samples, or
only on them, and the accuracy and the loss on all targets are measured.
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
    check_retrained,
    check_same,
    create,
    open_artifact,
    software,
)
from trak_core.evaluation.intervals import CONFIDENCE, accuracy_interval, mean_interval
from trak_core.model_outputs.about_outputs import About, about_output
from trak_core.runtime.files import file_digest
from trak_core.settings import RetrainedSpec
from trak_core.stages._shared import embeddings_hashes, naming_in_file, positions

# EVERYTHING is the name of the subset that contains all training samples. LESS stands between the
# names of two subsets in the name of their difference, such as "top less random".
EVERYTHING, LESS = "everything", " less "
# The smallest and the largest possible value of each measure. Differences between two values are at
# least minus the largest value.
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
    """Write tables that compare the outputs of retrained models.

    ``docs/reference/files.md`` describes the tables.

    The keys of ``naming`` are the methods by which the removed samples were chosen: the kind of a
    list, or ``top`` (the largest scores), ``random`` and baselines. The value for a method is a
    list that contains the argument ``naming`` of each of its retraining jobs. ``retrained``
    contains the files from these jobs in the same order. Their settings are ``spec``, except for
    ``subsets``. ``named_by`` contains the file of the list, or else the embeddings for the baseline
    ``embedding_cosine``. ``scores`` is the file with the scores and labels of the targets.
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
    jobs = [(by, job) for by, jobs_of_method in naming.items() for job in jobs_of_method]
    files, stored = [], {by: [] for by in naming}
    for (by, job), path in zip(jobs, retrained, strict=True):
        job_spec = spec if is_list else replace(spec, subsets=f"without {by}")
        stored_naming = naming_in_file(job) | {"named_by": hashes.get(by, [])}
        with open_artifact(path, replace(RETRAINED, rule="retrain_removals")) as file:
            check_retrained(file, job_spec, **stored_naming)
            columns = positions(file.columns("outputs"), job.get("target_ids", target_ids))
            keys = ("outputs", "predictions")
            stored[by].append([file.matrix(key)[:][:, columns] for key in keys])
        files.append(file)
        check_same("numbers of samples", files[0].spec["sizes"], file.spec["sizes"], file)
    sizes = files[0].spec["sizes"]
    outputs, predictions = {}, {}
    for by, values in stored.items():
        of_outputs, of_predictions = zip(*values, strict=True)
        outputs |= _by_subset(by, of_outputs, spec, len(sizes))
        predictions |= _by_subset(by, of_predictions, spec, len(sizes))
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
    made_by = software(code, "cpu", "numpy", "pandas")
    with create(removals, REMOVALS, file_spec, made_by, confidence=CONFIDENCE, **counts) as writer:
        writer.table("summary", summary, ["measure", "subset", "n"])
        writer.table("targets", table, ["measure", "subset", "n", "target_id"])
    print(summary.to_string(index=False))


def _by_subset(
    by: str, parts: Sequence[np.ndarray], spec: RetrainedSpec, n_sizes: int
) -> dict[str, np.ndarray]:
    """Return arrays of shape (sizes, draws, seeds, targets) by the name of the subset.

    ``parts`` contains an array for each retraining job of the method ``by``, such as model outputs,
    of shape (models, targets). The models are in the order in which ``retrain`` trains them.
    """
    if spec.subsets == "list":
        values = np.stack(parts, axis=1)[:, None]
        everything, listed, random = np.split(values, [1, 1 + n_sizes])
        return {EVERYTHING: everything, "list": listed, "random": random}
    if by == "random":
        (part,) = parts
        values = part.reshape(-1, spec.seeds, part.shape[1])
        random = values[1:].reshape(n_sizes, spec.draws, *values.shape[1:])
        return {EVERYTHING: values[:1, None], "random": random}
    # A job trains models for each of its m targets, and measures the outputs of all m targets. Only
    # the outputs of a model's own target are kept, which are on the diagonal.
    values = []
    for part in parts:
        m = part.shape[1]
        values.append(part.reshape(m, n_sizes, spec.seeds, m).diagonal(axis1=0, axis2=3))
    return {by: np.concatenate(values, axis=-1)[:, None]}


def measures(
    about: About, outputs: np.ndarray, predictions: np.ndarray, labels: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the measures of retrained models for the samples in a list, by name.

    Each measure is a float64 array of the same shape as ``outputs``. ``output`` is the model output
    f. If labels are classes, ``accuracy`` is 1 if the prediction equals the label, else 0, and
    ``target_loss`` is -log p(label) = log(1 + exp(-f)). For regression, ``target_loss`` is half the
    squared error. For other model outputs, the loss is left out, as f does not determine it.
    ``outputs`` and ``predictions`` have shape (..., targets), and ``labels`` has shape (targets,).
    """
    f = outputs.astype(np.float64)
    if about.labels_are_classes:
        right = (predictions == labels).astype(np.float64)
        return {"accuracy": right, "target_loss": np.logaddexp(0, -f), "output": f}
    if about.weighs_by_curvature:  # Without classes, this is a regression.
        return {"target_loss": (labels - f) ** 2 / 2, "output": f}
    return {"output": f}


def effects(
    outputs: np.ndarray, predictions: np.ndarray, before: np.ndarray, predicted_before: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the effects of removing samples on model outputs and predictions, by name.

    ``before`` and ``predicted_before`` are the outputs and predictions of models that were trained
    on all samples with the same seeds. ``change`` is the change in the model output. If predictions
    are classes, ``flips`` is 1 where the prediction has changed, else 0. If ``outputs`` is the
    array ``before`` itself, nothing was removed, and the only measure is ``output``.
    """
    if outputs is before:
        return {"output": before.astype(np.float64)}
    changes = {"change": outputs.astype(np.float64) - before}
    if predictions.dtype.kind != "f":
        changes["flips"] = (predictions != predicted_before).astype(np.float64)
    return changes


def removal_tables(
    values: Mapping[str, Mapping[str, np.ndarray]], sizes: Sequence[int], target_ids: Sequence[Any]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a table of means over seeds and targets, and a table of means over seeds by target.

    ``values`` maps names of subsets and then of measures to arrays of shape (sizes, draws, seeds,
    targets). The subset ``everything`` has only the size 0. The first other subset is compared with
    each of the remaining ones. Differences are computed between models that were trained with the
    same seed, because the effect of the seed then cancels.
    """
    summary, targets = [], []
    for measure in dict.fromkeys(name for of_subset in values.values() for name in of_subset):
        # Arrays of shape (sizes, seeds, targets), averaged over the random draws of samples.
        means = {
            subset: of_subset[measure].mean(axis=1)
            for subset, of_subset in values.items()
            if measure in of_subset
        }
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
                    names = {"measure": measure, "subset": subset, "n": n, "target_id": target_ids}
                    targets.append(pd.DataFrame(names | {"mean": part.mean(axis=0)}))
    columns = ["measure", "subset", "n", "mean", "low", "high"]
    return pd.DataFrame(summary, columns=columns), pd.concat(targets, ignore_index=True)
