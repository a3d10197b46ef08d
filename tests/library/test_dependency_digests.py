import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from refused import refused

from trak_core import dependency_digests
from trak_core.command.run import study_imports
from trak_core.dependency_digests import (
    code_digest,
    content_digest,
    mentions,
    stage_digest,
    stage_files,
    study_digest,
    study_modules,
)

PACKAGE = Path(dependency_digests.__file__).parent
STAGES = sorted(p.stem for p in (PACKAGE / "stages").glob("[a-z]*.py"))
SHOWING = {"draw_influences", "write_report"}
# Each file, and the stages whose digests an edit of it changes.
TOY = {
    **{name: {"solve", *SHOWING} for name in ("errors.py", "projection/deep/a.py", "new/b.py")},
    **{name: {"solve", *SHOWING} for name in ("runtime/job.py", "stages/_shared.py")},
    **{f"stages/{name}.py": {name} for name in ("solve", *sorted(SHOWING))},
    **{f"report/{name}": {*SHOWING} for name in ("page.py", "templates/a.j2", "style.css")},
    **{name: set() for name in ("command/run.py", "queries/ask.py", "compat/traker.py")},
    **{name: set() for name in ("projection/notes.txt", "projection/__pycache__/a.pyc")},
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    for name in TOY:
        path = tmp_path / "trak_core" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a = 1\n")
    monkeypatch.setattr(dependency_digests, "_PACKAGE", tmp_path / "trak_core")
    code_digest.cache_clear()
    yield tmp_path / "trak_core"
    code_digest.cache_clear()


def digests():
    """What a further start says of each stage."""
    code_digest.cache_clear()
    return {name: stage_digest(f"trak_core.stages.{name}") for name in ("solve", *SHOWING)}


@pytest.mark.parametrize("name", TOY)
def test_an_edit_changes_the_stages_that_the_file_may_decide(toy, name):
    """Whole files count: a comment as well."""
    before = digests()
    for text in ("a = 1\n# a comment\n", "a = 2\n"):
        (toy / name).write_text(text)
        assert {stage for stage, own in digests().items() if own != before[stage]} == TOY[name]
    (toy / name).write_text("a = 1\n")
    os.utime(toy / name, (1, 1))
    assert digests() == before


@pytest.mark.parametrize("stage", STAGES)
def test_all_that_a_stage_imports_counts(stage):
    modules = study_modules(PACKAGE / f"stages/{stage}.py", [PACKAGE.parent]).items()
    imported = {path for name, path in modules if name[0] == PACKAGE.name}
    counted = dependency_digests._code_files()
    counted |= dependency_digests._code_files(*stage_files(f"trak_core.stages.{stage}"))
    empty = {path for path in imported if not path.read_text().partition('"""')[2].strip('"\n')}
    assert len(imported) > 10
    beside = {PACKAGE / "__init__.py", PACKAGE / "stages/__init__.py"}
    assert imported - counted - empty <= beside


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.py"
    path.write_text("from layers import Block\nimport torch\n")
    return path


def test_a_study_counts_with_the_modules_beside_it_whole(study):
    beside = study.with_name("layers.py")
    beside.write_text("def late():\n    import deep\n")
    study.with_name("deep.py").write_text("")
    study.with_name("other.py").write_text("")
    seen = {study_digest(study)}
    for name in ("study.py", "layers.py", "deep.py"):
        path = study.with_name(name)
        path.write_text(f"{path.read_text()}# a comment\n")
        seen.add(study_digest(study))
    assert len(seen) == 4
    study.with_name("other.py").write_text("b = 1\n")
    os.utime(study, (1, 1))
    assert study_digest(study) in seen


@pytest.mark.parametrize("code", ["a = (", "a = " + "1 + " * 10**5 + "1", "a = '\0'"])
def test_a_study_that_python_cannot_read(study, code):
    study.write_text(code)
    with refused("provenance.python", study, re.compile(r"Found: .*")):
        study_digest(study)


def test_modules_are_those_that_python_imports(tmp_path):
    """A question in its own folder: packages come before modules, the first folder comes first."""
    imports = "import both, beside, tool, parts.a, parts.b, whole.in_it, places.in_it\n"
    texts = {
        "asked/question.py": imports,
        **dict.fromkeys(("asked/both.py", "both.py", "beside.py", "tool.py"), ""),
        **dict.fromkeys(("tool/__init__.py", "asked/parts/a.py", "parts/a.py", "parts/b.py"), ""),
        # A folder that is no package comes after a package elsewhere.
        **dict.fromkeys(("asked/whole/in_it.py", "whole/in_it.py", "whole/__init__.py"), ""),
        # A module that says where others in it are.
        "places.py": f"__path__ = [{str(tmp_path / 'places')!r}]\n",
        "places/in_it.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    folders = [tmp_path / "asked", tmp_path]
    modules = study_modules(tmp_path / "asked/question.py", folders)
    code = f"import sys\nsys.path[:0] = {[*map(str, folders)]}\nimport question\nfor m in " + (
        "list(sys.modules.values()): print(getattr(m, '__file__', None))"
    )
    python = [sys.executable, "-B", "-S", "-c", code]
    said = subprocess.run(python, capture_output=True, text=True, check=True).stdout
    really = {line for line in said.splitlines() if line.startswith(str(tmp_path))}
    assert len(really) == 10
    assert {str(file) for file in modules.values()} == really


def test_data_files_count_by_name_and_content(study):
    seen = [study_digest(study, data) for data in ({}, {"a": "1"}, {"b": "1"}, {"a": "2"})]
    assert len(set(seen)) == 4
    assert study_digest(study) == seen[0]
    assert study_digest(study, {"a": "1", "b": "2"}) == study_digest(study, {"b": "2", "a": "1"})


@pytest.mark.parametrize("name", ["gone.py", "notes.txt", "folder.py"])
def test_a_study_that_is_no_python_file_has_no_digest(tmp_path, name):
    (tmp_path / "notes.txt").write_text("a = 1\n")
    (tmp_path / "folder.py").mkdir()
    with refused("provenance.study_file", tmp_path / name):
        study_digest(tmp_path / name)


@pytest.mark.parametrize(
    ("imported", "beside", "may"),
    [
        ("from mine import *", "x = 1\n", True),
        ("import mine", "def class_names():\n    return ['cat']\n", True),
        ("import mine", "x = 'my_class_names'\n", False),
        ("from other import x as y", "", False),
        ("from other import class_names", "", True),
    ],
)
def test_a_study_may_have_what_a_module_gives_it(study, imported, beside, may):
    study.with_name("mine.py").write_text(beside)
    study.write_text(f"{imported}\n")
    assert mentions(study, "class_names", "columns") == may


def test_what_a_study_always_imports_is_imported_ahead(tmp_path):
    study = tmp_path / "study.py"
    (tmp_path / "beside.py").write_text("import numpy as np\n")
    text = "import torch.nn\nfrom sklearn import datasets\nimport beside\n"
    later = "def train():\n    import transformers\n"
    study.write_text(text + later)
    assert study_imports(study) == ["numpy", "sklearn.datasets", "torch.nn"]
    for own in (
        *("import os\nos.environ['A'] = 'b'\n", "import sys\nsys.path[:0] = ['lib']\n"),
        *("import os\nos.environb[b'A'] = b'b'\n", "import dotenv\ndotenv.load_dotenv()\n"),
    ):
        study.write_text(own + text)
        assert study_imports(study) == []


def test_content_digest_goes_by_text_and_order():
    parts = ([1, 2], [2, 1], [12], ["1, 2"], ["1", "2"], [], None)
    assert len({content_digest(part) for part in parts}) == len(parts)
    assert content_digest([1, 2]) == content_digest([1, 2])
