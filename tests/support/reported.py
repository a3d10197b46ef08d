"""A finished study for reports, with texts that look like markup."""

import hashlib
import json
import re
from base64 import b64encode
from itertools import pairwise
from pathlib import Path

import torch
from pipeline import run_exact_stages, run_stages
from report_page import Page

from trak_core.stages.draw_influences import draw_influences
from trak_core.stages.write_report import write_report

# Ids and paths of users may look like markup, and must be shown unchanged.
HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "&amp;<b>'"]
TARGETS = [*HOSTILE, "plain"]

STUDY = """
import torch
from torch.utils.data import TensorDataset

x = torch.linspace(-1, 1, 24 * 4).sin().reshape(24, 4) * torch.arange(1.0, 5)
x[0] *= 3
y = x.sum(1)

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))

def train_data():
    return TensorDataset(x[:20], y[:20])

def target_data():
    return TensorDataset(x[20:], y[20:])

def train_ids():
    return ["<script>alert(0)</script>"] + [f"row-{i}" for i in range(1, 20)]

def target_ids():
    return TARGETS
"""

DRAW = """
def draw(axes, sample):
    axes.imshow(sample[0].reshape(2, 2).numpy(), cmap="gray")
    axes.set_title("<i>")
"""


# Texts that could break pages, pictures and tables -> how they are shown.
ODD_TEXTS = {
    "": "(an empty text)",
    "pad\0ded\0\0": "padded",
    "$x^{$ \\frac {{ 7 * 7 }} {% raw %}": "$x^{$ \\frac {{ 7 * 7 }} {% raw %}",
    "</span><script>alert(3)</script>&amp;<!--": "</span><script>alert(3)</script>&amp;<!--",
    "\u202eturned \u2067round": "turned round",
    "مرحبا بالعالم": "مرحبا بالعالم",
    "W" * 5000: "W" * 134 + " ... " + "W" * 66,
    "one\r\n\n\n\n\ttwo  \n": "one two",
    "half \ud83d of a pair": "half \N{REPLACEMENT CHARACTER} of a pair",
    "\x1b[31mred\x1b[0m": "[31mred[0m",
    "漢字 👩\u200d👧": "漢字 👩\u200d👧",
    "nan": "nan",
}

DESCRIBE = f"""
ODD = {list(ODD_TEXTS)!r}

def describe(sample):
    here = int((x == sample[0]).all(1).nonzero()[0])
    return ODD[here % len(ODD)]
"""


def study_with(folder, code):
    """Write the study with further code, and return its path."""
    path = folder / "study.py"
    path.write_text(STUDY.replace("TARGETS", repr(TARGETS)) + code)
    return path


def finished(folder):
    """Run a study with two checkpoints and four targets, and return its results folder."""
    study = study_with(folder, "").rename(folder / "a<b>&'study.py")
    checkpoints = {}
    for name in ("c0", "c1"):
        torch.manual_seed(int(name[1]))
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        checkpoints[name] = folder / f"{name}.pt"
        torch.save(model.state_dict(), checkpoints[name])
    settings = {"model_output": "regression", "damping": 0.5}
    run_stages(folder / "results", study, checkpoints, TARGETS, proj_dim=8, **settings)
    run_exact_stages(folder / "exact", study, checkpoints, TARGETS, **settings)
    return folder / "results"


def config_of(results):
    return {
        "study": str(results.parent / "a<b>&'study.py"),
        "model_output": "regression",
        "checkpoints": {"c0": "<u>c0</u>.pt", "c1": "c1.pt"},
        "experiments": {"mine": {"targets": HOSTILE}},
        "projection": {"kind": "rademacher", "proj_dim": 8, "seed": 0},
        "scoring": {"damping": 0.5},
    }


def write(results, study=None, exact=False, asked=None, scores=None, **more):
    config = config_of(results) | (asked or {})
    report = results / "report.html"
    matrices = [] if exact else [results / f"normal_matrix/c{i}.h5" for i in range(2)]
    measurements = ("evaluations", "removals", "self_influence")
    write_report(
        report=report,
        scores=scores or [results / "scores/mine.h5"],
        normal_matrices=matrices,
        study_file=Path(study or config["study"]),
        config=config,
        **(dict.fromkeys(measurements, ()) | more),
    )
    return report.read_text()


def page_of(results, **settings):
    """Return the report as a page, after checks of its markup."""
    markup = write(results, **settings)
    assert "<script" not in markup
    page = Page(markup)
    check_alone(page)
    return page


# Pages and lists of the same study.
BESIDE = r"(\.\./)?(answers/\w+|lists/\w+|report)\.html|\w+\.csv"


def check_alone(page):
    """Check that a page fetches nothing, runs only allowed scripts, and is accessible."""
    assert page.closed_in_order
    names = {name for name, _ in page.elements}
    assert not names & {"iframe", "object", "embed", "base", "form", "link", "video"}
    (policy,) = (m["content"] for m in page.all("meta") if "http-equiv" in m)
    hashes = [hashlib.sha256(script.encode()).digest() for script in page.scripts]
    allowed = "".join(f"; script-src 'sha256-{b64encode(h).decode()}'" for h in hashes)
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'{allowed}"
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for name, attributes in page.elements:
        assert not [key for key in attributes if key.startswith("on")], (name, attributes)
        for key in ("src", "href", "srcset", "action", "data", "poster", "xlink:href"):
            value = attributes.get(key)
            # Links may lead to other pages of the study.
            beside = (value or "").partition("#")[0]
            is_beside = name == "a" and re.fullmatch(BESIDE, beside)
            is_here = value is None or value.startswith("data:image/") or value[1:] in ids
            assert is_here or is_beside, value
    assert not re.search(r"url\(|@import", "".join(page.styles))
    assert all(image["alt"] for image in page.all("img"))
    assert all(cell.get("scope") for cell in page.all("th"))
    assert page.all("html") == [{"lang": "en"}]
    assert (
        page.elements[page.elements.index(("body", page.all("body")[0])) + 1][1]["href"] == "#main"
    )
    levels = [int(n[1]) for n, _ in page.elements if re.fullmatch(r"h[1-6]", n)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


# Functions of the study, by how it shows samples.
CODES = {"printed": "", "drawn": DRAW + DESCRIBE, "described": DESCRIBE}


def draw(results, folder, study_file):
    """Run the job, and return its files: page and table."""
    names = {"answer": "mine.html", "texts": "mine.h5"}
    files = {key: folder / name for key, name in names.items()}
    inputs = {"scores": results / "scores/mine.h5", "study_file": study_file, "code": "code"}
    draw_influences(**files, **inputs)
    return list(files.values())


def data_of(page):
    """Return the data of the page's script."""
    (data,) = page.data
    return json.loads(data)
