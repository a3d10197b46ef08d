"""The examples of other packages' training run as written, over the checkpoints that these save."""

import sys
from importlib.util import find_spec
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
