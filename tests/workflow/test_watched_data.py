"""Data files that a config names: a byte of one counts like an edit of the study's file."""

import pytest
from own_checkpoints import own_study

TARGET = "results/features/c0/few.h5"


@pytest.fixture
def study(tmp_path):
    study = own_study(tmp_path / "study", 1, data_files=["rows/*.csv"])
    study.path("rows").mkdir()
    study.path("rows/a.csv").write_text("1,2\n")
    return study


def test_one_byte_runs_again_what_an_edit_of_the_study_does(study):
    assert study.run(TARGET) == {"compute_features": 1}
    assert study.run(TARGET, "-n") == {}
    study.path("rows/a.csv").touch()
    assert study.run(TARGET, "-n") == {}
    study.path("rows/a.csv").write_text("1,3\n")
    assert study.run(TARGET, "-n") == {"compute_features": 1}
    study.path("rows/a.csv").write_text("1,2\n")
    file = study.path("diabetes.py")
    before = file.read_text()
    file.write_text(f"{before}\ndef describe(sample):\n    return str(sample)\n")
    assert study.run(TARGET, "-n") == {}
    file.write_text(f"{before}\nNOBODY_SAYS_THIS = 1\n")
    assert study.run(TARGET, "-n") == {"compute_features": 1}
