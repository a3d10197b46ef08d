"""What `trak init` takes from Python files, which it parses and never runs."""

from pathlib import Path

import pytest
import yaml

from trak_core.command.init import config_for


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def guessed(files):
    """Return the config for files, what is printed of it, and its text."""
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
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
        # To import it would train once more.
        (
            TABLE,
            "nn.Module",
            "",
            "for epoch in range(3):\n    pass\n",
            "nets.py:net",
            "Give as `model` Net of net.py, moved into a file that runs nothing when imported\n",
        ),
        # A file alone has no package.
        (
            TABLE,
            "nn.Module",
            "",
            "from .parts import Part\n",
            "nets.py:net",
            "Give as `model` Net of net.py, moved into a file without relative imports\n",
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
    running = NET.format(base="nn.Module", arguments="", more="for i in range(3):\n    pass\n")
    config, printed, _ = guessed({**TABLE, "a.py": needy, "b.py": running, "m.pt": ""})
    assert config["study_arguments"]["model"] == "nets.py:net"
    assert "Give as `model` Net of b.py, moved into" in printed
    config, printed, _ = guessed({**TABLE, "a.py": running, "b.py": needy, "m.pt": ""})
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


_COMPOSED = "T.Compose([T.Resize(8), {}T.ToTensor()])"


@pytest.mark.parametrize(
    ("code", "transform", "said"),
    [
        (f"transform = {_COMPOSED.format('')}\n", "net.py:transform", "chose: net.py:transform as"),
        (
            "def prepared(image, size=8):\n    pass\n",
            "net.py:prepared",
            "chose: net.py:prepared as",
        ),
        # Training draws; of what else is called so nothing takes an image.
        (
            f"transform_train = {_COMPOSED.format('T.CenterCrop(8), ')}\n"
            f"transform = {_COMPOSED.format('T.RandomCrop(8), ')}\n"
            f"test_transform = {_COMPOSED.format('')}\n",
            "net.py:test_transform",
            "chose: net.py:test_transform as",
        ),
        (
            "def preprocess(path):\n    pass\ndef prepare_data(root):\n    pass\n",
            None,
            "prepared.py",
        ),
        ("def transform(image, size):\n    pass\ntransforms = [1]\n", None, "prepared.py:prepared"),
        (
            "preprocess = lambda image: image\ndef transform(image):\n    pass\n",
            None,
            "It may be net.py:preprocess or net.py:transform: name the one of evaluation",
        ),
        (
            "def transform(image):\n    pass\nfor _ in range(3):\n    pass\n",
            None,
            "It may be net.py:transform, in a file that runs nothing and has no",
        ),
    ],
)
def test_what_prepares_images_is_taken_from_code(code, transform, said):
    config, printed, _ = guessed({**IMAGES, "run.pt": "", "net.py": code})
    assert config["study_arguments"]["transform"] == transform
    assert said in printed
