"""Gradients, and what is made of them, must be finite."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.errors import InputError
from trak_core.gradients._batch import Samples, as_batch
from trak_core.gradients._consumers import Magnitude
from trak_core.gradients._one_by_one import gradients_one_by_one
from trak_core.gradients._per_sample import PerSample
from trak_core.model_outputs.model_output import ModelOutput


def check_finite(result: PerSample, sample_ids: Sequence[object]) -> None:
    """Stop at NaN or infinity in whole gradients.

    Args:
        result: What a batch gave.
        sample_ids: The batch's ids, for the message.

    Raises:
        InputError: Naming the samples and the parameters.
    """
    bad = {
        name: ~torch.isfinite(block.reshape(len(block), -1)).all(dim=1)
        for name, block in result.gradients.items()
    }
    dtypes = {block.dtype for block in result.gradients.values()}
    _refuse_bad(~torch.isfinite(result.outputs), bad, dtypes, sample_ids)


def explain_not_finite(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    sample_ids: Sequence[object],
) -> None:
    """Differentiate a batch once more, slowly, to say where NaN or infinity comes from.

    Args:
        model: As for ``gradients_one_by_one``.
        parameters: From ``select_parameters``.
        output: The model output f.
        samples: The batch, see ``as_batch``.
        sample_ids: Its ids, for the message.

    Raises:
        InputError: Naming the samples and the parameters; none if all gradients are finite.
    """
    batch = as_batch(samples, output)
    sums = Magnitude.zeros(parameters, len(batch))
    outputs, *_ = gradients_one_by_one(model, parameters, output, batch, sums)
    bad = {name: ~torch.isfinite(of_each) for name, of_each in sums.rows.items()}
    dtypes = {parameter.dtype for parameter in parameters.values()}
    _refuse_bad(~torch.isfinite(outputs), bad, dtypes, sample_ids)


def _refuse_bad(
    bad: Tensor,
    by_parameter: Mapping[str, Tensor],
    dtypes: Collection[torch.dtype],
    sample_ids: Sequence[object],
) -> None:
    names = ["the model output itself"] if bad.any() else []
    for name, rows in by_parameter.items():
        if rows.any():
            names.append(name)
            bad = bad | rows
    if names:
        found = [sample_ids[i] for i in bad.nonzero().flatten().tolist()]
        overflow = (
            " float16 ends at 65504: bfloat16 or float32 weights reach further."
            if torch.float16 in dtypes
            else ""
        )
        raise InputError(
            "Per-sample gradients must be finite. Found NaN or infinity for the samples "
            f"{', '.join(map(str, found[:8]))}{' and more' if len(found) > 8 else ''} in "
            f"{', '.join(names[:8])}{' and more' if len(names) > 8 else ''}. Look for bad values "
            f"in these samples and in the checkpoint; an infinite score would hide them.{overflow}",
            code="gradients.not_finite",
        )


def refuse_not_finite(sample_ids: Sequence[object], what: str) -> None:
    """Stop at numbers that are not finite.

    Args:
        sample_ids: Of the samples they belong to.
        what: What they are, at the beginning of a sentence.

    Raises:
        InputError: Always; it names the samples.
    """
    found = list(dict.fromkeys(map(str, sample_ids)))
    raise InputError(
        f"{what} must be finite. Found NaN or infinity for the samples {', '.join(found[:8])}"
        f"{' and more' if len(found) > 8 else ''}. Look for bad values in these samples and in the "
        "checkpoint; an infinite score would hide them.",
        code="gradients.values_not_finite",
    )


def check_finite_gramian(
    gramian: np.ndarray, row_ids: Sequence[object], ids: Sequence[object]
) -> None:
    """Refuse a Gramian with NaN or infinity: a bad gradient fills its whole row or column.

    Args:
        gramian: Inner products of gradients, shape (n, m).
        row_ids: Of the n samples.
        ids: Of the m samples.

    Raises:
        InputError: It names the samples.
    """
    bad = ~np.isfinite(gramian)
    if bad.any():
        rows, columns = (np.flatnonzero(bad.all(axis=axis)).tolist() for axis in (1, 0))
        if not (rows or columns):  # too large for each other alone
            rows = np.flatnonzero(bad.any(axis=1)).tolist()
        found = [row_ids[i] for i in rows] + [ids[i] for i in columns]
        refuse_not_finite(found, "Inner products of gradients")
