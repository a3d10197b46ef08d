"""Compute the memory that the arrays of each kind of job need.

Jobs process arrays in blocks of rows, and use this module to choose the number of rows in a block.
Before the first job of a run, ``compute.memory_mb`` is compared with what each job needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trak_core.errors import InputError
from trak_core.settings import Combine, Setting

# Jobs request additional memory for a model whose weights have at least this many bytes.
LARGE_BYTES = 2**28
# The smallest number of rows in a block. With smaller blocks, reading from disk would take longer
# than computing.
_LEAST_ROWS = 64
# The number of rows in one HDF5 chunk of a scores file. Blocks consist of whole chunks, because
# HDF5 would read or write a chunk twice if it belonged to two blocks.
CHUNK_ROWS = 1024
_FEWER_NUMBERS = "use a projection or fewer label_draws, or split the experiment"
# The number of bootstrap samples for the confidence intervals of groups' scores.
_GROUP_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that a job needs: ``fixed_bytes``, and ``row_bytes`` for each row of a block."""

    job: str
    fixed_bytes: int
    row_bytes: int = 0
    remedy: str = "lower projection.proj_dim, or split the experiment"

    def check(self, memory_mb: int) -> None:
        """Raise an error if ``fixed_bytes`` and two of the smallest blocks exceed ``memory_mb``."""
        least_mb = -(-(self.fixed_bytes + 2 * _LEAST_ROWS * self.row_bytes) // 2**20)
        if least_mb > memory_mb:
            raise InputError(
                f"compute.memory_mb must be at least {least_mb} MiB for {self.job}. Found "
                f"{memory_mb}. Raise compute.memory_mb, {self.remedy}.",
                code="config.memory",
            )

    def rows(self, memory_mb: int) -> int:
        """Return how many rows a block can have if ``fixed_bytes`` and two blocks must fit."""
        self.check(memory_mb)
        return _whole_chunks((memory_mb * 2**20 - self.fixed_bytes) // 2 // self.row_bytes)


def _whole_chunks(rows: int) -> int:
    """Return ``rows`` rounded down to whole chunks, or to a power of 2 if less than a chunk."""
    return rows // CHUNK_ROWS * CHUNK_ROWS or 2 ** (max(1, rows).bit_length() - 1)


def weights_mb(
    model_bytes: int, checkpoint: str | None, *, reads_optimizer: bool, is_renamed: bool = False
) -> int:
    """Return the MiB that a job requests for a model's weights, or 0 for a small model.

    Reading weights needs a second copy in memory, unless they are in safetensors. Adam's state, if
    the job reads it, adds two tensors for each parameter. ``checkpoint`` is a path, or None if the
    pipeline trains the checkpoint. ``is_renamed``: whether transformers renames the weights.
    """
    if model_bytes < LARGE_BYTES:
        return 0
    path = Path(checkpoint or "")
    files = path.iterdir() if checkpoint and path.is_dir() else [path]
    copies = 1 if any(file.suffix == ".safetensors" for file in files) else 2
    # Renaming weights needs more copies. For mixtures of experts, the measured memory was 3.3 times
    # the size of the weights.
    copies = 4 if is_renamed else copies
    return -(-(copies + 2 * reads_optimizer) * model_bytes // 2**20)


def normal_matrix_need(proj_dim: int, *, divides: bool) -> Need:
    """Return the memory for a normal matrix: the sum, the term of one block, and LAPACK's copy.

    If ``divides`` is true, scores are divided by their norm, as with ``unit_average``, which needs
    two more sums and the eigenvectors.
    """
    job = f"a normal matrix with proj_dim {proj_dim}"
    return Need(job, (56 if divides else 24) * proj_dim**2, 16 * proj_dim)


def scores_need(proj_dim: int, n_targets: int) -> Need:
    """Return the memory for a checkpoint's normal matrix, Cholesky factor and scores."""
    job = f"the scores of one checkpoint with proj_dim {proj_dim} and {n_targets} targets"
    return Need(job, 24 * proj_dim * (proj_dim + n_targets), 12 * (proj_dim + n_targets))


def gramian_need(n_train: int, n_columns: int) -> Need:
    """Return the memory for a float64 Gramian, without the memory for samples and activations."""
    job = f"a Gramian of {n_train} x {n_columns} inner products"
    return Need(job, 8 * n_train * n_columns, remedy=_FEWER_NUMBERS)


def exact_need(n_rows: int, n_targets: int) -> Need:
    """Return the memory for exact scores.

    It holds the Gramian of ``n_rows`` training gradients (including those for drawn labels), the
    damped Gramian, LAPACK's copy, and the products with the targets.
    """
    numbers = f"three matrices of {n_rows} x {n_rows} numbers"
    job = f"exact scores from {n_rows} gradients ({numbers}) and {n_targets} targets"
    return Need(job, 24 * n_rows**2 + 48 * n_rows * n_targets, remedy=_FEWER_NUMBERS)


def average_need(
    *, n_train: int, n_targets: int, n_checkpoints: int, top: int, solved_dim: int | None
) -> Need:
    """Return the memory for averaging an experiment's scores.

    The job keeps in memory the ids, labels and mean outputs of all samples, the ``top`` positive
    and ``top`` negative influences for each target, and a block of rows. With ``keep: top_k``, it
    also keeps, for one checkpoint, the product of target features and inverse normal matrix, which
    has ``solved_dim`` columns. Otherwise ``solved_dim`` is None.
    """
    kept = min(top, n_train) * n_targets
    fixed = 80 * n_train + 256 * n_targets + 400 * kept + 8 * (solved_dim or 0) * n_targets
    row = 64 * n_targets + 40 * n_checkpoints + 12 * (solved_dim or 0)
    job = f"the average for {n_train} training samples, {n_targets} targets and scoring.top {top}"
    return Need(job, fixed, row)


def holds_solved(need: Need, block: int, memory_mb: int, n_checkpoints: int, size: int) -> bool:
    """Return whether the solved targets of all checkpoints fit in memory together with two blocks.

    The solved targets are the target features times the inverse normal matrix, which are ``size``
    numbers for each checkpoint. ``block`` is the number of rows in a block.
    """
    spare = memory_mb * 2**20 - need.fixed_bytes - 2 * block * need.row_bytes
    return 8 * size * (n_checkpoints - 1) <= spare


@dataclass(frozen=True, slots=True)
class GroupsNeed:
    """The memory for the sum of scores in each group, with bootstrap confidence intervals."""

    n_groups: int
    n_targets: int
    n_checkpoints: int

    def targets(self, memory_mb: int) -> int:
        """Return for how many targets the sums by group fit in a third of the memory."""
        of_target = 2 * 8 * _GROUP_DRAWS * self.n_groups
        return min(self.n_targets, max(1, memory_mb * 2**20 // 3 // of_target))

    def rows(self, memory_mb: int) -> int:
        """Return for how many rows the scores fit in a third of the memory."""
        of_row = 8 * (self.n_targets * (3 * self.n_checkpoints + 2) + 2 * _GROUP_DRAWS)
        return _whole_chunks(memory_mb * 2**20 // 3 // of_row)


def evaluation_need(
    *,
    proj_dim: int,
    n_train: int,
    n_targets: int,
    n_subsets: int,
    n_checkpoints: int,
    settings: Sequence[Setting],
) -> Need:
    """Return the memory for an evaluation. ``proj_dim`` is 0 if no features are read."""
    # Each loss weighting in the sweep needs an array of weights. Two more are for the baseline
    # gradient_dot and for the scores of each run's last checkpoint. Baselines, the bootstrap and
    # scores from fewer checkpoints need about 40 more arrays of subset sums.
    weightings = len({setting.loss_weighting for setting in settings}) + 2
    sums = 8 * n_subsets * n_targets * (len(settings) + 40)
    weights = 8 * n_train * (weightings + n_checkpoints)
    # `solve` is the memory for the matrices from which the normal matrix of each loss_weight_power
    # is computed, the eigenvectors, LAPACK's workspace, two copies of subset sums, and the targets.
    n_powers = len({setting.loss_weight_power for setting in settings}) or 1
    solve = (24 * n_powers + 48) * proj_dim**2 + 24 * weightings * n_subsets * proj_dim
    solve += 20 * n_targets * proj_dim
    fixed = 16 * n_subsets * n_train + sums + weights + solve
    row = 64 * n_targets + 24 * proj_dim + 16 * n_subsets
    job = f"the evaluation of {n_targets} targets on {n_subsets} subsets of {n_train} samples"
    return Need(job, fixed, row, remedy="split the experiment, or remove values from the sweep")


def check_memory(
    config: Mapping[str, Any], n_train: int, n_targets: Mapping[str, int], n_checkpoints: int
) -> None:
    """Raise an error if ``compute.memory_mb`` is too small for a job that computes scores."""
    memory_mb, scoring = config["compute"]["memory_mb"], config["scoring"]
    is_projected = not isinstance(config["projection"], str)
    proj_dim = config["projection"]["proj_dim"] if is_projected else None
    if proj_dim is not None:
        divides = Combine(scoring["combine"]).divides_by_norm
        normal_matrix_need(proj_dim, divides=divides).check(memory_mb)
    for experiment, m in n_targets.items():
        sizes = {"n_train": n_train, "n_targets": m, "n_checkpoints": n_checkpoints}
        solved_dim = proj_dim if scoring["keep"] == "top_k" else None
        average = average_need(**sizes, top=scoring["top"], solved_dim=solved_dim)
        n_rows = n_train * (1 + config["label_draws"])  # Each drawn label adds a gradient.
        solve = exact_need(n_rows, m) if proj_dim is None else scores_need(proj_dim, m)
        for need in (solve, average):
            try:
                need.check(memory_mb)
            except InputError as error:
                raise InputError(f"experiment {experiment}: {error}", error.code) from None
