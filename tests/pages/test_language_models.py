"""The page on language models is followed: its study, its command, its code."""

import hashlib
import json

import h5py
from pages import follow
from report_page import Page
from workspace import FORKS, Workspace


def test_the_page_on_language_models(tmp_path, monkeypatch):
    workspace = Workspace.make(tmp_path / "study", "diabetes.py", {})
    page = "docs/how-to/language-models.md"
    # A checkpoint of the Trainer's less, and a fifth of the texts in as many steps.
    less = {"manual-out 3": "manual-out 2", "manual-out/checkpoint-60": "manual-out/checkpoint-40"}
    less |= {r"\[:600\]": "[:200]", r"\[:500\]": "[:100]", r"\[500:\]": "[100:]"}
    less |= {r"\[:300\]": "[:60]", "batch_size=25": "batch_size=5"}
    (printed,) = follow(page, workspace.folder, monkeypatch, less, FORKS)
    influences = printed.splitlines()
    assert [line[0] for line in influences] == ["+"] * 3 + ["-"] * 3
    answer = Page(workspace.path("results-manual/answers/five.html").read_text())
    data = json.loads(answer.data[0])
    texts = " ".join(" ".join(entry["sample"] for entry in data["train"]).split())
    assert all(line.split(" ", 1)[1] in texts for line in influences)
    (target,) = (target for target in data["targets"] if target["id"] == "40")
    assert target["words"].startswith("tokens")
    # The tokens of both texts have colours, which a legend explains.
    for target in data["targets"]:
        texts = target, *(data["train"][place] for place, *_ in target["influences"])
        levels = target["levels"], *(levels for _, _, levels in target["influences"])
        for text, colours in zip(texts, levels, strict=True):
            assert len(colours) == len(text["tokens"])
            assert max(map(abs, colours)) == 9
    # The question of the page's own; training features are those of before.
    asked = Page(workspace.path("results-manual/answers/asked.html").read_text())
    assert "The for statement is used to iterate" in asked.data[0]
    train, question = (
        workspace.path(f"results-manual/features/trainer-20/{name}.h5").stat().st_mtime_ns
        for name in ("train", "asked")
    )
    assert train < workspace.path("results-manual/scores/five.h5").stat().st_mtime_ns < question
    # The Trainer's own folders are checkpoints of one run, named by their steps.
    results = workspace.path("results-manual")
    with h5py.File(results / "scores/five.h5") as file:
        assert file.attrs["combine"] == b"unit_average"
        assert (file.attrs["n_checkpoints"], file.attrs["n_runs"]) == (2, 1)
    assert {path.name for path in (results / "features").iterdir()} == {"trainer-20", "trainer-40"}
    # The same folders with what the Trainer's optimizer kept: other features, of their own file.
    specs = []
    for name in ("results-manual", "results-manual-adam"):
        with h5py.File(workspace.path(f"{name}/features/trainer-40/train.h5")) as file:
            specs.append(json.loads(file.attrs["spec"]))
    assert [spec["preconditioner"] for spec in specs] == [None, "adam"]
    optimizer = workspace.path("manual-out/checkpoint-40/optimizer.pt").read_bytes()
    assert specs[1]["checkpoint"]["optimizer_sha256"] == hashlib.sha256(optimizer).hexdigest()
    answer = Page(workspace.path("results-manual-adam/answers/five.html").read_text())
    assert "training gradients of length 1; gradients divided by the root of Adam's" in answer.text
    # The adapters of a LoRA fine-tune, which alone are differentiated.
    results = workspace.path("results-lora")
    assert {path.name for path in (results / "features").iterdir()} == {"lora-12", "lora-24"}
    log = (results / "logs/compute_features/lora-24/train.log").read_text()
    n_layers, r, width = 2, 4, 64
    n_params = n_layers * r * (width + 3 * width + width + 4 * width)
    assert f" {n_params} parameters to 512 " in log.replace(",", "")
