"""Jobs need as much memory as is computed for them, whatever the number of training samples."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from workspace import REPOSITORY

from trak_core.artifacts import FEATURES, create
from trak_core.attribution.solve import DampedGramian, Spectrum
from trak_core.config.memory_needs import (
    average_need,
    check_memory,
    evaluation_need,
    exact_need,
    holds_solved,
    normal_matrix_need,
    scores_need,
    weights_mb,
)
from trak_core.errors import InputError
from trak_core.evaluation.subset_sums import damped_sums, weighted_sums
from trak_core.settings import Combine, FeaturesSpec, ScoresSpec, Setting, settings_of
from trak_core.stages.average_scores import average_scores
from trak_core.stages.compute_scores import compute_normal_matrix, compute_scores


def test_large_models_need_memory_for_their_weights(tmp_path):
    large, folder = 3 * 2**28, tmp_path / "model"
    folder.mkdir()
    (folder / "model-00001-of-00002.safetensors").touch()
    assert weights_mb(large, str(folder), reads_optimizer=False, is_renamed=True) == 4 * 768
    for size, checkpoint, adam, expected_mb in (
        (2**28 - 1, "c0.pt", True, 0),
        (large, str(folder), False, 768),
        (large + 1, "c0.safetensors", False, 769),
        (large, "c0.pt", False, 1536),
        (large, None, False, 1536),
        (large, str(folder), True, 2304),
    ):
        assert weights_mb(size, checkpoint, reads_optimizer=adam) == expected_mb


@pytest.mark.parametrize("memory_mb", [64, 333, 1000])
def test_blocks_of_rows_fit_the_budget(memory_mb):
    for proj_dim in (16, 1024, 1500):
        matrices = [normal_matrix_need(proj_dim, divides=divides) for divides in (True, False)]
        for need in (*matrices, scores_need(proj_dim, 20)):
            try:
                taken = need.fixed_bytes + need.rows(memory_mb) * need.row_bytes
            except InputError:
                assert need.fixed_bytes > (memory_mb - 10) * 2**20
            else:
                assert taken <= memory_mb * 2**20


def check(memory_mb, *, proj_dim, n_train, n_targets, n_checkpoints, **scoring):
    """Check the memory of jobs without a norm and without draws."""
    config = {
        "compute": {"memory_mb": memory_mb},
        "projection": "exact" if proj_dim is None else {"proj_dim": proj_dim},
        "scoring": {"combine": "product_of_averages", **scoring},
        "label_draws": 0,
    }
    check_memory(config, n_train, n_targets, n_checkpoints)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"proj_dim": 8192}, "proj_dim 8192"),
        ({"n_targets": {"small": 3, "large": 10**5}}, r"large.* 1\d\d\d MiB.*100000 targets.* 500"),
        ({"top": 10**4, "n_targets": {"mine": 400}}, r"mine.*scoring\.top 10000"),
        ({"proj_dim": None}, "mine.* 57450 MiB.*50000 gradients"),
        ({"proj_dim": None, "n_train": 4000}, None),
        ({"n_train": 10**7}, "mine.* the average for 10000000"),
    ],
)
def test_a_budget_is_checked_for_every_job(change, message):
    sizes = {"proj_dim": 512, "n_train": 50_000, "n_targets": {"mine": 100}, "n_checkpoints": 10}
    with pytest.raises(InputError, match=message) if message else nullcontext():
        check(500, **({**sizes, "keep": "full", "top": 20} | change))


def test_ten_million_samples_fit_the_default_memory():
    sizes = {"n_train": 10**7, "n_checkpoints": 10, "top": 20}
    check(1000, proj_dim=2048, n_targets={"mine": 1000}, keep="top_k", **sizes)
    assert average_need(n_targets=1000, solved_dim=2048, **sizes).rows(1000) == 1024


def test_solved_targets_are_kept_in_memory_if_they_fit():
    sizes = {"n_targets": 1000, "n_checkpoints": 10, "top": 20, "solved_dim": 2048}
    need = average_need(n_train=10**6, **sizes)
    assert holds_solved(need, 2048, 1000, 10, 2048 * 1000)
    assert not holds_solved(need, 2048, 1000, 100, 2048 * 1000)


# Work runs in a process of its own, after the same work of small sizes. What a child process
# inherits is in ru_maxrss, but not in VmHWM.
MEASURED = """
import re, sys
from ast import literal_eval
from pathlib import Path
import test_memory
from trak_core.runtime.job import keep_freed_memory

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

keep_freed_memory()  # as jobs do
work, *sizes = sys.argv[1], *map(literal_eval, sys.argv[2:])
for own in sizes:
    before = peak()
    getattr(test_memory, work)(*own)
print(peak(), peak() - before)
"""


def measured(work, *sizes):
    """Return the peak of a function here, and the last call's share of it, in bytes."""
    paths = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests/support"}
    output = subprocess.check_output(
        [sys.executable, "-c", MEASURED, work.__name__, *map(repr, sizes)],
        cwd=REPOSITORY / "tests/stages",
        env={**os.environ, **paths, "OMP_NUM_THREADS": "1"},
        text=True,
    )
    return [1024 * int(number) for number in output.splitlines()[-1].split()]


SPEC = ScoresSpec(
    features=FeaturesSpec(
        model_output="image_classification",
        parameter_patterns=None,
        projection={"kind": "rademacher", "proj_dim": 256, "seed": 0},
        dtype="float32",
        study_digest="",
    ),
    damping=2,
    weighting="curvature",
    curvature_power=1,
    norm_power=1,
    experiment="mine",
    targets_digest="digest",
    runs={"c": ["c"]},
    combine="unit_average",
    loss_weight_power=1,
)


def write_features(path, features, n_rows):
    rng = np.random.default_rng(n_rows)
    spec = features.as_dict() | {"checkpoint": {"id": "c", "sha256": ""}, "parameters_digest": ""}
    spec["projection"] |= {"stream": 1, "n_params": 10**6}
    proj_dim = spec["projection"]["proj_dim"]
    with create(path, FEATURES, spec, {}) as writer:
        rows = writer.matrix("features", range(n_rows), range(proj_dim))
        for start in range(0, n_rows, 1000):
            rows[start : start + 1000] = rng.standard_normal((1000, proj_dim))[: n_rows - start]
        writer.vector("sample_ids", np.arange(n_rows))
        for key in ("labels", "predictions"):
            writer.vector(key, np.zeros(n_rows, dtype=np.int64))
        for key in ("outputs", "loss_weights", "curvature"):
            writer.vector(key, rng.random(n_rows, dtype=np.float32))


BUDGET = {"code": "", "memory_mb": 64}


def write_inputs(folder, n_train):
    """Write features and a normal matrix; return the arguments of ``compute_scores``."""
    train, mine, matrix = (folder / f"{name}.h5" for name in ("train", "mine", "matrix"))
    own = SPEC.under("c")
    write_features(train, own.of_train(), n_train)
    write_features(mine, own.of_targets(), 200)
    compute_normal_matrix(
        normal_matrix=matrix, features=train, spec=own.of_normal_matrix(), **BUDGET
    )
    return {"train_path": train, "targets_path": mine, "normal_matrix": matrix, "spec": own}


AVERAGE = {"spec": SPEC, "columns": "", "defaults": "", "top": 5, **BUDGET}


def run_scoring(folder, n_train):
    """Run all stages after featurization with a budget of 64 MiB."""
    folder = Path(folder)
    inputs, scored = write_inputs(folder, n_train), folder / "one.h5"
    for keep, features in (("full", []), ("top_k", [inputs["train_path"]])):
        compute_scores(scores=scored, **inputs, keep=keep, **BUDGET)
        average_scores(
            scores=folder / "scores.h5", checkpoint_scores=[scored], features=features, **AVERAGE
        )


@pytest.mark.parametrize("keep", ["full", "top_k"])
def test_the_memory_of_an_average_does_not_change_its_bytes(tmp_path, keep):
    """Blocks have 2,048 rows with 64 MiB, and all rows with 200 MiB."""
    inputs, scored = write_inputs(tmp_path, 5000), tmp_path / "c.h5"
    compute_scores(scores=scored, **inputs, keep=keep, **BUDGET)
    features = [inputs["train_path"]] if keep == "top_k" else []
    common = AVERAGE | {"checkpoint_scores": [scored], "features": features}
    small, large = tmp_path / "small.h5", tmp_path / "large.h5"
    average_scores(scores=small, **common)
    average_scores(scores=large, **common | {"memory_mb": 200})
    assert small.read_bytes() == large.read_bytes()


NOISE = """
import torch
from torch.utils.data import TensorDataset

def make_model():
    return torch.nn.Linear(4, 1)

def train_data():
    return TensorDataset(torch.rand({n}, 4), torch.rand({n}))
"""


def run_features(folder, n_train):
    """Run featurization in two shards, and join them, with a budget of 64 MiB."""
    # Imported here, because the peak of `run_scoring` must not contain torch.
    import torch

    from trak_core.stages.compute_features import compute_features
    from trak_core.stages.join_shards import join_shards

    folder = Path(folder)
    torch.save(torch.nn.Linear(4, 1).state_dict(), folder / "c.pt")
    (folder / "noise.py").write_text(NOISE.format(n=n_train))
    spec = replace(SPEC.under("c").of_train(), model_output="regression")
    shards = [folder / f"{i}-of-2.h5" for i in (1, 2)]
    inputs = {"checkpoint": folder / "c.pt", "study_file": folder / "noise.py", "spec": spec}
    machine = {"device": "cpu", "batch_size": 1024, "memory_mb": 64, "threads": 1}
    common = {**inputs, **machine, "n_shards": 2, "code": ""}
    for number, shard in enumerate(shards, start=1):
        compute_features(features=shard, shard=number, **common)
    join_shards(features=folder / "train.h5", shards=shards, spec=spec, code="")


@pytest.mark.gate
@pytest.mark.parametrize("stages", [run_scoring, run_features])
def test_peak_memory_does_not_grow_with_the_training_set(tmp_path, stages):
    """Features grow from 20 to 98 MiB, scores from 15 to 76 MiB."""

    def peak(n_train):
        folder = tmp_path / str(n_train)
        folder.mkdir()
        return measured(stages, (str(folder), n_train))[0]

    small, large = peak(20_000), peak(100_000)
    # Ids, labels and outputs of 80,000 more samples need a few MiB.
    assert large - small < 40 * 2**20, (small, large)


def solve(n_train, n_targets):
    x = np.random.default_rng(0).standard_normal((n_train, 20))
    damped = DampedGramian.factorize(x @ x.T, np.ones(n_train), 2)
    damped.similarities(x @ x[:n_targets].T)
    damped.train_norm(np.ones(n_train))


@pytest.mark.gate
def test_exact_scores_need_the_computed_memory():
    need = exact_need(1500, 300).fixed_bytes
    assert 0.5 * need < measured(solve, (50, 2), (1500, 300))[1] < 1.1 * need


def write_normal_matrix(folder, n_rows, proj_dim):
    folder = Path(folder)
    wide = {"kind": "rademacher", "proj_dim": proj_dim, "seed": 0}
    own = replace(SPEC, features=replace(SPEC.features, projection=wide)).under("c")
    write_features(folder / "train.h5", own.of_train(), n_rows)
    compute_normal_matrix(
        normal_matrix=folder / "matrix.h5",
        features=folder / "train.h5",
        spec=own.of_normal_matrix(),
        code="",
        memory_mb=150,
    )


@pytest.mark.gate
@pytest.mark.parametrize("n_rows", [2000, 800])
def test_a_normal_matrix_needs_the_computed_memory(tmp_path, n_rows):
    """With at most half as many rows as dimensions, another decomposition is used."""
    need = normal_matrix_need(1600, divides=True)
    computed_bytes = need.fixed_bytes + need.rows(150) * need.row_bytes
    sizes = (str(tmp_path), 100, 100), (str(tmp_path), n_rows, 1600)
    taken = measured(write_normal_matrix, *sizes)[1]
    assert 0.3 * computed_bytes < taken < 1.1 * computed_bytes


def measure(k, n_train, n_targets, n_subsets, block):
    """What the evaluation of three settings of each kind does."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((n_train, k), dtype=np.float32)
    masks = (rng.random((n_subsets, n_train)) < 0.5).astype(float)
    ones = np.ones(n_train)
    sums, gramians = weighted_sums(
        masks, [ones] * 11, lambda start, stop: rows[start:stop], block, [ones] * 7
    )
    targets = rng.standard_normal((n_targets, k))
    for power in range(3):
        spectrum = Spectrum.decompose(gramians[power])
        damped_sums(sums[:3], spectrum, [0.1, 1, 2], targets)
        spectrum.norm_products(gramians[3 + power], gramians[6])


@pytest.mark.gate
def test_an_evaluation_needs_the_computed_memory():
    sizes = {"proj_dim": 1000, "n_train": 2000, "n_targets": 50, "n_subsets": 100}
    values = {"damping": [0.1, 1, 2], "loss_weight_power": [0.25, 0.5, 1], "proj_dim": [1000]}
    settings = settings_of(values, Setting(1, 1, Combine.UNIT_AVERAGE, 1000))
    need = evaluation_need(**sizes, n_checkpoints=1, settings=settings)
    computed_bytes = need.fixed_bytes + 500 * need.row_bytes
    taken = measured(measure, (20, 40, 3, 4, 10), (1000, 2000, 50, 100, 500))[1]
    assert 0.3 * computed_bytes < taken < computed_bytes
