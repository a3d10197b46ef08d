"""Tell how much memory a job holds, by formulas that jobs and the preflight share.

``compute.memory_mb`` is the budget for arrays. Standard library only, because every start of
Snakemake compares the budget with what the config needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trak_core.errors import InputError
from trak_core.spec import Setting

# Bytes of a model, or of its weights' files, from which on they count beside torch.
LARGE_BYTES = 2**28
# Weights that a job holds at most while transformers renames them: of experts 3.3 were measured.
_COPIES_OF_RENAMED = 4
# Blocks of fewer rows would read the disk more than compute.
_LEAST_ROWS = 64
# Rows of a chunk of a scores file: blocks that end with a chunk read and write no chunk twice.
CHUNK_ROWS = 1024
_FEWER = "take a projection in place of `projection: exact`, or cut the experiment in two"
# Draws of the intervals of groups' scores.
_GROUP_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Need:
    """Memory of one job, in bytes: fixed, and for each row of a block, if work is cut into rows."""

    job: str
    fixed_bytes: int
    row_bytes: int = 0
    remedy: str = "lower projection.proj_dim, or cut the experiment in two"

    def check(self, memory_mb: int) -> None:
        """Refuse a budget that doesn't hold the job with blocks of a reasonable size."""
        least_mb = -(-(self.fixed_bytes + 2 * _LEAST_ROWS * self.row_bytes) // 2**20)
        if least_mb > memory_mb:
            raise InputError(
                f"compute.memory_mb must hold {self.job}: {least_mb} MiB. Found {memory_mb}. "
                f"Raise it, {self.remedy}.",
                code="config.memory",
            )

    def rows(self, memory_mb: int) -> int:
        """Return how many rows a block may have: they get half of what the fixed part leaves."""
        self.check(memory_mb)
        return _whole_chunks((memory_mb * 2**20 - self.fixed_bytes) // 2 // self.row_bytes)


def _whole_chunks(rows: int) -> int:
    """Return whole chunks of rows, or a power of 2 of them: every chunk begins with a block."""
    return rows // CHUNK_ROWS * CHUNK_ROWS or 2 ** (max(1, rows).bit_length() - 1)


def weights_mb(
    model_bytes: int, checkpoint: str | None, *, reads_optimizer: bool, is_renamed: bool = False
) -> int:
    """Return the MiB that a job requests for a large model's weights; 0 for a small model's.

    Those of safetensors are read into the model itself, others beside it; transformers makes
    copies of what it renames. Adam's state is two tensors more of each. The checkpoint is None if
    it is trained first.
    """
    if model_bytes < LARGE_BYTES:
        return 0
    path = Path(checkpoint or "")
    files = path.iterdir() if checkpoint and path.is_dir() else [path]
    copies = 1 if any(file.suffix == ".safetensors" for file in files) else 2
    copies = _COPIES_OF_RENAMED if is_renamed else copies
    return -(-(copies + 2 * reads_optimizer) * model_bytes // 2**20)


def normal_matrix_need(proj_dim: int, *, divides: bool) -> Need:
    """Return what summing a normal matrix holds: the matrix, one block's share, LAPACK's copy.

    ``divides`` adds what dividing scores by their norm needs: two more sums, and eigenvectors.
    """
    job = f"the normal matrix of proj_dim {proj_dim}"
    return Need(job, (56 if divides else 24) * proj_dim**2, 16 * proj_dim)


def scores_need(proj_dim: int, n_targets: int) -> Need:
    """Return what one checkpoint's scores hold: matrix, factor and targets; then rows of both."""
    job = f"the solve for proj_dim {proj_dim} and {n_targets} targets"
    return Need(job, 24 * proj_dim * (proj_dim + n_targets), 12 * (proj_dim + n_targets))


def gramian_need(n_train: int, n_columns: int) -> Need:
    """Return what a Gramian of float64 takes; samples and activations come on top."""
    job = f"a Gramian of {n_train} x {n_columns} inner products"
    return Need(job, 8 * n_train * n_columns, remedy=_FEWER)


def exact_need(n_train: int, n_targets: int) -> Need:
    """Return what exact scores hold: the Gramian, damped, LAPACK's copy; targets' rows."""
    job = (
        f"exact scores of {n_train} training samples, three times {n_train} x {n_train} numbers, "
        f"and {n_targets} targets"
    )
    return Need(job, 24 * n_train**2 + 48 * n_train * n_targets, remedy=_FEWER)


# Vectors of all parameters that a target has: one a step, and what a step makes.
_NEWTON_VECTORS = 18


def newton_need(n_params: int, n_train: int, n_targets: int) -> Need:
    """Return what `gauss_newton` holds at least: scores twice, one target's vectors of float32."""
    job = f"{n_train} x {n_targets} scores, and {_NEWTON_VECTORS} vectors of {n_params} parameters"
    remedy = "name fewer `parameters`, or cut the experiment in two"
    fixed = 16 * n_train * n_targets + 4 * _NEWTON_VECTORS * n_params
    return Need(job, fixed, remedy=remedy)


def newton_targets(n_params: int, n_train: int, n_targets: int, memory_mb: int) -> tuple[int, int]:
    """Return how many targets `gauss_newton` solves for together, and the bytes that this takes.

    Vectors of more than one have half of the memory.
    """
    newton_need(n_params, n_train, n_targets).check(memory_mb)
    fixed, each = 16 * n_train * n_targets, 4 * _NEWTON_VECTORS * n_params
    block = max(1, min(n_targets, (memory_mb * 2**20 - fixed) // (2 * each)))
    return block, fixed + block * each


def average_need(
    *, n_train: int, n_targets: int, n_checkpoints: int, top: int, solved_dim: int | None
) -> Need:
    """Return what averaging an experiment's scores holds; a block of them counts once.

    Checkpoints are added up one at a time. Ids, labels and what the checkpoints make of all samples
    are kept, ``top`` influences of either sign, and the predictions of all checkpoints for the rows
    of a block. ``solved_dim`` is proj_dim where only the solved targets were kept, of one
    checkpoint at a time.
    """
    kept = min(top, n_train) * n_targets
    fixed = 80 * n_train + 256 * n_targets + 400 * kept + 8 * (solved_dim or 0) * n_targets
    row = 64 * n_targets + 40 * n_checkpoints + 12 * (solved_dim or 0)
    job = f"the average for {n_train} training samples, {n_targets} targets and scoring.top {top}"
    return Need(job, fixed, row)


def shard_rows(n_train: int, shard: int, n_shards: int) -> tuple[int, int]:
    """Return the training samples of one shard of an average: whole chunks, or none.

    No budget decides it: shards that were made under different ones fit together.
    """
    n_chunks = -(-n_train // CHUNK_ROWS)
    start, stop = (CHUNK_ROWS * (n_chunks * i // n_shards) for i in (shard - 1, shard))
    return start, min(stop, n_train)


def holds_solved(need: Need, block: int, memory_mb: int, n_checkpoints: int, size: int) -> bool:
    """Return whether the solved targets of all checkpoints may stay in memory, each of ``size``."""
    spare = memory_mb * 2**20 - need.fixed_bytes - 2 * block * need.row_bytes
    return 8 * size * (n_checkpoints - 1) <= spare


@dataclass(frozen=True, slots=True)
class GroupsNeed:
    """Memory of summing scores by groups: sums of every draw, then rows of all checkpoints."""

    n_groups: int
    n_targets: int
    n_checkpoints: int

    def targets(self, memory_mb: int) -> int:
        """Return how many targets' sums may be held: they get a third of the budget."""
        of_target = 2 * 8 * _GROUP_DRAWS * self.n_groups
        return min(self.n_targets, max(1, memory_mb * 2**20 // 3 // of_target))

    def rows(self, memory_mb: int) -> int:
        """Return how many rows of all checkpoints' scores may be held, in a third as well."""
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
    """Return what an evaluation holds: masks, subset sums, one checkpoint's eigenvectors, targets.

    ``proj_dim`` is 0 where no features are read; ``settings`` are those of a sweep, or none.
    """
    # Two more weightings, for gradient products and TRAK's own formula; some forty sums for the
    # scores by number of checkpoints, for baselines, and for the bootstrap of each in turn.
    weightings = len({setting.loss_weighting for setting in settings}) + 2
    sums = 8 * n_subsets * n_targets * (len(settings) + 40)
    weights = 8 * n_train * (weightings + n_checkpoints)
    # Weighted products, for each power those of the normal matrix and of its norm; eigenvectors,
    # LAPACK's copy and work; rotated sums twice; targets, rotated.
    n_powers = len({setting.loss_weight_power for setting in settings}) or 1
    solve = (24 * n_powers + 48) * proj_dim**2 + 24 * weightings * n_subsets * proj_dim
    solve += 20 * n_targets * proj_dim
    fixed = 16 * n_subsets * n_train + sums + weights + solve
    row = 64 * n_targets + 24 * proj_dim + 16 * n_subsets
    job = f"the evaluation of {n_targets} targets on {n_subsets} subsets of {n_train} samples"
    return Need(job, fixed, row, remedy="cut the experiment in two, or sweep less")


def check_memory(
    memory_mb: int,
    *,
    proj_dim: int | None,
    newton_params: int | None = None,
    n_train: int,
    n_targets: Mapping[str, int],
    n_checkpoints: int,
    keep: str,
    top: int,
    divides: bool,
) -> None:
    """Refuse a budget, in MiB for arrays, that a job would refuse; ``proj_dim`` may be None.

    With `gauss_newton` ``newton_params`` is how many parameters are differentiated.
    """
    if proj_dim is not None:
        normal_matrix_need(proj_dim, divides=divides).check(memory_mb)
    for experiment, m in n_targets.items():
        solved_dim = proj_dim if keep == "top_k" else None
        sizes = {"n_train": n_train, "n_targets": m, "n_checkpoints": n_checkpoints}
        average = average_need(**sizes, top=top, solved_dim=solved_dim)
        solve = exact_need(n_train, m) if proj_dim is None else scores_need(proj_dim, m)
        if newton_params is not None:
            solve = newton_need(newton_params, n_train, m)
        for need in (solve, average):
            try:
                need.check(memory_mb)
            except InputError as error:
                raise InputError(f"experiment {experiment}: {error}", error.code) from None
