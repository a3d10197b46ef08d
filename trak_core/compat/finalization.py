"""Compute a store's features from its gradients, and scores from its features: 0.3.2's formula.

    K_c    = inv(G_c^T G_c + lambda I),  then K_c /= mean(|K_c|)
    scores = mean_c(G_c K_c T_c^T) * mean_c(Q_c)

over the checkpoints c, with projected training gradients G_c (n, k), target gradients T_c (m, k)
and loss weights Q_c (n, 1); inv is the pseudo-inverse where there is no inverse.

Source: the package ``trak``, version 0.3.2; Park et al., "TRAK", ICML 2023, equations 16 and 17.
"""

import warnings
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from trak_core.compat.checks import check_not_all_zero, listed, stored
from trak_core.compat.savers import AbstractSaver, ModelIDException
from trak_core.compat.score_computers import AbstractScoreComputer
from trak_core.errors import InputError


def checked_ids(saver: AbstractSaver, model_ids: Iterable[int] | None) -> list[int]:
    """Return the given model ids, which must be in the store, or all that it has."""
    saver.refresh()
    chosen = sorted(saver.model_ids) if model_ids is None else [int(m) for m in model_ids]
    unknown = [m for m in chosen if not saver.is_registered(m)]
    if unknown or not chosen:
        raise ModelIDException(
            f"Model ids must be in {saver.save_dir}, at least one. Found "
            f"{f'no {listed(unknown)}' if unknown else 'none'}; it has "
            f"{listed(sorted(saver.model_ids)) or 'none'}. `load_checkpoint` and `featurize` make "
            "them.",
            code="compat.model_ids",
        )
    return chosen


def finalize_model(
    saver: AbstractSaver,
    score_computer: AbstractScoreComputer,
    model_id: int,
    *,
    lambda_reg: float,
    device: str | torch.device,
    dtype: torch.dtype,
) -> bool:
    """Compute and store G K of one model id; return False if the store has it for this lambda."""
    saver.load_current_store(model_id)
    # Counted again: a killed process may have left its last samples uncounted.
    saver.serialize_current_model_id_metadata()
    state = saver.model_ids[model_id]
    if not state["is_featurized"]:
        missing = np.flatnonzero(np.asarray(saver.current_store["is_featurized"]).ravel() == 0)
        raise ModelIDException(
            f"All training samples must be featurized first. Found {len(missing)} of model id "
            f"{model_id} that are not: {listed(missing.tolist())}. Call `featurize` with them.",
            code="compat.not_featurized",
        )
    if state["is_finalized"] and state.get("lambda_reg") == lambda_reg:
        return False
    if saver.current_store["grads"] is None:
        raise InputError(
            f"Another lambda_reg needs the gradients of model id {model_id}. Found them deleted "
            f"(`del_grads`), and its features finalized with {state.get('lambda_reg')}, not "
            f"{lambda_reg}. Use that lambda_reg, or featurize under another model id.",
            code="compat.no_gradients",
        )
    # A kill from here on must not leave half of the features marked as finished.
    state["is_finalized"] = 0
    saver.serialize_current_model_id_metadata()
    gradients = torch.as_tensor(np.asarray(saver.current_store["grads"]), device=device)
    check_not_all_zero(gradients)
    xtx = score_computer.get_xtx(gradients)
    features = score_computer.get_x_xtx_inv(gradients, xtx)
    where = np.arange(len(features)), "finalized features"
    saver.current_store["features"][:] = stored(features, dtype, *where, may_vanish=True)
    state |= {"is_finalized": 1, "lambda_reg": lambda_reg}
    saver.serialize_current_model_id_metadata()
    return True


def _why_unusable(
    saver: AbstractSaver, model_id: int, exp_name: str, lambda_reg: float
) -> str | None:
    """Open a model id's arrays for an experiment, and say in words why its scores cannot count."""
    if not saver.model_ids[model_id]["is_finalized"]:
        return "its features are not finalized: call `finalize_features`"
    known = saver.model_ids[model_id].get("lambda_reg")
    if known != lambda_reg:
        return (
            f"its features are finalized with lambda_reg {known}, not {lambda_reg}: call "
            "`finalize_features`"
        )
    _open(saver, model_id, exp_name)
    targets = saver.current_store[f"{exp_name}_grads"]
    if targets is None:
        return "its targets are not scored: call `start_scoring_checkpoint` and `score`"
    unscored = np.flatnonzero(np.isnan(targets).any(axis=1))
    if len(unscored):
        return f"its targets {listed(unscored.tolist())} are not scored: call `score` with them"
    return None


def _open(saver: AbstractSaver, model_id: int, exp_name: str) -> None:
    """Open a model id's arrays for reading, and those of an experiment."""
    saver.load_current_store(model_id, mode="r")
    num_targets = saver.experiments[exp_name]["num_targets"]
    saver.load_current_store(model_id, exp_name, num_targets, mode="r")


def usable_ids(
    saver: AbstractSaver,
    exp_name: str,
    model_ids: Iterable[int] | None,
    *,
    lambda_reg: float,
    allow_skip: bool,
) -> list[int]:
    """Return the model ids that count in an experiment, and warn about the others.

    ``allow_skip`` leaves out whatever cannot count. If no model ids are named, those whose features
    are not finalized may be left out.
    """
    chosen = checked_ids(saver, model_ids)
    if exp_name not in saver.experiments:
        raise InputError(
            f"An experiment must be scored first. Found no {exp_name!r}; there are "
            f"{listed(sorted(saver.experiments)) or 'none'}. Call `start_scoring_checkpoint` and "
            "`score`.",
            code="compat.unknown_experiment",
        )
    reasons = {m: _why_unusable(saver, m, exp_name, lambda_reg) for m in chosen}
    missing = {m: reason for m, reason in reasons.items() if reason is not None}
    used = [m for m in chosen if m not in missing]
    text = "; ".join(f"model id {m}: {reason}" for m, reason in missing.items())
    unfinished = all(not saver.model_ids[m]["is_finalized"] for m in missing)
    may_skip = allow_skip or (model_ids is None and unfinished)
    if not used or (missing and not may_skip):
        raise ModelIDException(
            f"Checkpoints that are averaged must be finalized and scored. Found {text}."
            f"{' allow_skip=True leaves them out.' if used else ''}",
            code="compat.unusable",
        )
    if missing:
        warnings.warn(f"Left out of the scores of {exp_name!r}: {text}.", stacklevel=3)
    return used


def average_scores(
    saver: AbstractSaver,
    score_computer: AbstractScoreComputer,
    exp_name: str,
    model_ids: Sequence[int],
    device: str | torch.device,
) -> np.ndarray:
    """Return the scores of finalized and scored model ids, shape (n, m), float32."""
    total, weights = torch.zeros(0), np.zeros(1)
    for model_id in model_ids:
        _open(saver, model_id, exp_name)
        names = "features", f"{exp_name}_grads"
        # Copied: torch has no read-only tensors.
        features, targets = (
            torch.tensor(np.asarray(saver.current_store[name]), device=device) for name in names
        )
        if not len(total):
            total = torch.zeros(len(features), len(targets))
        score_computer.get_scores(features, targets, accumulator=total)
        weights = weights + np.asarray(saver.current_store["out_to_loss"], dtype=np.float64)
    total *= torch.from_numpy((weights / len(model_ids) ** 2).astype(np.float32))
    return total.numpy()
