"""What `trak init` takes from Python files, which it parses and never runs."""

from pathlib import Path

import pytest
import yaml
from folders import write

from trak_core.command.init import config_for


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def guessed(files):
    """Return the config for files, what is printed of it, and its text."""
    write(files)
    text, report = config_for(Path())
    return yaml.safe_load(text), "\n".join([*report, ""]), text


NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()

class Net({base}):
    def __init__(self{arguments}):
        super().__init__()
        self.block = Block(3)
{more}
"""
IMAGES = {f"train/{name}/1.png": "" for name in ("a", "b")}
TABLE = {"train.csv": "a,label\n1.5,1\n2,0\n"}


@pytest.mark.parametrize(
    ("data", "base", "arguments", "more", "model", "said"),
    [
        (TABLE, "nn.Module", "", "", "net.py:Net", "chose: net.py:Net as the network\n"),
        (TABLE, "Block", ", width=8, *, deep=False", "", "net.py:Net", "chose: net.py:Net"),
        # Who must say widths writes a function, here or there.
        (
            TABLE,
            "torch.nn.Module",
            ", n_in, n_out=2, *, deep",
            "",
            "net.py:net",
            "Give as `model` a function that you add to net.py, such as "
            "`def net(): return Net(n_in=..., deep=...)`",
        ),
        (
            TABLE,
            "nn.Module",
            ", n_in",
            "def made(n_in=3):\n    return Net(n_in)\n",
            "net.py:made",
            "chose: net.py:made as the network\n",
        ),
        (TABLE, "nn.Module", "", "class Other(Net):\n    pass\n", "net.py:Other", "net.py:Other"),
        (
            TABLE,
            "nn.Module",
            "",
            "class Other(nn.Module):\n    pass\n",
            "net.py:Net",
            "chose: net.py:Net as the network; net.py:Other could be it too\n",
        ),
        (TABLE, "nn.Module", "", "class Module(nn.Module):\n    pass\n", "net.py:Net", "chose"),
        (IMAGES, "nn.Module", ", n_classes=10", "", "net.py:Net", "chose: net.py:Net"),
        (
            IMAGES,
            "nn.Module",
            ", dropout=0.1",
            "",
            "net.py:net",
            "such as `def net(n_classes): return Net()`",
        ),
        (
            IMAGES,
            "nn.Module",
            ", width=8",
            "",
            "net.py:net",
            "such as `def net(n_classes): return Net()`",
        ),
    ],
)
def test_a_network_of_one_s_own(data, base, arguments, more, model, said):
    """It is parsed alone: what it imports need not be there."""
    deep = f"x = {100_000 * '-'}1"  # more than Python's parser takes
    own = NET.format(base=base, arguments=arguments, more=more)
    code = {"net.py": own, "bad.py": "def", "deep.py": deep}
    config, printed, text = guessed({**data, **code, "m.pt": ""})
    assert config["study_arguments"]["model"] == model
    assert said in printed
    is_placeholder = "# model: a placeholder: give " in text
    assert is_placeholder == (not said.startswith(("chose", "net.py:Other")))


def test_a_placeholder_names_the_file_that_its_advice_is_about():
    needy = NET.format(base="nn.Module", arguments=", n_in", more="")
    config, printed, _ = guessed({**TABLE, "a.py": needy, "b.py": needy, "m.pt": ""})
    assert config["study_arguments"]["model"] == "b.py:net"
    assert "a function that you add to b.py" in printed


def test_weights_of_timm_s_name_their_network():
    saved = {"out/config.json": '{"architecture": "resnet18"}', "out/model.safetensors": ""}
    config, printed, _ = guessed({**IMAGES, **saved})
    assert config["study"] == "image_folder"
    arguments = {"images": "train", "model": "timm/resnet18", "transform": None}
    assert config["study_arguments"] == arguments
    assert config["checkpoints"] == {"model": "out/model.safetensors"}
    assert printed.count("could not tell") == printed.count("how training prepared images") == 1


@pytest.mark.parametrize(
    ("code", "maybe"),
    [
        ("transform = T.Compose([T.Resize(8)])\n", "maybe net.py:transform"),
        ("def prepared(image, size=8):\n    pass\n", "maybe net.py:prepared"),
        (
            "test_transform = 1\ndef preprocess(path):\n    pass\n",
            "maybe net.py:test_transform, net.py:preprocess",
        ),
        # Training draws.
        ("transform_train = 1\ndef augmenting_transform(image):\n    pass\n", None),
        ("def transformer(n):\n    pass\nunprepared = 1\n", None),
    ],
)
def test_what_prepares_images_is_named_and_not_guessed(code, maybe):
    config, printed, text = guessed({**IMAGES, "run.pt": "", "net.py": code})
    assert config["study_arguments"]["transform"] is None
    told = maybe or "such as prepared.py:prepared"
    assert f"a function that does what evaluation did, {told}\n" in printed
    assert f" that makes a tensor of a PIL image in RGB, {told}\n" in text
