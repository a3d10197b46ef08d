"""Distortion of a checkpoint: the stage against dense float64 matrices, and against theory."""

import h5py
import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from pipeline import ON_CPU, features_spec
from refused import refused
from trained_cases import STUDIES

from trak_core.artifacts import DISTORTION, open_artifact
from trak_core.errors import InputError
from trak_core.projection.reference import projection_matrix
from trak_core.spec import ProjectionSpec, stream_of
from trak_core.stages.compute_distortion import compute_distortion
from trak_core.study.study import Study

STUDY = STUDIES / "small_digits.py"
SAMPLES, STREAMS, PROJ_DIM = 12, 3, 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("checkpoint") / "c0.pt"
    model = Study.load(STUDY).function("train")(seed=0, steps=15)
    torch.save(model.state_dict(), path)
    return path


def spec_of(kind="rademacher", name="c0", output="image_classification"):
    return features_spec(output, PROJ_DIM, kind=kind, checkpoint=name, dtype="float64")


def distort(folder, checkpoint, spec=None, study=STUDY, samples=SAMPLES, streams=STREAMS, **job):
    paths = {"distortion": folder / "distortion.h5", "checkpoint": checkpoint, "study_file": study}
    job = ON_CPU | {"memory_mb": 100, "spec": spec or spec_of()} | job
    compute_distortion(**paths, **job, most_samples=samples, n_streams=streams)
    return paths["distortion"]


def expected_errors(rows, kind, streams):
    """Return errors of norms and inner products, (streams, n, n), and the predicted deviations."""
    p = rows.shape[1]
    norms = np.linalg.norm(rows, axis=1)
    exact, errors = rows @ rows.T, []
    for stream in streams:
        spec = ProjectionSpec(kind=kind, n_params=p, proj_dim=PROJ_DIM, seed=0, stream=stream)
        projected = rows @ projection_matrix(spec) / np.sqrt(PROJ_DIM)
        errors.append((projected @ projected.T - exact) / np.outer(norms, norms))
    size = {"rademacher": 1, "hadamard": PROJ_DIM, "normal": None}[kind]
    variance = 1 + (exact / np.outer(norms, norms)) ** 2
    for first in range(0, p, size) if size else ():
        block = rows[:, first : first + size] / norms[:, None]
        products = block @ block.T
        variance -= np.outer(np.diag(products), np.diag(products)) + products**2
    return np.array(errors), np.sqrt(variance / PROJ_DIM)


@pytest.mark.parametrize("kind", ["rademacher", "normal", "hadamard"])
def test_numbers_equal_those_of_dense_matrices_in_float64(checkpoint, tmp_path, kind):
    file = distort(tmp_path, checkpoint, spec_of(kind))
    with h5py.File(file) as h5:
        ids = h5["sample_ids"][:].tolist()
        assert h5.attrs["n_streams"] == STREAMS
        assert h5.attrs["n_zero_gradients"] == 0
    study = Study.load(STUDY)
    model = study.make_model()
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    samples = study.split("train", None).take(ids).samples
    samples = [samples[i] for i in range(len(ids))]
    rows = oracle.jacobian(model, samples, "image_classification")[0]
    errors, predicted = expected_errors(rows, kind, stream_of("c0") + np.arange(STREAMS))
    pairs = np.triu_indices(SAMPLES, 1)
    of_kinds = {
        "squared_norm": (np.diagonal(errors, axis1=1, axis2=2), np.diagonal(predicted)),
        "inner_product": (errors[:, *pairs], predicted[pairs]),
    }
    agreement = pd.read_hdf(file, "agreement")
    assert agreement.index.tolist() == list(of_kinds)
    for name, (error, sd) in of_kinds.items():
        squares = (error**2).mean(axis=1)
        row = agreement.loc[name]
        assert row["measured"] == pytest.approx(np.sqrt(squares.mean()), rel=1e-3)
        spread = squares.std(ddof=1) / np.sqrt(STREAMS) / 2 / np.sqrt(squares.mean())
        assert row["standard_error"] == pytest.approx(spread, rel=1e-2)
        assert row["predicted"] == pytest.approx(np.sqrt((sd**2).mean()), rel=1e-4)


def test_a_file_is_whole_and_says_how_its_samples_were_drawn(checkpoint, tmp_path):
    first, second = (distort(tmp_path / str(i), checkpoint) for i in (1, 2))
    assert first.read_bytes() == second.read_bytes()
    with open_artifact(first, DISTORTION) as file:
        ids = file.ids("sample_ids")
        assert file.spec["sample"] == {"drawn": SAMPLES, "seed": 0}
        assert file.spec["streams"] == STREAMS
        assert file.spec["projection"]["stream"] == stream_of("c0")
    train_ids = Study.load(STUDY).split("train", None).ids
    positions = [train_ids.index(i) for i in ids]
    assert positions == sorted(set(positions))
    assert len(positions) == SAMPLES
    # Another checkpoint: the same samples under a stream of its own.
    other = distort(tmp_path / "other", checkpoint, spec_of(name="c1"))
    with open_artifact(other, DISTORTION) as file:
        assert file.ids("sample_ids") == ids
        assert file.spec["projection"]["stream"] == stream_of("c1")


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("rademacher", {"batch_size": 1}),
        ("hadamard", {"batch_size": 5, "memory_mb": 2}),
        ("tensor_sketch", {"batch_size": 5, "memory_mb": 2}),
    ],
)
def test_batches_and_memory_do_not_change_the_numbers(checkpoint, tmp_path, kind, other):
    """Gradients that don't fit together are computed again."""
    first, second = (
        pd.read_hdf(distort(tmp_path / str(i), checkpoint, spec_of(kind), **job), "agreement")
        for i, job in enumerate(({}, other))
    )
    np.testing.assert_allclose(second, first, rtol=1e-5)


LINEAR = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

x = torch.arange(60, dtype=torch.float32).reshape(20, 3).sin()
x[{zero}] = 0


def make_model():
    return nn.Linear(3, 1, bias=False)


def train_data():
    return TensorDataset(x, torch.ones(20))


target_data = train_data
"""


@pytest.fixture
def linear(tmp_path):
    """A model whose gradients are its inputs, some of them zero."""
    torch.save({"weight": torch.ones(1, 3)}, tmp_path / "linear.pt")

    def study(zero):
        path = tmp_path / "linear.py"
        path.write_text(LINEAR.format(zero=zero))
        spec = spec_of(output="regression")
        return {"study": path, "checkpoint": tmp_path / "linear.pt", "spec": spec}

    return study


def test_samples_without_a_gradient_are_left_out_and_counted(linear, tmp_path, capsys):
    file = distort(tmp_path, **linear("[3, 7]"), samples=20)
    assert "left out 2 of 20 samples, whose gradients are zero: 3, 7." in capsys.readouterr().out
    with open_artifact(file, DISTORTION) as artifact:
        rows = [i for i in range(20) if i not in (3, 7)]
        assert artifact.ids("sample_ids") == rows
        assert artifact.file.attrs["n_zero_gradients"] == 2
    x = np.sin(np.arange(60, dtype=np.float32).reshape(20, 3))[rows].astype(np.float64)
    # Three coordinates, each with a sign of its own.
    squared = (x**2).sum(1)
    predicted = 2 / PROJ_DIM * (1 - (x**4).sum(1) / squared**2)
    norms = pd.read_hdf(file, "agreement").loc["squared_norm"]
    assert norms["predicted"] == pytest.approx(np.sqrt(predicted.mean()))


def test_hardly_any_gradient(linear, tmp_path):
    with refused("stages.zero_gradients", 1, 20):
        distort(tmp_path, **linear("slice(1, 20)"), samples=20)
    assert not list(tmp_path.rglob("*.h5*"))


def test_not_a_number_names_samples(linear, tmp_path):
    arguments = linear("[5]")
    path = arguments["study"]
    path.write_text(path.read_text().replace("= 0", "= float('nan')", 1))
    with pytest.raises(InputError, match=r"must be finite\. Found .* for the samples 5\. Look"):
        distort(tmp_path, **arguments, samples=20)
    assert not list(tmp_path.rglob("*.h5*"))


def test_a_budget_that_is_too_small_is_refused_by_the_job(checkpoint, tmp_path):
    with pytest.raises(InputError, match=r"must hold the distortion of 12 samples under 3 str"):
        distort(tmp_path, checkpoint, memory_mb=0)
    with pytest.raises(InputError, match=r"must hold the gradient of one sample"):
        distort(tmp_path, checkpoint, memory_mb=1)
    assert not list(tmp_path.rglob("*.h5"))
