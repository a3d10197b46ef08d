"""The tables of projection kinds and of model outputs: nobody keeps a second list beside them."""

import ast
import re
from pathlib import Path

import pytest
import torch
import yaml
from refused import refused

from trak_core.model_outputs.about_outputs import TABLE
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.projection.cpu import project
from trak_core.projection.cuda import project as project_cuda
from trak_core.projection.reference import projection_matrix
from trak_core.settings import EXACT, ProjectionKind, ProjectionSpec

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "trak_core"
SCHEMA = yaml.safe_load((REPOSITORY / "workflow/schemas/config.schema.yaml").read_text())
DESCRIBED = (REPOSITORY / "config/README.md").read_text()
KINDS = [kind for kind in ProjectionKind if kind.about.tag is not None]


def load(name):
    others = (torch.zeros(3, 4), torch.zeros(3, 4), 1.0) if TABLE[name].needs_pairs else ()
    return TABLE[name].load(*others)


MODULES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_a_config_may_name_each_kind_and_each_output():
    either = SCHEMA["properties"]["projection"]["anyOf"]
    assert [one["const"] for one in either if "const" in one] == [EXACT]
    (kinds,) = (one["properties"]["kind"]["enum"] for one in either if "properties" in one)
    assert kinds == KINDS
    assert SCHEMA["properties"]["model_output"]["anyOf"][0]["enum"] == list(TABLE)


def test_each_kind_and_each_output_is_described():
    (kind,) = (one["properties"]["kind"] for one in SCHEMA["properties"]["projection"]["anyOf"][1:])
    assert re.findall(r"`(\w+)`:", kind["description"]) == KINDS
    section = DESCRIBED.split("| `model_output` | f |")[1].split("\n\n")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines()[2:]]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == list(TABLE)


def test_tags_are_told_apart_and_fit_the_counter():
    tags = [kind.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)
    assert all(0 <= tag < 2**8 for tag in tags)
    assert 2 not in tags, "features of version 0.2.0 were made with it"
    assert [kind for kind in ProjectionKind if kind not in KINDS] == [ProjectionKind.IDENTITY]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_definition_and_a_kernel(kind):
    shapes = [(4, 4)] if kind.about.of_matrices else None
    spec = ProjectionSpec(kind=kind, n_params=16, proj_dim=8, seed=0, stream=0, shapes=shapes)
    assert projection_matrix(spec).shape == (16, 8)
    assert project.slice_length(spec) >= 8
    assert kind in project._KERNELS


def test_a_kind_without_a_kernel_for_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(project_cuda, "capability_of", lambda _: (9, 0))
    spec = ProjectionSpec(kind="identity", n_params=8, proj_dim=8, seed=0, stream=0)
    with refused("projection.gpu_kind", "identity"):
        project_cuda.choose(spec, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", TABLE)
def test_each_output_is_one_and_its_row_says_what_it_is(name):
    about, output = TABLE[name], load(name)
    assert isinstance(output, ModelOutput)
    assert output.has_labels or not about.label
    logits = torch.zeros(2, 4) if about.needs_pairs else torch.zeros(3)
    has_classes = output.label_ndim == 0 and output.n_classes(logits) is not None
    assert about.labels_are_classes == has_classes
    for words in (about.name, about.unit, about.meaning):
        assert re.fullmatch(r"[a-z].*[^.]", words)


def test_each_error_has_a_code():
    kinds = {"InputError", *re.findall(r"class (\w+)\(InputError", "\n".join(MODULES.values()))}
    without = [
        f"{name}:{call.lineno}"
        for name, text in MODULES.items()
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in kinds
        if len(call.args) < 2 and "code" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not without


def test_each_code_of_an_error_is_seen_by_a_test():
    pattern = re.compile(r'(?:code=|_refuse\(\s*)"(\w+\.\w+)"')
    codes = {code for text in MODULES.values() for code in pattern.findall(text)}
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("*.py"))
    seen = set(re.findall(r"\w+", tests))
    assert {code for code in codes if code.partition(".")[2] not in seen} == set()
