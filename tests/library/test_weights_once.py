"""Large models: weights are read one at a time, into the model itself."""

import json
import sys

import pytest
import torch
from patience import run_python
from refused import refused
from stored_weights import read_state_dict, save
from torch import nn

from trak_core.study.load_checkpoint import _is_finite, load_checkpoint


class Net(nn.Module):
    """Tied weights, counts and buffers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
        nn.init.normal_(self.layers[0].weight, std=0.02)
        self.register_buffer("frequencies", 10.0 ** -torch.arange(4), persistent=False)


def seeded():
    torch.manual_seed(3)
    return Net()


def saved(folder, dtype=torch.float32, prefix="", **changed):
    """A folder of two shards, whose weights no seed draws."""
    state = {key: 3 + value for key, value in seeded().state_dict().items()}
    state = {key: v.to(dtype) if v.is_floating_point() else v for key, v in state.items()}
    state = {prefix + key: value for key, value in (state | changed).items()}
    del state[f"{prefix}head.weight"]
    names = sorted(state)
    shards = {"model-1.safetensors": names[:4], "model-2.safetensors": names[4:]}
    for file, keys in shards.items():
        save({key: state[key] for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in shards.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_are_read_into_the_model_itself(tmp_path, dtype, prefix, monkeypatch):
    """Those of tied parameters are needed once."""
    state = saved(tmp_path, dtype, prefix)
    monkeypatch.delattr("trak_core.study.load_checkpoint.load_state_dict")
    model = Net()
    places = {key: value.data_ptr() for key, value in model.state_dict().items()}
    digests = load_checkpoint(model, tmp_path)
    assert digests == {"sha256": read_state_dict(tmp_path)[1]}
    found = model.state_dict()
    assert {key: value.data_ptr() for key, value in found.items()} == places
    assert all(
        torch.equal(found[k.removeprefix(prefix)], v.to(torch.float32)) or v.dtype is torch.int64
        for k, v in state.items()
    )
    assert found["layers.1.num_batches_tracked"] == 3
    assert not model.training


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex64"])
def test_one_number_that_is_not_finite_is_found(dtype):
    values = torch.linspace(-6e4, 6e4, 2**20 + 3).to(getattr(torch, dtype)).view(1, -1)
    assert _is_finite(values)
    assert _is_finite(values[:, :0])
    for bad in (torch.nan, torch.inf, -torch.inf):
        for i in (0, 2**20 + 2):
            one = values.clone()
            one[0, i] = bad
            assert not _is_finite(one)
            assert not _is_finite(one.T)


def test_what_is_wrong_with_streamed_weights_is_refused(tmp_path):
    saved(tmp_path, **{"layers.0.bias": torch.tensor([1.0, torch.nan, 1, 1])})
    with refused("study.checkpoint_finite", "layers.0.bias"):
        load_checkpoint(Net(), tmp_path)
    state = Net().state_dict()
    state["head.weight"] = state["head.weight"] + 1
    save(state, tmp_path / "a.safetensors")
    with refused("study.checkpoint_tied", "embedding.weight, head.weight"):
        load_checkpoint(Net(), tmp_path / "a.safetensors")
    state["head.weight"] = state["embedding.weight"].clone()
    save(state, tmp_path / "a.safetensors")
    load_checkpoint(model := Net(), tmp_path / "a.safetensors")
    assert torch.equal(model.head.weight, state["head.weight"])


class Halved(Net):
    def load_state_dict(self, state, *args, **kwargs):
        return super().load_state_dict({k: v / 2 for k, v in state.items()}, *args, **kwargs)


def test_weights_go_through_a_models_own_way_to_load_them(tmp_path):
    state = saved(tmp_path)
    load_checkpoint(model := Halved(), tmp_path)
    assert torch.equal(model.layers[0].bias, state["layers.0.bias"] / 2)


JOB = """
import re, sys, torch
from pathlib import Path
from torch import nn
from trak_core.study.load_checkpoint import load_checkpoint

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

make = lambda: nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(5)))
model = make()
built = peak()
load_checkpoint(model, Path(sys.argv[1]))
print(peak() - built)
"""


@pytest.mark.gate
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how much memory a process takes")
def test_a_job_holds_weights_once(tmp_path):
    path = tmp_path / "weights.safetensors"
    save({f"{i}.weight": torch.ones(4096, 4096) for i in range(5)}, path)
    # In MiB; a second copy would be 320.
    assert float(run_python(JOB, str(path)).stdout) < 100
