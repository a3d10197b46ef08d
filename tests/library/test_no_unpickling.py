"""Nothing that the workflow reads can run code: no unpickling, no eval, no shell."""

import ast
import contextlib
import re

import h5py
import pandas as pd
import yaml
from workspace import REPOSITORY

from trak_core.artifacts import SCORES, create, open_artifact
from trak_core.config import read_config as config

SOURCES = [
    path
    for folder in ("trak_core", "workflow", "config")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]
RULES = [REPOSITORY / "workflow/Snakefile", *sorted((REPOSITORY / "workflow/rules").glob("*.smk"))]
# Calls, with keyword arguments: any one of them makes the call safe.
UNSAFE = {
    **dict.fromkeys(
        ("eval", "exec", "compile", "os.system", "os.popen", "np.load", "yaml.load"), ()
    ),
    **dict.fromkeys(("pd.read_hdf", "pd.read_pickle", "torch.jit.load", "yaml.unsafe_load"), ()),
    "yaml.load_all": (),
    "torch.load": (("weights_only", "True"),),
}
MODULES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "tables"}


def problems(path):
    """Yield the line and text of what could run code that a file brings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if MODULES & {name.split(".")[0] for name in names}:
                yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).replace("numpy.", "np.").replace("pandas.", "pd.")
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            unsafe = name in UNSAFE and not given.items() & set(UNSAFE[name])
            if unsafe or {given.get("shell"), given.get("allow_pickle")} - {None, "False"}:
                yield node.lineno, ast.unparse(node)


def test_nothing_runs_what_a_file_brings():
    assert len(SOURCES) > 100
    assert {path: found for path in SOURCES if (found := list(problems(path)))} == {}


def test_rules_have_no_shell():
    pattern = r"\b(shell|run|eval|exec|pickle|system|wrapper)\s*[:(]"
    calls = {path.name: re.findall(pattern, path.read_text()) for path in RULES}
    assert len(calls) > 5
    assert {name: names for name, names in calls.items() if names} == {}


def test_the_loaders_of_configs_are_safe_ones():
    assert issubclass(config._UniqueKeyLoader, yaml.SafeLoader)
    assert issubclass(config._TextKeyLoader, yaml.SafeLoader)


def test_a_pickle_in_a_table_is_not_opened(tmp_path):
    """pandas unpickles attributes of tables as it reads them; jobs read theirs without pandas."""
    path, ran = tmp_path / "a.h5", tmp_path / "ran"
    rows = pd.DataFrame({"id": [1, 2], "label": [3, 4]})
    with create(path, SCORES, {}, {}) as file:
        for key in SCORES.keys:
            file.table(key, rows, ["id"])
    with h5py.File(path, "r+") as file:
        file["targets/table"].attrs["values_block_0_kind"] = f"cos\nmkdir\n(V{ran}\ntR.".encode()
    with open_artifact(path, SCORES) as file:
        pd.testing.assert_frame_equal(file.table("targets"), rows)
    assert not ran.exists()
    # What reading a stranger's file by pandas would risk.
    with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
        pd.read_hdf(path, "targets")
    assert ran.exists()
