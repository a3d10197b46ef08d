"""Refuse gradients with NaN or infinity, zeros alone, or the same for all samples."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.errors import InputError, listed
from trak_core.gradients.gradient_consumers import Magnitude
from trak_core.gradients.gradient_methods import PerSample, gradients_one_by_one
from trak_core.gradients.model_inputs import Samples, as_batch
from trak_core.model_outputs.model_output import ModelOutput


def check_finite(result: PerSample, sample_ids: Sequence[object]) -> None:
    """Refuse NaN or infinity in whole gradients and outputs, by samples and parameters."""
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
    """Differentiate once more, slowly, to refuse NaN or infinity by samples and parameters."""
    batch = as_batch(samples, output)
    magnitude = Magnitude.zeros(parameters, len(batch))
    outputs, *_ = gradients_one_by_one(model, parameters, output, batch, magnitude)
    bad = {name: ~torch.isfinite(largest) for name, largest in magnitude.rows.items()}
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
        bad_ids = [sample_ids[i] for i in bad.nonzero().flatten().tolist()]
        overflow = ""
        if torch.float16 in dtypes:
            overflow = " float16 ends at 65504: bfloat16 or float32 weights reach further."
        raise InputError(
            "Per-sample gradients must be finite. Found NaN or infinity for the samples "
            f"{listed(bad_ids)} in {listed(names)}. Look for bad values "
            f"in these samples and in the checkpoint; an infinite score would hide them.{overflow}",
            code="gradients.not_finite",
        )


def refuse_not_finite(sample_ids: Sequence[object], numbers: str) -> None:
    """Raise an error that calls what is not finite ``numbers``, the beginning of a sentence."""
    bad_ids = list(dict.fromkeys(map(str, sample_ids)))
    raise InputError(
        f"{numbers} must be finite. Found NaN or infinity for the samples {listed(bad_ids)}. "
        "Look for bad values in these samples and in the checkpoint; an infinite score would hide "
        "them.",
        code="gradients.values_not_finite",
    )


def check_finite_gramian(
    gramian: np.ndarray, row_ids: Sequence[object], ids: Sequence[object]
) -> None:
    """Refuse an (n, m) Gramian with NaN or infinity; a bad gradient fills its row or column."""
    bad = ~np.isfinite(gramian)
    if bad.any():
        rows, columns = (np.flatnonzero(bad.all(axis=axis)).tolist() for axis in (1, 0))
        if not (rows or columns):  # too large for each other alone
            rows = np.flatnonzero(bad.any(axis=1)).tolist()
        bad_ids = [row_ids[i] for i in rows] + [ids[i] for i in columns]
        refuse_not_finite(bad_ids, "Inner products of gradients")


# Two computations of one sample's features differ by this part of the largest entry, at most.
_ROUNDING = 1e-5


class Variety:
    """Counts samples without a gradient, and compares all with the first, a block at a time.

    Attributes:
        n_zero: How many of the ``n_samples`` seen have zeros alone.
        are_alike: Whether all are equal, to rounding.
    """

    def __init__(self) -> None:
        self.n_samples = self.n_zero = 0
        self.are_alike = True
        self._first: np.ndarray | None = None

    def add(self, rows: np.ndarray) -> None:
        """Take a row a sample, shape (n, k): features, or inner products with all others."""
        first = rows[0].astype(np.float64) if self._first is None else self._first
        self._first = first
        self.n_samples += len(rows)
        self.n_zero += int((~rows.any(axis=1)).sum())
        if self.are_alike:
            allowed = max(_ROUNDING, 4 * float(np.finfo(rows.dtype).eps))
            largest = float(np.abs(first).max())
            self.are_alike = bool(np.abs(rows - first).max() <= allowed * largest)

    def check(self, samples: str, *, must_differ: bool) -> None:
        """Refuse several samples of which none has a gradient; warn if most of them don't.

        Equal gradients of several are refused where they ``must_differ``: targets may be asked
        twice. ``samples`` says whose they are.
        """
        n = self.n_samples
        if n > 1 and self.n_zero == n:
            raise InputError(
                f"Gradients must not be 0 for every sample. Found zeros alone for all {n} "
                f"{samples}: all scores would be 0. Look for `parameters` that don't lead to the "
                "model output, for layers whose weights in the checkpoint are 0 or let nothing "
                "pass, and for a `detach()` on the way.",
                code="gradients.all_zero",
            )
        if n > 1 and self.are_alike and must_differ:
            raise InputError(
                f"Gradients must tell samples apart. Found the same for all {n} {samples}: scores "
                "would not depend on them. Look for a data set that returns one sample again and "
                "again, for a model that ignores its input, and for `parameters` whose gradient is "
                "a constant, such as the last bias of a regression.",
                code="gradients.all_alike",
            )
        if 2 * self.n_zero > n:
            print(
                f"Warning: the gradients of {self.n_zero} of {n} {samples} are 0 in every entry, "
                "and so are their scores. Look for layers that let nothing pass, such as a ReLU "
                "whose inputs are all negative.",
                flush=True,
            )
