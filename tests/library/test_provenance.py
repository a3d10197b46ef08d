import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trak_core import provenance
from trak_core.errors import InputError
from trak_core.provenance import (
    code_digest,
    content_digest,
    stat_signature,
    study_digest,
    study_imports,
)

PACKAGE = Path(provenance.__file__).parent
STAGES = sorted(p.stem for p in (PACKAGE / "stages").glob("[a-z]*.py"))

PROJECTED = {"compute_features", "compute_distortion"}
# Gradients and all else of a model under a checkpoint.
LOADED = {*PROJECTED, "compute_gramian", "compute_embeddings"}
RETRAINED = {"retrain_subsets", "retrain_without"}
# What solves with a normal matrix or a Gramian, or sums one.
SOLVED = {"compute_normal_matrix", "compute_scores", "compute_exact_scores"}
# What is made of scores and features.
MEASURED = {"evaluate_scores", "find_flipped", "compute_self_influence"}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    shutil.copytree(PACKAGE, tmp_path / "trak_core")
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    return tmp_path / "trak_core"


def changed(copy, module, edit):
    before = {stage: code_digest(f"trak_core.stages.{stage}") for stage in STAGES}
    path = copy / module
    path.write_text(edit(path.read_text()))
    after = {stage: code_digest(f"trak_core.stages.{stage}") for stage in STAGES}
    return {stage for stage in STAGES if before[stage] != after[stage]}


def add_code(text):
    return text + "\n_EDITED = 1\n"


@pytest.mark.parametrize(
    ("module", "stages"),
    [
        ("projection/cpu/rademacher.py", PROJECTED),
        ("gradients/methods.py", {*LOADED, *RETRAINED, "preflight_study"}),
        ("study/checkpoints.py", LOADED),
        ("scoring/scores.py", {"compute_scores", "average_scores", *MEASURED}),
        ("scoring/solve.py", {*SOLVED, "average_scores", *MEASURED}),
        ("scoring/exact.py", {"compute_exact_scores"}),
        ("trust/rivals.py", {"evaluate_scores"}),
        ("stages/draw_influences.py", {"draw_influences"}),
        (
            "study/study.py",
            {
                *LOADED,
                *RETRAINED,
                *("train_checkpoint", "preflight_study", "draw_influences", "write_report"),
            },
        ),
        ("report/render.py", {"write_report"}),
        ("report/samples.py", {"write_report", "draw_influences"}),
        ("system/dispatch.py", set()),
        ("errors.py", set(STAGES)),
        ("__init__.py", set(STAGES)),
    ],
)
def test_an_edit_changes_the_stages_whose_imports_reach_it(copy, module, stages):
    assert changed(copy, module, add_code) == stages


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text + "\n# a comment\n",
        lambda text: text.replace('"""', '"""Another docstring. ', 1),
        lambda text: re.sub(r'""".*?"""', '""""""', text, count=1, flags=re.DOTALL),
        lambda text: text.replace("\n\n\n", "\n\n\n\n"),
    ],
)
def test_comments_layout_and_docstrings_do_not_count(copy, edit):
    assert changed(copy, "artifacts/_write.py", edit) == set()


# Each stage in a process of its own, which finds other packages imported.
IMPORT_EACH = """
import importlib, os, sys
import matplotlib.pyplot, numba, pandas, scipy.stats, torch
assert not [name for name in sys.modules if name.startswith("trak_core")]
for stage in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(f"trak_core.stages.{stage}")
        print(*sys.modules, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_closure_holds_every_module_that_importing_runs():
    """The walk over import statements against what Python really imports."""
    run = [sys.executable, "-c", IMPORT_EACH, *STAGES]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert len(out.splitlines()) == len(STAGES)
    for stage, modules in zip(STAGES, out.splitlines(), strict=True):
        real = {name for name in modules.split() if name.split(".")[0] == "trak_core"}
        assert f"trak_core.stages.{stage}" in real
        name = ("trak_core", "stages", stage)
        walked = {".".join(n) for n in provenance._closure(name, PACKAGE.parent, "trak_core")}
        assert real <= walked, stage


@pytest.mark.parametrize("name", ["trak_core.no_such", "pytest", "stages"])
def test_unknown_module(name):
    with pytest.raises(ModuleNotFoundError, match=name):
        code_digest(name)


def test_packages_installed_beside_it_are_not_followed(copy):
    before = code_digest("trak_core.stages.compute_features")
    for package in ("numpy", "torch", "trak_core_plugin"):
        (copy.parent / package).mkdir()
        (copy.parent / package / "__init__.py").write_text("this is no Python\n")
    assert code_digest("trak_core.stages.compute_features") == before


def test_templates_and_styles_count_for_the_package_they_lie_in(copy):
    package = copy / "made_up"
    for folder in ("templates/deep", "inner/templates"):
        (package / folder).mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pages.py").write_text("from trak_core.errors import InputError\n")
    (package / "inner/__init__.py").write_text("")
    modules = [f"trak_core.{name}" for name in ("made_up.pages", "made_up.inner", "errors")]
    digests = [[code_digest(module) for module in modules]]
    for name in ("style.css", "templates/deep/page.html.j2", "inner/templates/a.j2", "notes.txt"):
        for text in (b"a\n", b"b\n"):
            (package / name).write_bytes(text)
            digests.append([code_digest(module) for module in modules])
    changed = [
        [old != new for old, new in zip(before, after, strict=True)]
        for before, after in itertools.pairwise(digests)
    ]
    # Importing a package within runs the one around it; the other way round it does not.
    around, within, neither = [True, True, False], [False, True, False], [False] * 3
    assert changed == [*[around] * 4, *[within] * 2, *[neither] * 2]


def test_an_expression_of_many_terms(tmp_path):
    study = tmp_path / "study.py"
    study.write_text("a = 1\nb = " + "a + " * 2000 + "a\n")
    before = study_digest(study)
    study.write_text("a = 1\nb = " + "a + " * 1999 + "a - a\n")
    assert study_digest(study) != before


def test_an_expression_that_python_cannot_read_is_refused_by_its_file(tmp_path):
    study = tmp_path / "study.py"
    study.write_text("b = " + "1 + " * 10**5 + "1\n")
    with pytest.raises(InputError, match=r"study\.py: Python must be able to read the code"):
        study_digest(study)


def test_digests_are_those_of_every_version_of_python(tmp_path):
    """Found once; a version that reads code in another way would train everything again."""
    study = tmp_path / "study.py"
    study.write_text(
        '"""A study."""\n\nimport a.b as c\nfrom . import d\n\n\n@c\nclass E(d, f=1):\n'
        '    """Described."""\n\n    def g(self, h: int = 2, *i, j, **k) -> None:\n'
        '        """Described."""\n'
        '        return [f"{h!r:>{j}} \u20ac \U0001fae9" for l in i if l]\n\n'
        '    async def m(self):\n        """Described."""\n        await (lambda: ...)\n\n\n'
        'match E:\n    case [1.5, *_] | {"n": None}:\n        x: bytes = b"o"\n'
    )
    assert study_digest(study) == "4f2578292685d8f4"


def test_study_digest_follows_modules_beside_the_study(tmp_path):
    study, beside = tmp_path / "study.py", tmp_path / "layers.py"
    study.write_text("from layers import Block\nimport torch\n")
    beside.write_text("class Block: pass\n")
    before = study_digest(study)
    beside.write_text("class Block: size = 3\n")
    assert study_digest(study) != before
    study.write_text("# a comment\nfrom layers import Block\nimport torch\n")
    beside.write_text("class Block: pass\n")
    assert study_digest(study) == before


def test_data_files_count_by_name_and_content(tmp_path):
    study = tmp_path / "study.py"
    study.write_text("a = 1\n")
    of = [study_digest(study, data) for data in ({}, {"a": "1"}, {"b": "1"}, {"a": "2"})]
    assert len(set(of)) == 4
    assert study_digest(study) == of[0]
    one, other = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    assert study_digest(study, one) == study_digest(study, other)


def test_a_study_with_a_dot_in_its_name(tmp_path):
    study = tmp_path / "diab.v2.py"
    study.write_text("a = 1\n")
    before = study_digest(study)
    study.write_text("a = 2\n")
    assert study_digest(study) != before
    (tmp_path / "diab.py").write_text("b = 1\n")
    assert study_digest(tmp_path / "diab.py") not in {before, study_digest(study)}


@pytest.mark.parametrize("name", ["gone.py", "notes.txt", "folder.py"])
def test_a_study_that_is_no_python_file_has_no_digest(tmp_path, name):
    (tmp_path / "notes.txt").write_text("a = 1\n")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(InputError, match=rf"{name}: the study's Python file must exist"):
        study_digest(tmp_path / name)


def test_what_a_study_always_imports_is_imported_ahead(tmp_path):
    study = tmp_path / "study.py"
    (tmp_path / "beside.py").write_text("import numpy as np\n")
    text = "import torch.nn\nfrom sklearn import datasets\nimport beside\n"
    later = "def train():\n    import transformers\n"
    study.write_text(text + later)
    assert study_imports(study) == ["numpy", "sklearn.datasets", "torch.nn"]
    for own in ("import os\nos.environ['A'] = 'b'\n", "import sys\nsys.path[:0] = ['lib']\n"):
        study.write_text(own + text)
        assert study_imports(study) == []


def test_content_digest_goes_by_text_and_order():
    parts = ([1, 2], [2, 1], [12], ["1, 2"], ["1", "2"], [], None)
    assert len({content_digest(part) for part in parts}) == len(parts)
    assert content_digest([1, 2]) == content_digest([1, 2])


def test_signature_notices_an_older_file_and_changes_in_a_folder(tmp_path):
    file = tmp_path / "a.pt"
    file.write_bytes(b"1234")
    before = stat_signature(file)
    os.utime(file, (0, 0))
    assert stat_signature(file) != before
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    before = stat_signature(folder)
    (folder / "weights.bin").write_bytes(b"1")
    assert stat_signature(folder) != before
