"""Networks of timm and torchvision, from `trak init` or a config to scores.

Both come with the extra `vision`, which the gate installs with its lowest versions.
"""

import json
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image
from pipeline import read_scores, run_config
from safetensors.torch import save_file
from workspace import REPOSITORY

from trak_core.command.init import config_for
from trak_core.ready_made.image_folder import image_folder

pytestmark = pytest.mark.skipif(
    not find_spec("timm"), reason="needs the extra `vision`, which the gate's lowest versions have"
)
if find_spec("torchvision"):
    try:
        import torchvision  # ruff: ignore[unused-import]
    except RuntimeError:
        # A torchvision for another torch lacks operators that no network here needs. It can be
        # imported if they have a signature.
        for operator in ("nms", "qnms"):
            signature = "(Tensor boxes, Tensor scores, float least) -> Tensor"
            torch.library.define(f"torchvision::{operator}", signature)
NETS = """
from torchvision import transforms

prepared = transforms.Compose([transforms.Resize(32), transforms.ToTensor()])
"""


@pytest.fixture
def folder(here):
    """Write images of two classes, and their transform."""
    pixels = np.random.default_rng(0).integers(0, 256, (10, 40, 40, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        path = Path("train" if i < 8 else "held-out") / ("cat" if i % 2 else "dog") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    Path("nets.py").write_text(NETS)


@pytest.mark.parametrize(
    "name", ["timm/test_resnet", "torchvision/shufflenet_v2_x0_5", "test_efficientnet.r160_in1k"]
)
def test_a_network_by_its_name_gives_scores(name, folder):
    torch.manual_seed(0)
    arguments = {"images": "train", "targets": "held-out", "transform": "nets.py:prepared"}
    study = image_folder(**arguments, model=name)
    model = study.make_model()
    if name.startswith("timm/"):
        Path("run").mkdir()
        Path("run/config.json").write_text(json.dumps({"architecture": name.split("/")[1]}))
        save_file(model.state_dict(), "run/model.safetensors")
        text, _ = config_for(Path())
        config = yaml.safe_load(text)
        assert config["study_arguments"].pop("model") == name
        assert config["study_arguments"].pop("transform") is None
    else:
        torch.save({"state_dict": model.state_dict(), "epoch": 3}, "run.pth.tar")
        config = yaml.safe_load(config_for(Path())[0])
    config["study_arguments"] |= {"model": name, "transform": "nets.py:prepared"}
    config |= {"results": "results", "projection": {"proj_dim": 16}}
    Path("mine.yaml").write_text(yaml.safe_dump(config))
    scores = run_config(Path("mine.yaml")) / "scores/asked.h5"
    assert read_scores(scores).shape == (8, 2)
    assert np.isfinite(read_scores(scores)).all(axis=None)
    outputs = pd.read_hdf(scores, "targets")["output"]
    with torch.no_grad():
        expected = [
            torch.logit(model.eval()(x[None]).softmax(1)[0, y]).item()
            for x, y in study.target_data()
        ]
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # timm's ImageDataset closes no file.
def test_the_example_of_timm_prints_what_explains_each_image(folder, capsys):
    runpy.run_path(str(REPOSITORY / "examples/timm_network.py"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    for line in lines:
        assert re.fullmatch(r"\w+/\d+\.png <- \w+/\d+\.png 0\.\d{4}", line)
