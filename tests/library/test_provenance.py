import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trak_core import provenance
from trak_core.errors import InputError
from trak_core.provenance import code_digest, ids_digest, stat_signature, study_digest

PACKAGE = Path(provenance.__file__).parent
STAGES = sorted(p.stem for p in (PACKAGE / "stages").glob("*.py") if p.stem != "__init__")

# Distortion, and what stands on the projection beside them.
DIAGNOSED = {"distortion", "sampled", "projecting"}
# What the evaluation does with scores, and with models.
MEASURED = {"alternatives", "evaluation", "evaluation_tables", "flipped", "self_influence"}
RETRAINED = {"embeddings", "removals", "retrain"}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    shutil.copytree(PACKAGE, tmp_path / "trak_core")
    monkeypatch.setattr(provenance, "_REPOSITORY", tmp_path)
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
        ("projection/cpu/rademacher.py", {"features", *DIAGNOSED}),
        (
            "gradients/_vmap.py",
            {"features", *DIAGNOSED, *RETRAINED, "gramian", "subject", "check_study", "output"},
        ),
        (
            "study/checkpoints.py",
            {"features", *DIAGNOSED, "embeddings", "gramian", "subject"} - {"projecting"},
        ),
        ("scoring/scores.py", {"scores", "average", *MEASURED}),
        ("scoring/solve.py", {"normal_matrix", "scores", "exact_scores", *MEASURED}),
        ("scoring/exact.py", {"exact_scores"}),
        ("stages/draw_influences.py", {"figure"}),
        (
            "study/study.py",
            {
                "features",
                *(DIAGNOSED - {"projecting"}),
                *RETRAINED,
                "gramian",
                "subject",
                "train",
                "figure",
                "report",
                "check_study",
                "output",
            },
        ),
        ("report/render.py", {"write_report"}),
        ("errors.py", set(STAGES) - {"software", "free_gpu", "timings"}),
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
        lambda text: text.replace("\n\n\n", "\n\n\n\n"),
    ],
)
def test_comments_layout_and_docstrings_do_not_count(copy, edit):
    assert changed(copy, "artifacts/_write.py", edit) == set()


def test_closure_holds_every_module_that_importing_runs():
    """The walk over import statements against what Python really imports."""
    for stage in STAGES:
        code = f"import sys, trak_core.stages.{stage}; print(*sys.modules)"
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        real = {name for name in out if name.split(".")[0] == "trak_core"}
        name = ("trak_core", "stages", stage)
        walked = {".".join(n) for n in provenance._closure(name, PACKAGE.parent)}
        assert real <= walked, stage


def test_unknown_module():
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        code_digest("trak_core.no_such")


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


def test_ids_digest_goes_by_text_and_order():
    assert ids_digest([1, 2]) == ids_digest(["1", "2"])
    assert len({ids_digest(ids) for ids in ([1, 2], [2, 1], [12], ["1, 2"], [])}) == 5


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
