"""Files and folders of weights: what is read, into the model itself, and what is refused."""

import argparse
import hashlib
import json
import re
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import run_python
from refused import refused
from safetensors.torch import save_file
from stored_weights import read_state_dict, save
from torch import nn

from trak_core.errors import InputError
from trak_core.study.load_checkpoint import _is_finite, check_checkpoint, load_checkpoint


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


# Of data parallelism, of torch.compile, and of modules that hold the model.
PREFIXES = ["module.", "_orig_mod.", "module._orig_mod.", "model.", "model.net.", "module.model."]


@pytest.fixture
def state():
    return net().state_dict()


def same(state, path, model=None):
    model = model or net()
    assert check_checkpoint(model, path) == (False, "")
    digests = load_checkpoint(model, path)
    assert digests == {"sha256": read_state_dict(path)[1]}
    assert not model.training
    return all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("prefix", ["", *PREFIXES])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model_state_dict", "model"])
def test_a_prefix_that_all_keys_share_is_taken_off_and_said(
    state, prefix, wrapper, tmp_path, capsys
):
    path = tmp_path / "a.ckpt"
    stored = {prefix + key: value for key, value in state.items()}
    torch.save({wrapper: stored, "epoch": 3} if wrapper else stored, path)
    assert same(state, path)
    said = f"{path}: all keys begin with `{prefix}`, which is removed to fit the model.\n"
    assert capsys.readouterr().out == (said if prefix else "")


class Gone:
    """Its module is missing when the file is read, and its code would leave a mark."""

    def __reduce__(self):
        return (open, ("ran", "w"))


Gone.__module__ = "a_module_of_the_training"
BESIDE = {
    "arguments": argparse.Namespace(lr=0.1),
    "a path": {"data": Path("/data"), "seeds": [1, 2]},
    "numpy's numbers": {"best": [(np.float64(0.5), np.arange(3))]},
    "a network": net(),
    "what runs code": Gone(),
    "a class": {"kind": net},
}


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
@pytest.mark.parametrize("name", BESIDE)
def test_objects_beside_the_weights_are_left_where_they_are(state, here, name, wrapper):
    """As in files of Lightning and of many trainings."""
    path, known = here / "a.ckpt", {*torch.serialization.get_safe_globals()}
    torch.save({"hyper_parameters": BESIDE[name], wrapper: state, "epoch": 3}, path)
    assert same(state, path)
    assert [p.name for p in here.iterdir()] == ["a.ckpt"]
    assert {*torch.serialization.get_safe_globals()} == known
    # Among the weights they are refused, as ever.
    for saved in (
        {wrapper: state | {"0.weight": BESIDE[name]}},
        state | {"0.weight": BESIDE[name]},
    ):
        torch.save(saved, path)
        for read in (load_checkpoint, check_checkpoint):
            with refused("study.tensor_file", re.compile(r"(?<=failed: )it contains .*")):
                read(net(), path)
    assert not Path("ran").exists()


def test_tensors_in_pieces_are_named(tmp_path):
    """As FSDP's second version has them in its state dict."""
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    with warnings.catch_warnings(action="ignore"):
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        try:
            mesh = init_device_mesh("cpu", (1,))
            weight = DTensor.from_local(torch.ones(4, 3), mesh, [Replicate()])
            torch.save({"model": {"0.weight": weight}}, tmp_path / "a.pt")
        finally:
            torch.distributed.destroy_process_group()
    for read in (check_checkpoint, load_checkpoint):
        with refused("study.tensor_file", "0.weight", "DTensor"):
            read(net(), tmp_path / "a.pt")


NOT_AS_TRAINED = {
    "quantized": (lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), "tensor_file"),
    "meta": (lambda w: w.to("meta"), "tensor_file"),
    "nested": (lambda w: torch.nested.nested_tensor([w, w]), "tensor_file"),
    "float8_e4m3fn": (lambda w: w.to(torch.float8_e4m3fn), "checkpoint_keys"),
    "float8_e5m2": (lambda w: w.to(torch.float8_e5m2), "checkpoint_keys"),
}


@pytest.mark.filterwarnings(
    "ignore:.*(nested tensors|quantize_per_tensor|TypedStorage):UserWarning"
)
@pytest.mark.parametrize(
    ("kind", "zipped"),
    [*((kind, True) for kind in NOT_AS_TRAINED), ("meta", False), ("quantized", False)],
)
def test_weights_of_other_numbers_are_refused_alike_by_start_and_job(state, tmp_path, kind, zipped):
    make, code = NOT_AS_TRAINED[kind]
    state["0.weight"] = make(state["0.weight"])
    torch.save(state, path := tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    unread = rf"it contains torch\._utils\._rebuild_{kind}_tensor\."  # nested, since torch 2.15
    words, said = rf"Found 0\.weight, {kind}\.|type: 0\.weight torch\.{kind}, |{unread}", set()
    for read in (check_checkpoint, load_checkpoint) if zipped else (load_checkpoint,):
        with pytest.raises(InputError, match=words) as error:
            read(net(), path)
        assert error.value.code == f"study.{code}"
        said.add(str(error.value))
    assert len(said) == 1


def test_keys_and_shapes_are_checked_without_reading_the_numbers(tmp_path):
    """Python 3.14 reads 128 KiB at each of a few places in a file."""
    for name in ("a.pt", "a.safetensors"):
        save({"weight": torch.randn(2000, 2000), "bias": torch.ones(2000)}, tmp_path / name)
        before = bytes_read()
        check_checkpoint(nn.Linear(2000, 2000), tmp_path / name)
        assert bytes_read() - before < 0.1 * 16e6
        with refused("study.checkpoint_keys", "weight (2000, 2000) for (2000, 9"):
            check_checkpoint(nn.Linear(9, 2000), tmp_path / name)


def bytes_read():
    """Bytes that this process has read by now."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a", "a.pth.tar", "a.tar", "a.ckpt"])
def test_any_ending_of_a_name(state, tmp_path, name):
    save_file(state, tmp_path / name)
    assert same(state, tmp_path / name)
    sha256 = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert read_state_dict(tmp_path / name)[1] == sha256
    for zipped in (True, False):
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=zipped)
        assert same(state, tmp_path / name)


def test_memory_that_runs_out_is_no_fault_of_the_file(state, tmp_path, monkeypatch):
    torch.save(state, tmp_path / "a.pt")
    monkeypatch.setattr(torch, "load", lambda *_, **__: bytearray(2**62))
    with pytest.raises(MemoryError):
        read_state_dict(tmp_path / "a.pt")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("sharded", [False, True])
def test_hugging_face_folders(state, tmp_path, suffix, sharded):
    save = save_file if suffix == "safetensors" else torch.save
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    (tmp_path / "config.json").write_text("{}")
    if not sharded:
        save(state, tmp_path / f"{stem}.{suffix}")
    else:
        keys = sorted(state)
        files = {key: f"{stem}-0000{1 + (i > 2)}-of-00002.{suffix}" for i, key in enumerate(keys)}
        for file in set(files.values()):
            save({key: state[key] for key in keys if files[key] == file}, tmp_path / file)
        index = {"metadata": {}, "weight_map": files}
        (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    assert same(state, tmp_path)
    before = read_state_dict(tmp_path)[1]
    (tmp_path / "config.json").write_text('{"other": 1}')
    assert read_state_dict(tmp_path)[1] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", ["gpt2", "bert"])
def test_a_folder_of_shards_as_transformers_saves_it(make, dtype, tmp_path):
    """GPT-2's output layer is tied to its embeddings, and stored once."""
    models = pytest.importorskip("models", reason="needs transformers, which `make test` has")
    saved, model = (getattr(models, make)().to(dtype) for _ in range(2))
    saved.save_pretrained(tmp_path, max_shard_size="4KB")
    shards = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    assert same(saved.state_dict(), tmp_path, model)
    shards[-1].rename(tmp_path / "elsewhere")
    with refused("study.checkpoint_shards", shards[-1].name):
        read_state_dict(tmp_path)
    shards[-1].write_bytes((tmp_path / "elsewhere").read_bytes()[:-1])
    with refused("study.tensor_file", shards[-1].name):
        read_state_dict(tmp_path)


@pytest.mark.parametrize(
    "index",
    ["[]", '{"weight_map": {}}', '{"weight_map": {"a": "../../a.pt"}}', "not JSON", "[" * 10**5],
)
def test_a_folder_with_a_bad_index(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with refused("study.checkpoint_index", re.compile(r"(?<=failed: ).*")):
        read_state_dict(tmp_path)


@pytest.mark.parametrize("read", [check_checkpoint, load_checkpoint])
def test_a_weight_in_two_shards_is_refused(state, tmp_path, read):
    """Two saves into one folder: nobody knows which one is older."""
    for number in (1, 2):
        save_file(state, tmp_path / f"model-{number}.safetensors")
    files = {key: f"model-{1 + (key > '1')}.safetensors" for key in state}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    listed = re.compile(r"(?<=Found ).*(?= in two files\. Save)")
    with refused("study.checkpoint_shards", listed):
        read(net(), tmp_path)


def test_a_flipped_bit_of_a_checkpoint_is_found_or_harmless(state, tmp_path):
    """Of the format that torch writes today; torch alone finds none in the weights."""
    path = tmp_path / "a.pt"
    torch.save(state, path)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        entries = file.start_dir
    generator = torch.Generator().manual_seed(0)
    places = [
        *torch.randint(len(data), (150,), generator=generator).tolist(),
        *torch.randint(entries, len(data), (150,), generator=generator).tolist(),
    ]
    n_found = 0
    for position in places:
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        try:
            with warnings.catch_warnings(action="ignore"):  # of odd pickle protocols
                read, _ = read_state_dict(path)
        except InputError:
            n_found += 1
        else:
            assert read.keys() == state.keys(), position
            assert all(torch.equal(read[key], state[key]) for key in state), position
    assert n_found > 100


def test_quantized_weights_are_refused(tmp_path):
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text('{"quantization_config": {"load_in_8bit": true}}')
    with refused("study.checkpoint_quantized", tmp_path):
        read_state_dict(tmp_path)
    for name in ("quantize_config.json", "quant_config.json"):  # AutoGPTQ's and AutoAWQ's
        (tmp_path / "config.json").rename(tmp_path / name)
        with refused("study.checkpoint_quantized", tmp_path, name):
            read_state_dict(tmp_path)
        (tmp_path / name).rename(tmp_path / "config.json")


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(suffix, tmp_path, monkeypatch):
    """Its weights would be of both files, under the digest of the first."""
    model, path = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), tmp_path / f"a.{suffix}"
    write = torch.save if suffix == "pt" else save_file
    write({name: value.detach() for name, value in model.state_dict().items()}, path)
    other = tmp_path / "other"
    write({name: 1 + value.detach() for name, value in model.state_dict().items()}, other)
    monkeypatch.setattr("trak_core.study.load_checkpoint._PIECE_BYTES", 1)
    load_checkpoint(model, path)
    taken = nn.Sequential.load_state_dict

    def replace_and_load(*given, **named):
        if other.exists():
            other.replace(path)
        return taken(*given, **named)

    monkeypatch.setattr(nn.Module, "load_state_dict", replace_and_load)
    with refused("study.checkpoint_replaced", path):
        load_checkpoint(model, path)


class Tied(nn.Module):
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
    return Tied()


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
    model = Tied()
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
        load_checkpoint(Tied(), tmp_path)
    state = Tied().state_dict()
    state["head.weight"] = state["head.weight"] + 1
    save(state, tmp_path / "a.safetensors")
    with refused("study.checkpoint_tied", "embedding.weight, head.weight"):
        load_checkpoint(Tied(), tmp_path / "a.safetensors")
    state["head.weight"] = state["embedding.weight"].clone()
    save(state, tmp_path / "a.safetensors")
    load_checkpoint(model := Tied(), tmp_path / "a.safetensors")
    assert torch.equal(model.head.weight, state["head.weight"])


class Halved(Tied):
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
