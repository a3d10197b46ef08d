"""Which files of weights `trak init` lists: those that load, of one network, one of each run."""

import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from folders import write

from trak_core.command.init import config_for


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def listed(files, n_classes=2):
    """Return the checkpoints of the config for files and images, and what is told of the others."""
    write({f"train/class{n}/1.png": "" for n in range(n_classes)} | files)
    text, report = config_for(Path())
    checkpoints = yaml.safe_load(text)["checkpoints"].values()
    return [*checkpoints], [line for line in report if line.startswith("left out")]


def net(*sizes):
    """Return a state dict of linear layers."""
    pairs = enumerate(pairwise(sizes))
    return {
        f"{n}.{key}": torch.zeros(shape)
        for n, (i, o) in pairs
        for key, shape in (("weight", (o, i)), ("bias", (o,)))
    }


NET = net(3, 4, 2)
IN = torch.nn.Linear(3, 2)
ADAM = torch.optim.Adam(IN.parameters())
IN(torch.ones(3)).sum().backward()
ADAM.step()


@pytest.mark.parametrize(
    "name", ["a.pt", "a.pth", "a.ckpt", "a.safetensors", "a.pth.tar", "a.pt.tar", "a.bin", "A.PTH"]
)
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model_state_dict", "module."])
def test_weights_of_every_ending_and_wrapper_are_seen(name, wrapper):
    if wrapper == "module.":
        contents = {f"module.{key}": tensor for key, tensor in NET.items()}
    elif wrapper and not name.endswith("safetensors"):
        contents = {wrapper: NET, "epoch": 3, "optimizer": ADAM.state_dict()}
    else:
        contents = NET
    assert listed({name: contents, "other.pt": NET}) == ([*sorted([name, "other.pt"])], [])


@pytest.mark.parametrize(
    ("name", "contents", "told"),
    [
        ("optimizer.pt", ADAM.state_dict(), "state, param_groups"),
        ("scheduler.pt", {"last_epoch": 3, "base_lrs": [0.1]}, "last_epoch, base_lrs"),
        ("embedding.pt", torch.ones(3), "Found Tensor"),
        ("module.pt", torch.nn.Linear(2, 2), "it holds"),
        ("tokens.bin", b"\x01\x00\x02\x00", "it begins with"),
        ("empty.pth.tar", b"", "it is empty"),
        ("cut.pt", b"PK\x03\x04 and no more", "was cut off"),
        ("lfs.safetensors", b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ("objects.pt", pickle.dumps({"a": Path()}), "Reading it failed"),
    ],
)
def test_what_does_not_load_is_left_out_with_the_reason(name, contents, told):
    if isinstance(contents, bytes):
        Path(name).write_bytes(contents)
    else:
        torch.save(contents, name)
    checkpoints, (line,) = listed({"run.pt": NET})
    assert checkpoints == ["run.pt"]
    assert line.startswith(f"left out: {name}: ")
    assert told in line


def test_files_that_do_not_load_alone_are_no_study():
    torch.save(ADAM.state_dict(), "optimizer.pt")
    write({"train.csv": "a,label\n1,0\n"})
    with pytest.raises(Exception, match=r"must hold a study.*left out: optimizer.pt"):
        config_for(Path())


@pytest.mark.parametrize(
    ("others", "kept", "why"),
    [
        # As many outputs as the data have classes, whatever else there is.
        (
            {"imagenet1.pt": net(3, 9, 9), "imagenet2.pt": net(3, 9, 9)},
            {"run.pt": NET},
            "2 outputs",
        ),
        ({"deep.pt": net(3, 4, 4, 7)}, {"run.pt": NET}, "2 outputs"),
        ({"data.pt": {"x": torch.ones(2, 3), "y": torch.ones(2)}}, {"run.pt": NET}, "weight"),
        ({"a.pt": net(3, 4, 4, 2)}, {"r1.pt": NET, "r2.pth.tar": NET}, "more files"),
        ({"a.pt": net(3, 2)}, {"run.pt": NET}, "more tensors"),
        ({"z.pt": net(3, 5, 2)}, {"run.pt": NET}, "comes first"),
    ],
)
def test_one_network_s_files_are_listed(others, kept, why):
    checkpoints, (line,) = listed(others | kept)
    assert checkpoints == [*kept]
    named = ", ".join(others)
    first = next(iter(kept))
    assert line.startswith(f"left out: {named}: of another network than {first}, ")
    assert why in line


def test_a_table_s_outputs_are_its_classes_or_one_number():
    nets = {"a.pt": net(3, 3), "b.pt": net(3, 1)}
    for table, kept in (("a,label\n1,0\n1,2\n", "a.pt"), ("a,label\n1,0.5\n1,2\n", "b.pt")):
        write({"train.csv": table, **nets})
        text, _ = config_for(Path())
        assert [*yaml.safe_load(text)["checkpoints"].values()] == [kept]


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        # States of one run whose names tell no time, among states whose names do.
        (["checkpoint.pth.tar", "model_best.pth.tar"], ["checkpoint.pth.tar"]),
        (["best.pt", "last.pt"], ["last.pt"]),
        (["model.pt", "model_ema.pt"], ["model.pt"]),
        (["run1_best.pt", "run1_last.pt", "run2_best.pt"], ["run1_last.pt", "run2_best.pt"]),
        (["a/best.pt", "a/last.pt", "b/best.pt", "b/last.pt"], ["a/last.pt", "b/last.pt"]),
        (["best-epoch=12.ckpt", "last.ckpt"], ["last.ckpt"]),
        # Each is a run.
        (["seed0_best.pt", "seed1_best.pt"], ["seed0_best.pt", "seed1_best.pt"]),
        (["final_1.pt", "final_2.pt"], ["final_1.pt", "final_2.pt"]),
        (["lasting.pt", "bestow.pt"], ["bestow.pt", "lasting.pt"]),
    ],
)
def test_of_each_run_one_state_without_its_time_is_listed(names, kept):
    checkpoints, told = listed(dict.fromkeys(names, NET))
    assert checkpoints == kept
    dropped = {name for line in told for name in line.split(": ")[1].split(", ")}
    assert dropped == {*names} - {*kept}


@pytest.mark.parametrize(
    ("names", "times", "dropped"),
    [
        (["epoch=0-step=50.ckpt", "epoch=1-step=100.ckpt", "last.ckpt"], [50, 100], ["last.ckpt"]),
        (["epoch=3-val_loss=0.25.ckpt", "epoch=12-val_loss=0.3.ckpt"], [12, 3], []),
        (
            ["net_ep1_acc0.9.pth.tar", "net_ep2_acc0.95.pth.tar", "net.pth.tar"],
            [1, 2],
            ["net.pth.tar"],
        ),
        (["m_step100.bin", "m_step20.bin", "m_best.bin"], [100, 20], ["m_best.bin"]),
    ],
)
def test_states_with_their_times_are_of_one_run(names, times, dropped):
    checkpoints, told = listed(dict.fromkeys(names, NET))
    assert [checkpoint["at"] for checkpoint in checkpoints] == times
    assert {checkpoint["run"] for checkpoint in checkpoints} == {"run1"}
    assert len(told) == len(dropped)
    assert all(f"left out: {name}: " in told[0] for name in dropped)
