"""The files of weights that `trak init` lists: those of one network that load, with times."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from folders import write

from trak_core.command.init import config_for

pytestmark = pytest.mark.usefixtures("here")


def listed(files, n_classes=2):
    """Return the checkpoints of the config for files and images, and the report on the others."""
    write({f"train/class{n}/1.png": "" for n in range(n_classes)} | files)
    text, report = config_for(Path())
    checkpoints = yaml.safe_load(text)["checkpoints"].values()
    return [*checkpoints], [line for line in report if line.startswith("left out")]


def net(*sizes):
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


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a.pth.tar", "a.bin", "A.PTH"])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model_state_dict", "module."])
def test_weights_of_every_ending_and_wrapper_are_listed(name, wrapper):
    if wrapper == "module.":
        contents = {f"module.{key}": tensor for key, tensor in NET.items()}
    elif wrapper and not name.endswith("safetensors"):
        contents = {wrapper: NET, "epoch": 3, "optimizer": ADAM.state_dict()}
    else:
        contents = NET
    assert listed({name: contents, "other.pt": NET}) == ([*sorted([name, "other.pt"])], [])


def test_files_that_do_not_load_are_left_out_with_the_reason():
    torch.save(ADAM.state_dict(), "optimizer.pt")
    Path("cut.pt").write_bytes(b"PK\x03\x04 and no more")
    checkpoints, lines = listed({"run.pt": NET})
    assert checkpoints == ["run.pt"]
    for line, name, told in zip(
        lines, ("cut.pt", "optimizer.pt"), ("was cut off", "state, param_groups"), strict=True
    ):
        assert line.startswith(f"left out: {name}: ")
        assert told in line


@pytest.mark.parametrize(
    ("others", "kept"),
    [
        ({"a.pt": net(3, 4, 4, 2)}, {"r1.pt": NET, "r2.pth.tar": NET}),
        ({"z.pt": net(3, 5, 2)}, {"run.pt": NET}),
        ({"b.pt": net(3, 9, 9), "z.pt": net(3, 5, 2)}, {"a1.pt": NET}),
    ],
)
def test_files_of_one_network_are_listed(others, kept):
    checkpoints, lines = listed(others | kept)
    assert checkpoints == [*kept]
    first = next(iter(kept))
    assert [line.split(", ")[0] for line in lines] == [
        f"left out: {name}: another network than {first}" for name in others
    ]


@pytest.mark.parametrize(
    ("names", "times"),
    [
        (["epoch=0-step=50.ckpt", "epoch=1-step=100.ckpt"], [50, 100]),
        (["epoch=3-val_loss=0.25.ckpt", "epoch=12-val_loss=0.3.ckpt"], [12, 3]),
        (["net_ep1_acc0.9.pth.tar", "net_ep2_acc0.95.pth.tar"], [1, 2]),
        (["m_step100.bin", "m_step20.bin"], [100, 20]),
    ],
)
def test_files_with_times_are_of_one_run(names, times):
    checkpoints, told = listed(dict.fromkeys([*names, "other_best.pt"], NET))
    assert [c["at"] for c in checkpoints if isinstance(c, dict)] == times
    assert [c for c in checkpoints if isinstance(c, str)] == ["other_best.pt"]
    assert {c["run"] for c in checkpoints if isinstance(c, dict)} == {"run1"}
    assert told == []
