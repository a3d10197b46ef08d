"""Public names and signatures of the original, its utilities, and the installation check."""

import inspect
import re
import warnings

import numpy as np
import pytest
import torch
from compat_models import Net, Text, checkpoints, images, walk
from workspace import REPOSITORY

import trak_core.compat as ours
from trak_core.compat.projectors import (
    BasicProjector,
    BasicSingleBlockProjector,
    ChunkedCudaProjector,
    NoOpProjector,
)
from trak_core.compat.savers import AbstractSaver

NAMES = {
    "traker": "TRAKer",
    "projectors": "ProjectionType AbstractProjector NoOpProjector BasicSingleBlockProjector "
    "BasicProjector CudaProjector ChunkedCudaProjector",
    "gradient_computers": "AbstractGradientComputer FunctionalGradientComputer "
    "IterativeGradientComputer",
    "modelout_functions": "AbstractModelOutput ImageClassificationModelOutput "
    "IterativeImageClassificationModelOutput TextClassificationModelOutput CLIPModelOutput "
    "TASK_TO_MODELOUT",
    "score_computers": "AbstractScoreComputer BasicSingleBlockScoreComputer BasicScoreComputer",
    "savers": "AbstractSaver MmapSaver ModelIDException",
    "utils": "parameters_to_vector get_num_params is_not_buffer vectorize get_output_memory "
    "get_free_memory get_matrix_mult_standard get_matrix_mult_blockwise get_matrix_mult "
    "get_parameter_chunk_sizes test_install",
}
PAIRS = [(module, name) for module, names in NAMES.items() for name in names.split()]


def test_every_name_of_the_migration_page_is_there():
    page = (REPOSITORY / "docs/how-to/from-trak.md").read_text()
    for name in re.findall(r"`(\w+)`", page.split("## What is the same")[0]):
        assert hasattr(ours, name) or name in {"trak", "traker", "fast_jl"}, name


@pytest.fixture(scope="module")
def theirs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trak", reason="with the extra `test`, as `make test` has it")


def parameters(callable_):
    """Names and defaults of the parameters of a function or constructor."""
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    taken = inspect.signature(callable_).parameters.values()
    return {p.name: p.default for p in taken if p.kind not in variadic}


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_every_name_takes_the_arguments_of_the_original(module, name, theirs):
    value, expected = (getattr(getattr(package, module), name) for package in (ours, theirs))
    if not callable(value) or name in {"ModelIDException", "ProjectionType"}:
        assert sorted(value) == sorted(expected) if module != "savers" else value
        return
    own, original = parameters(value), parameters(expected)
    # Ours may have more; theirs come first and in order, as positional arguments do.
    assert list(own)[: len(original)] == list(original)
    for argument, default in original.items():
        if default is not inspect.Parameter.empty and not inspect.isclass(default):
            assert own[argument] == default, argument


def test_methods_take_the_arguments_of_the_original(theirs):
    for name, method in inspect.getmembers(ours.TRAKer, callable):
        if not name.startswith("_"):
            assert parameters(method) == parameters(getattr(theirs.TRAKer, name)), name


def test_utilities_return_the_same_as_the_original(theirs):
    torch.manual_seed(0)
    own, original = ours.utils, theirs.utils
    for model in (Net(), Text()):
        for batch_size in (2**32 // 700, 2**20, 8):
            sizes = original.get_parameter_chunk_sizes(model, batch_size)
            assert own.get_parameter_chunk_sizes(model, batch_size) == sizes
        assert own.get_num_params(model) == original.get_num_params(model)
        names = list(model.state_dict())
        for i in range(len(names)):
            assert own.is_not_buffer(i, names) == original.is_not_buffer(i, names)
    grads = {"a": torch.randn(3, 2, 2), "b": torch.randn(3), "c": torch.randn(3, 5)}
    expected, into = original.vectorize(grads, device="cpu"), torch.empty(3, 10)
    for vectors in (own.vectorize(grads, device="cpu"), own.vectorize(grads, into), into):
        assert torch.equal(vectors, expected)
    values = [p.detach() for p in Net().parameters()]
    vector = original.parameters_to_vector(values)
    assert torch.equal(own.parameters_to_vector(values), vector)
    x, y = torch.randn(7, 3), torch.randn(4, 3)
    assert torch.allclose(own.get_matrix_mult(x, y), x @ y.T)
    assert torch.allclose(own.get_matrix_mult_blockwise(x, y, torch.float32, 2), x @ y.T)
    assert own.get_output_memory(x, y, torch.float16) == 7 * 4 * 2


def test_the_installation_check_prints_the_device(capsys):
    ours.test_install(use_fast_jl=False)
    assert "works on cpu" in capsys.readouterr().out


def test_public_methods_of_projectors():
    given = {"seed": 0, "proj_type": "rademacher", "device": "cpu", "model_id": 2}
    single = BasicSingleBlockProjector(20, 5, **given)
    matrix = single.proj_matrix.clone()
    assert set(matrix.unique().tolist()) == {-1.0, 1.0}
    single.free_memory()
    assert not hasattr(single, "proj_matrix")
    single.generate_sketch_matrix()
    assert torch.equal(single.proj_matrix, matrix)
    blocks, parts = BasicProjector(20, 5, **given, block_size=2), []
    blocks.get_generator_states()
    for state in blocks.generator_states:
        blocks.generate_sketch_matrix(state)
        parts.append(blocks.proj_matrix)
    assert torch.equal(torch.cat(parts, dim=1), matrix)
    assert torch.equal(blocks.project(torch.eye(20), model_id=2), matrix)
    chunked = ChunkedCudaProjector([blocks], 20, [20], 8, "cpu", torch.float32)
    chunked.allocate_input()
    chunked.free_memory()
    assert torch.equal(chunked.project({"w": torch.eye(20)}, model_id=2), matrix)
    grads = {"a": torch.randn(3, 2, 2), "b": torch.randn(3, 1)}
    assert NoOpProjector(device="cpu").project(grads, 0).shape == (3, 5)


class RamSaver(AbstractSaver):
    """A user-defined saver for the original: arrays in memory, with the required methods only."""

    def __init__(self, train_set_size, proj_dim, **arguments):
        super().__init__(**arguments)
        self.sizes, self.arrays = (train_set_size, proj_dim), {}

    def register_model_id(self, model_id, _allow_featurizing_already_registered):
        self.model_ids[model_id] = {"is_featurized": 0, "is_finalized": 0}
        self.init_store(model_id)

    def serialize_current_model_id_metadata(self, already_exists=True):
        done = self.current_store["is_featurized"].sum() == self.sizes[0]
        self.model_ids[self.current_model_id]["is_featurized"] = int(done)

    def init_store(self, model_id):
        n, k = self.sizes
        shapes = {"grads": (n, k), "features": (n, k), "out_to_loss": (n, 1)}
        self.arrays[model_id] = {name: np.zeros(shape, "f4") for name, shape in shapes.items()}
        self.arrays[model_id]["is_featurized"] = np.zeros((n, 1), "i4")
        self.load_current_store(model_id)

    def init_experiment(self, exp_name, num_targets, model_id):
        self.experiments[exp_name] = {"num_targets": num_targets}
        (n, k), m = self.sizes, num_targets
        shapes = {f"{exp_name}_grads": (m, k), f"{exp_name}_scores": (n, m)}
        self.arrays[model_id, exp_name] = {name: np.zeros(s, "f4") for name, s in shapes.items()}
        self.load_current_store(model_id, exp_name)

    def load_current_store(self, model_id, exp_name=None, exp_num_targets=-1, mode="r+"):
        self.current_model_id, self.current_experiment_name = model_id, exp_name
        key = model_id if exp_name is None else (model_id, exp_name)
        self.current_store.update(self.arrays[key])

    def save_scores(self, exp_name):
        self.saved = exp_name

    def del_grads(self, model_id):
        self.arrays[model_id]["grads"] = None


def test_a_user_defined_saver(tmp_path):
    study = Net(), checkpoints(Net, 1), images(30), images(4, seed=1)
    traker, scores = walk(*study, save_dir=tmp_path / "ram", saver=RamSaver, proj_dim=8)
    _, expected = walk(*study, save_dir=tmp_path / "files", proj_dim=8)
    assert np.array_equal(scores, expected)
    assert traker.saver.saved == "mine"
    assert not list((tmp_path / "ram").glob("*/*.mmap"))
