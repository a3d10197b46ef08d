"""A bad checkpoint stops what reads it, with one message; none of its code runs."""

import os
import pickle
import re
import time
import zipfile

import pandas as pd
import pytest
import torch
from own_checkpoints import network
from pipeline import ON_CPU, features_spec
from refusals import GOOD, STUDY, check, message, refuse, save_weights
from refused import refused
from safetensors.torch import save_file

from trak_core.errors import InputError
from trak_core.stages.compute_features import compute_features
from trak_core.study.load_checkpoint import load_checkpoint


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def save(path, state=None):
    torch.save(network().state_dict() if state is None else state, path)


def save_changed(path, key, value):
    save(path, network().state_dict() | {key: value})


def cut(path):
    save(path)
    path.write_bytes(path.read_bytes()[:-300])


def marked_as_folder(path):
    """torch alone returns memory that nothing was read into."""
    save(path)
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"/data/0"))
    data[entry + 38] ^= 0x10
    path.write_bytes(data)


def bomb(path):
    save(path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data/9", bytes(2**24))


def cut_wide_safetensors(path):
    """The first bytes of 2,600, of a header's length, are a bracket and an end of a line."""
    save_file(network().state_dict(), path, metadata={"note": ""})
    short = int.from_bytes(path.read_bytes()[:8], "little")
    save_file(network().state_dict(), path, metadata={"note": "-" * (2600 - short)})
    assert path.read_bytes().startswith(b"(\n")
    path.write_bytes(path.read_bytes()[:-2])


def cut_old(path):
    torch.save(network().state_dict(), path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-10])


def scripted(path):
    """What torch knows an archive of TorchScript by."""
    save(path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(f"{path.stem}/constants.pkl", b"")


NO_STATE = (
    r"a checkpoint must be a state dict saved by torch\.save, or safetensors\. .* Reading the"
)
CUT = r"Reading the file failed: .*(unexpected EOF|incomplete metadata).*\. Copy it again"

CHECKPOINTS = {
    "a whole model": (
        lambda path: save(path, network()),
        r"it contains torch\.nn\.modules\.container\.Sequential\. Copy it",
    ),
    "keys that are numbers": (
        lambda path: save(path, {1: torch.zeros(1)}),
        r"state dict \(a dict .* Found dict with 1",
    ),
    "sparse weights": (
        lambda path: save_changed(path, "2.weight", torch.ones(1, 32).to_sparse()),
        r"of another type: 2\.weight torch\.float32, torch\.sparse_coo for torch\.float32",
    ),
    "NaN in the weights": (
        lambda path: save_changed(path, "2.bias", torch.tensor([float("nan")])),
        r"a checkpoint's weights must be finite\. Found NaN or infinity in 2\.bias\. Use",
    ),
    "no file": (lambda path: None, r"must be a file or a folder\. Found nothing at this path"),
    "an empty file": (lambda path: path.write_bytes(b""), r"It begins with b''\. Copy it again"),
    "a pointer of Git LFS in place of safetensors": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n"),
        r"It begins with b'version https://git-lfs\.github\.c'\. Copy it",
    ),
    "a cut file": (cut, r"a zip file, but it was cut off\. Copy it again"),
    "a cut file of an old torch": (cut_old, CUT),
    "a cut safetensors file whose header's length is that of a text": (cut_wide_safetensors, CUT),
    "TorchScript": (
        scripted,
        r"with TorchScript archives passed to ``torch\.load``\. Copy it again",
    ),
    "a part marked as a folder": (marked_as_folder, r"it has compressed parts or folders"),
    "a bomb": (bomb, r"it has compressed parts or folders, which torch\.save never writes"),
    "a pickle that runs code": (
        lambda path: save(path, Evil(path.with_name("ran"))),
        r"Reading the file failed: it contains (_?io|builtins)\.open\. ",
    ),
    "a bare pickle that runs code": (
        lambda path: path.write_bytes(pickle.dumps({"0.weight": Evil(path.with_name("ran"))})),
        NO_STATE,
    ),
}


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file that looks like a TorchScript")
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_bad_checkpoint(tmp_path, name):
    """Other numbers, folders and parts: library/test_checkpoints.py and test_parts_of_*.py."""
    write, expected = CHECKPOINTS[name]
    path = tmp_path / ("c0.safetensors" if "safetensors" in name else "c0.pt")
    write(path)
    with pytest.raises(InputError, match=expected) as error:
        load_checkpoint(network(), path)
    assert (error.value.code == "study.no_weights") is (name == "no file")
    assert not (tmp_path / "ran").exists()


def test_all_bad_checkpoints_are_told_of_before_any_job(workspace, tmp_path):
    """What was seen to fit is looked at again once its file is another. No pickle runs."""
    names = ("cut", "evil", "old", "misfit")
    paths = {"good": "c0.pt", **{name: f"all/{name}.pt" for name in names}}
    workspace.path("all").mkdir()
    cut(workspace.path(paths["cut"]))
    evil = pickle.dumps({"weight": Evil(tmp_path / "ran")})
    workspace.path(paths["evil"]).write_bytes(evil)
    save_changed(workspace.path(paths["misfit"]), "0.weight", torch.zeros(32, 9))
    save_weights(workspace.path(paths["old"]))
    config = {"study": STUDY, **GOOD, "checkpoints": paths}
    found = message(refuse(workspace, config))
    assert "Every checkpoint must fit the model. Found 3 that do not: all/cut.pt: a ch" in found
    assert re.search(r"it was cut off\. Copy it .* all/misfit\.pt: the checkpoint's ke", found)
    assert "all/evil.pt: a checkpoint must be a state dict" in found
    assert not (tmp_path / "ran").exists()
    for name in ("cut", "evil", "misfit"):
        del config["checkpoints"][name]
    workspace.config = config
    assert workspace.would_run()
    save(workspace.path(paths["old"]), {"net": network().state_dict()})
    found = message(refuse(workspace, config))
    assert re.match(r"all/old\.pt: a checkpoint must .* Found dict with net\.", found)
    assert "Set the checkpoint's `state_dict: net`" in found
    config["checkpoints"]["old"] = {"path": paths["old"], "state_dict": "net"}
    workspace.config = config
    assert workspace.would_run()


def test_a_job_takes_the_state_dict_that_its_checkpoint_says(workspace, tmp_path):
    states = {part: network(i).state_dict() for i, part in enumerate(("model", "model_ema"))}
    save(both := tmp_path / "both.pt", states)

    def features_of(checkpoint, **more):
        spec = features_spec("regression", 4, **more)
        job = {"checkpoint": checkpoint, "study_file": workspace.path(STUDY), **ON_CPU}
        compute_features(features=tmp_path / "out.h5", spec=spec, **job)
        return pd.read_hdf(tmp_path / "out.h5", "features")

    for part, state in states.items():
        save(alone := tmp_path / f"{part}.pt", state)
        found = features_of(both, state_dicts={"c0": part})
        assert found.equals(features_of(alone))
        assert found.equals(features_of(both)) == (part == "model")


def test_a_checkpoint_from_the_future(workspace):
    """Snakemake would compute, and then delete the output for its older time."""
    path = workspace.path("c0.pt")
    ahead = time.time() + 1000
    os.utime(path, (ahead, ahead))
    with refused("config.future", "c0.pt", re.compile(r"(?<=that is )(1000|999)")):
        check(workspace, {})
    os.utime(path)
    check(workspace, {})
