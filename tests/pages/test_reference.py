"""The reference that `make docs` writes: every public name is there, with its docstring."""

import importlib
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys

from workspace import REPOSITORY

import trak_core

LISTED = ("artifacts", "gradients", "gramian", "projection", "compat", "spec")
# Modules without a list of names, which are described whole.
WHOLE = (
    *("scoring.scores", "scoring.solve", "scoring.exact", "study.study", "model_outputs.table"),
    *("evaluation.correlations", "evaluation.distortion", "evaluation.baselines"),
)


def test_modules_have_a_page_and_public_names_their_description(tmp_path):
    command = re.search(r"(-m pdoc .*)", (REPOSITORY / "Makefile").read_text()).group(1)
    arguments = shlex.split(command.replace("build/api", str(tmp_path)))
    subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, check=True)
    names = [module.name for module in pkgutil.iter_modules(trak_core.__path__)]
    public = {name for name in names if not name.startswith("_")} - {"stages"}
    assert len(public) > 10
    assert public - {path.stem for path in (tmp_path / "trak_core").glob("*.html")} == set()
    for name in LISTED + WHOLE:
        module = importlib.import_module(f"trak_core.{name}")
        page = (tmp_path / f"trak_core/{name.replace('.', '/')}.html").read_text()
        values = vars(module)
        if name in LISTED:
            public = [key for key in module.__all__ if not inspect.ismodule(values[key])]
        else:
            own = [k for k, v in values.items() if getattr(v, "__module__", "") == module.__name__]
            public = [key for key in own if not key.startswith("_")]
        assert public, name
        for key in public:
            assert f'id="{key}"' in page, key
            if inspect.isfunction(values[key]) or inspect.isclass(values[key]):
                assert inspect.getdoc(values[key]), key
