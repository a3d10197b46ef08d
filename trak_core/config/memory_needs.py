"""Compute how much memory the arrays of each kind of job need.

Jobs process large arrays in blocks of rows, and use this module to choose the number of rows in a
block. Before the first job starts, a run checks that ``compute.memory_mb`` is enough for all jobs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trak_core.errors import InputError
from trak_core.settings import Combine, Setting

# Jobs request additional memory for a model whose weights have at least this many bytes.
LARGE_BYTES = 2**28
# The smallest number of rows in a block. With smaller blocks, most of the time would be spent on
# reading from disk.
_LEAST_ROWS = 64
# The number of rows in one HDF5 chunk of a scores file. Blocks consist of whole chunks, because
# HDF5 always reads and writes whole chunks, and a chunk in two blocks would be read twice.
CHUNK_ROWS = 1024
_FEWER_NUMBERS = "use a projection or fewer label_draws, or split the experiment"
# The number of bootstrap draws for the confidence intervals of the scores of groups.
_GROUP_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that a job needs: ``fixed_bytes``, and ``row_bytes`` for each row of a block.

    A job has two blocks in memory at the same time. ``remedy`` tells the user what else helps if
    ``compute.memory_mb`` is too small.
    """

    job: str
    fixed_bytes: int
    row_bytes: int = 0
    remedy: str = "lower projection.proj_dim, or split the experiment"

    def check(self, memory_mb: int) -> None:
        """Raise an error if the job needs more than ``memory_mb`` even with the smallest blocks."""
        least_mb = -(-(self.fixed_bytes + 2 * _LEAST_ROWS * self.row_bytes) // 2**20)
        if least_mb > memory_mb:
            raise InputError(
                f"compute.memory_mb must be at least {least_mb} MiB for {self.job}. Found "
                f"{memory_mb}. Raise compute.memory_mb, {self.remedy}.",
                code="config.memory",
            )

    def rows(self, memory_mb: int) -> int:
        """Return the largest number of rows in a block with which the job fits in ``memory_mb``."""
        self.check(memory_mb)
        return _whole_chunks((memory_mb * 2**20 - self.fixed_bytes) // 2 // self.row_bytes)


def _whole_chunks(rows: int) -> int:
    """Return ``rows`` rounded down to a multiple of CHUNK_ROWS, or to a power of 2 if smaller."""
    return rows // CHUNK_ROWS * CHUNK_ROWS or 2 ** (max(1, rows).bit_length() - 1)


def weights_mb(
    model_bytes: int, checkpoint: str | None, *, reads_optimizer: bool, is_renamed: bool = False
) -> int:
    """Return how many MiB a job requests for a model's weights. For small models, this is 0.

    Reading a checkpoint needs a second copy of the weights in memory, unless they are in a
    safetensors file. If the job also reads Adam's state, this adds two tensors for each parameter.

    Args:
        model_bytes: The size of the weights.
        checkpoint: The path of the checkpoint, or None if the pipeline trains the model.
        reads_optimizer: Whether the job reads Adam's state.
        is_renamed: Whether transformers renames the weights when it loads the checkpoint.
    """
    if model_bytes < LARGE_BYTES:
        return 0
    path = Path(checkpoint or "")
    files = path.iterdir() if checkpoint and path.is_dir() else [path]
    copies = 1 if any(file.suffix == ".safetensors" for file in files) else 2
    # Renaming needs more copies. When transformers renamed the weights of mixtures of experts, the
    # measured memory was 3.3 times their size.
    copies = 4 if is_renamed else copies
    return -(-(copies + 2 * reads_optimizer) * model_bytes // 2**20)


def normal_matrix_need(proj_dim: int, *, divides: bool) -> Need:
    """Return the memory for computing a normal matrix and its eigenvalues.

    The job needs three matrices: the sum over all blocks, the product for the current block, and
    LAPACK's copy. If ``divides`` is true, scores are divided by their norm, as with
    ``unit_average``. This needs sums with two other weightings of the samples, and eigenvectors.
    """
    job = f"a normal matrix with proj_dim {proj_dim}"
    return Need(job, (56 if divides else 24) * proj_dim**2, 16 * proj_dim)


def scores_need(proj_dim: int, n_targets: int) -> Need:
    """Return the memory for one checkpoint's scores, including its factorized normal matrix."""
    job = f"the scores of one checkpoint with proj_dim {proj_dim} and {n_targets} targets"
    return Need(job, 24 * proj_dim * (proj_dim + n_targets), 12 * (proj_dim + n_targets))


def gramian_need(n_train: int, n_columns: int) -> Need:
    """Return the memory for the inner products of gradients, without samples and activations."""
    job = f"a Gramian of {n_train} x {n_columns} inner products"
    return Need(job, 8 * n_train * n_columns, remedy=_FEWER_NUMBERS)


def exact_need(n_rows: int, n_targets: int) -> Need:
    """Return the memory for scores from exact inner products of ``n_rows`` training gradients.

    The job needs the Gramian, the damped Gramian, LAPACK's copy, and the products with the targets.
    With ``label_draws``, ``n_rows`` includes the gradients for drawn labels.
    """
    numbers = f"three matrices of {n_rows} x {n_rows} numbers"
    job = f"exact scores from {n_rows} gradients ({numbers}) and {n_targets} targets"
    return Need(job, 24 * n_rows**2 + 48 * n_rows * n_targets, remedy=_FEWER_NUMBERS)


def average_need(
    *, n_train: int, n_targets: int, n_checkpoints: int, top: int, solved_dim: int | None
) -> Need:
    """Return the memory for averaging an experiment's scores.

    The job keeps in memory the ids, labels and mean outputs of all samples, the ``top`` positive
    and ``top`` negative influences for each target, and blocks of rows. With ``keep: top_k``, it
    also keeps the product of one checkpoint's target features and inverse normal matrix, which has
    ``solved_dim`` columns. Otherwise ``solved_dim`` is None.
    """
    kept = min(top, n_train) * n_targets
    fixed = 80 * n_train + 256 * n_targets + 400 * kept + 8 * (solved_dim or 0) * n_targets
    row = 64 * n_targets + 40 * n_checkpoints + 12 * (solved_dim or 0)
    job = f"the average for {n_train} training samples, {n_targets} targets and scoring.top {top}"
    return Need(job, fixed, row)


def holds_solved(need: Need, block: int, memory_mb: int, n_checkpoints: int, size: int) -> bool:
    """Return whether the averaging job can keep the solved targets of all checkpoints in memory.

    The solved targets of a checkpoint are the product of its target features and inverse normal
    matrix, a matrix of ``size`` numbers. ``need`` includes those of one checkpoint. ``block`` is
    the number of rows in a block.
    """
    spare = memory_mb * 2**20 - need.fixed_bytes - 2 * block * need.row_bytes
    return 8 * size * (n_checkpoints - 1) <= spare


@dataclass(frozen=True, slots=True)
class GroupsNeed:
    """The memory for sums of scores by group, with bootstrap draws, in blocks of targets and rows.

    A third of the memory is for the sums, and a third for the scores of a block.
    """

    n_groups: int
    n_targets: int
    n_checkpoints: int

    def targets(self, memory_mb: int) -> int:
        """Return the largest number of targets in a block for which the sums fit in memory."""
        of_target = 2 * 8 * _GROUP_DRAWS * self.n_groups
        return min(self.n_targets, max(1, memory_mb * 2**20 // 3 // of_target))

    def rows(self, memory_mb: int) -> int:
        """Return the largest number of training samples in a block whose scores fit in memory."""
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
    # Each loss weighting in the sweep needs an array of weights for the training samples. Two more
    # are for the baseline gradient_dot and for the scores of each run's last checkpoint. The sums
    # of scores over subsets need an array for each setting, and about 40 more for baselines, the
    # bootstrap and scores from fewer checkpoints.
    weightings = len({setting.loss_weighting for setting in settings}) + 2
    sums = 8 * n_subsets * n_targets * (len(settings) + 40)
    weights = 8 * n_train * (weightings + n_checkpoints)
    # `solve` is for the matrices from which the normal matrix of each loss_weight_power is
    # computed, eigenvectors, LAPACK's workspace, sums of features over subsets and target features.
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
