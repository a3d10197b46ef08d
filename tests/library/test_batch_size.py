"""How many samples fit into memory, and what happens when they don't."""

import gc
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from refused import refused
from torch import nn

from trak_core.gradients.batch_size import (
    MemoryByLength,
    TooMuchMemoryError,
    budget_bytes,
    in_chunks,
    sample_memory,
)
from trak_core.gradients.differentiable_model import select_parameters
from trak_core.gradients.gradient_terms import max_piece_entries
from trak_core.model_outputs.supervised import CLASSIFICATION

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_chunks_are_halved_when_memory_runs_out(error, capsys):
    def compute(start, stop):
        if stop - start > 3:
            raise error
        return list(range(start, stop))

    found = list(in_chunks(compute, 10, 8))
    assert found == [(i, i + 2, [i, i + 1]) for i in range(0, 10, 2)]
    assert "out of memory. Continuing with batches of 2 samples" in capsys.readouterr().out


def test_memory_that_does_not_hold_one_sample_and_other_errors():
    compute = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB"))
    with refused("gradients.out_of_memory", "CUDA out of memory. Tried 9 GiB"):
        list(in_chunks(compute, 10, 8))
    compute.side_effect = RuntimeError("shapes")
    with pytest.raises(RuntimeError, match="shapes"):
        list(in_chunks(compute, 10, 8))


def test_memory_of_samples():
    wide = nn.Sequential(nn.Linear(1000, 500), nn.ReLU(), nn.Linear(500, 3))
    batch = (torch.randn(4, 1000), torch.tensor([0, 1, 2, 0]))
    whole = sample_memory(wide, select_parameters(wide, None), CLASSIFICATION, batch)
    part = sample_memory(wide, select_parameters(wide, ["2.*"]), CLASSIFICATION, batch)
    gradients = 4 * (1000 * 500 + 500)
    assert whole.gradient_bytes - part.gradient_bytes == gradients
    # The first layer's input is not saved if the layer is frozen.
    assert 2 * 4 * 1000 <= whole.activation_bytes - part.activation_bytes < 4 * 4 * 1000
    for budget in (10**7, 5 * 10**7, 10**8, 10**9):
        n = whole.most(budget)
        assert whole.bytes_of(n) <= budget < whole.bytes_of(n + 1)
    # At most a piece of all gradients is formed.
    assert whole.bytes_of(10**4) < 10**4 * whole.activation_bytes + 2**26
    needed = MemoryByLength(0, 0, whole, whole)
    assert needed.room(CPU, 100).most(0) == whole.most(100 * 2**20)
    with refused("gradients.memory_limit", "compute.memory_mb", "6 MiB", "3"):
        needed.room(CPU, 3)


def test_measuring_leaves_nothing_behind():
    """Tanh saves its result, whose graph would be kept alive by a hook that keeps the result."""
    model = nn.Sequential(nn.Linear(3, 17), nn.Tanh(), nn.Linear(17, 2))
    batch = torch.randn(2, 3), torch.tensor([0, 1])
    given = model, select_parameters(model, None), CLASSIFICATION, batch
    needed = sample_memory(*given)
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == (2, 17)]
    assert alive == []
    with pytest.raises(TooMuchMemoryError):
        sample_memory(*given, most_bytes=needed.activation_bytes - 1)


def test_formed_gradients_of_a_computed_weight_count_as_memory():
    plain = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 3))
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(plain[0]), plain[1])
    batch = (torch.randn(4, 50), torch.tensor([0, 1, 2, 0]))
    found = sample_memory(normed, select_parameters(normed, None), CLASSIFICATION, batch)
    assert found.activation_bytes > 2 * 4 * 50 * 40


@pytest.mark.parametrize(("memory_gib", "piece_mib"), [(4, 128), (16, 128), (80, 640), (139, 1112)])
def test_a_budget_leaves_a_gpu_room_for_its_larger_pieces(memory_gib, piece_mib, monkeypatch):
    """Three copies of a piece of gradients, and four of a piece of logits."""
    n_bytes, device = memory_gib * 2**30, torch.device("cuda")
    properties = SimpleNamespace(total_memory=n_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (n_bytes, n_bytes))
    assert 4 * max_piece_entries(device) == piece_mib * 2**20
    held = budget_bytes(device, 500) + 7 * (piece_mib - 16) * 2**20
    assert held == n_bytes * 4 // 5
    assert budget_bytes(torch.device("cpu"), 500) == 500 * 2**20
