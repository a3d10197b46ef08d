"""The examples for other packages run as written: those of training, and that of quanda."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE

import patience
import pytest
from workspace import REPOSITORY


@pytest.mark.parametrize(
    ("name", "needs", "files", "printed"),
    [
        ("hugging_face_trainer", ("accelerate", "datasets"), "trainer-out/checkpoint-*", "  <- "),
        ("lightning_module", ("lightning",), "lightning-out/*/step=*.ckpt", "     1   "),
    ],
)
def test_an_example_prints_what_explains_each_target(name, needs, files, printed, tmp_path):
    missing = [package for package in needs if not find_spec(package)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, which `make test` installs")
    command = [sys.executable, str(REPOSITORY / "examples" / f"{name}.py")]
    run = patience.run(command, 120, cwd=tmp_path, stdout=PIPE, stderr=PIPE, text=True)
    assert run.returncode == 0, run.stderr
    assert len(list(tmp_path.glob(files))) >= 3
    assert sum(printed in line for line in run.stdout.splitlines()) >= 4


# Packages for this test alone: see .ci/quanda.txt.
FOLDER = Path(sys.prefix, "quanda")


@pytest.mark.gate  # Importing quanda takes ten seconds, with all that it wraps.
def test_the_example_of_quanda_prints_what_metrics_say_of_an_attributors_scores(tmp_path):
    if not find_spec("quanda") and not FOLDER.exists():
        pytest.skip(
            "needs quanda, which .ci/run installs by "
            "`.venv/bin/python -m pip install --no-deps --target .venv/quanda -r .ci/quanda.txt`"
        )
    script = REPOSITORY / "tests/support/quanda_contract.py"
    example = REPOSITORY / "examples/quanda_explainer.py"
    folders = [str(FOLDER), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "OMP_NUM_THREADS": "1",  # two cores are shared with other tests
    }
    command = [sys.executable, str(script), str(example)]
    run = patience.run(
        command, 180, cwd=tmp_path, env=environment, stdout=PIPE, stderr=PIPE, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows = re.findall(r"^(\w[\w ]*?)((?: +-?0\.\d\d){4})$", run.stdout, re.MULTILINE)
    rated = {name: [float(rating) for rating in ratings.split()] for name, ratings in rows}
    assert [*rated] == ["random", "similarity", "TRAK", "TrakCore", "TrakCore of 3"]
    mislabelled, same_class, _, lds = rated["TrakCore of 3"]
    assert mislabelled > 0.9
    assert same_class > 0.7 > rated["random"][1]
    assert lds > rated["TrakCore"][3] > rated["TRAK"][3] > rated["random"][3]
