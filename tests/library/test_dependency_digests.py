import builtins
import importlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from refused import refused

from trak_core import dependency_digests
from trak_core.config.specs_from_config import study_digests
from trak_core.dependency_digests import (
    code_digest,
    content_digest,
    mentions,
    study_digest,
    study_modules,
)
from trak_core.system import files
from trak_core.system.files import CodeDigests

PACKAGE = Path(dependency_digests.__file__).parent
STAGES = sorted(p.stem for p in (PACKAGE / "stages").glob("[a-z]*.py"))
# A package of six modules: two stages, what one of them, both or neither imports.
TOY = {
    "__init__": "",
    "stages/__init__": "",
    "stages/solve": '"""Solve."""\n\n\nfrom trak_core.scores import A\nimport numpy, torch.x\n',
    "stages/draw": "def draw():\n    import trak_core.report.page as page\n",
    "scores": "from .report import B\n",
    "report/__init__": "",
    "report/page": "from trak_core import stages, absent\nfrom . import words\n",
    "report/words": "",
    "alone": "import trak_core.stages.solve\n",
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    folder = tmp_path / "trak_core"
    for name, text in TOY.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(dependency_digests, "_ROOT", tmp_path)
    return folder


def digests(*names):
    return {name: code_digest(f"trak_core.{name}") for name in names}


def changed_by(path, edit):
    """Return the stages whose digests an edit changes."""
    before = digests("stages.solve", "stages.draw")
    path.write_text(edit(path.read_text()))
    return {name[7:] for name, d in digests(*before).items() if d != before[name]}


@pytest.mark.parametrize(
    ("module", "stages"),
    [
        ("stages/solve", {"solve"}),
        ("stages/draw", {"draw"}),
        ("scores", {"solve"}),
        # The package around what is imported runs too.
        ("report/__init__", {"solve", "draw"}),
        ("stages/__init__", {"solve", "draw"}),
        ("__init__", {"solve", "draw"}),
        # Imports inside functions count, and names of modules after `from`.
        ("report/page", {"draw"}),
        ("report/words", {"draw"}),
        ("alone", set()),
    ],
)
def test_an_edit_changes_the_stages_whose_imports_reach_it(toy, module, stages):
    assert changed_by(toy / f"{module}.py", lambda text: text + "\n_EDITED = 1\n") == stages


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text + "\n# a comment\n",
        lambda text: text.replace('"""', '"""Another docstring. ', 1),
        lambda text: text.replace('"""Solve."""', '""""""'),
        lambda text: text.replace("\n\n\n", "\n\n\n\n"),
    ],
)
def test_comments_layout_and_docstrings_do_not_count(toy, edit):
    assert changed_by(toy / "stages/solve.py", edit) == set()


def test_digests_on_record_are_those_of_the_code(toy, tmp_path, monkeypatch):
    """Whatever changed: content, a new module, a template; and nothing is read for nothing."""
    record, stages = (
        tmp_path / "results/code.json",
        ("trak_core.stages.solve", "trak_core.stages.draw"),
    )
    toy.joinpath("report/page.css").write_text("a {}")
    monkeypatch.setattr(files, "CLOCK_NS", 0)

    def on_record():
        kept = CodeDigests(record)
        digests = [kept.of(stage) for stage in stages]
        kept.write()
        assert digests == [code_digest(stage) for stage in stages]
        return digests

    before = on_record()
    with mock.patch.object(files, "code_digest", side_effect=AssertionError("read again")):
        kept = CodeDigests(record)
        assert [kept.of(stage) for stage in stages] == before
        (toy / "stages/__pycache__").mkdir()
        assert CodeDigests(record).of(stages[0]) == before[0]
    (toy / "scores.py").write_text("from .report import C\n")
    assert on_record()[0] != before[0]
    (toy / "absent.py").write_text("now = 1\n")  # which a module names
    after = on_record()
    assert after[1] != before[1]
    (toy / "report/page.css").write_text("b {}")
    assert on_record()[1] != after[1]


def test_closure_holds_every_module_that_importing_runs():
    """The walk over import statements against what Python really imports: all, once."""
    edges = {}

    def ours():
        return {name for name in sys.modules if name.partition(".")[0] == "trak_core"}

    def watched(importer):
        def taking(name, globals=None, locals=None, fromlist=(), *level, **more):
            given = (globals,) if importer is real else (globals, locals, fromlist, *level)
            module = importer(name, *given, **more)
            taken = {name, *(f"{name}.{one}" for one in fromlist or ())}
            above = {one.rsplit(".", n)[0] for one in taken for n in range(one.count(".") + 1)}
            edges.setdefault(sys._getframe(1).f_globals.get("__name__"), set()).update(above)
            return module

        return taking

    real = importlib.import_module

    def reached(name):
        found, todo = set(), {name}
        while todo:
            found |= todo
            todo = set().union(*(edges.get(one, ()) for one in todo)) & everything - found
        return found

    names = [("trak_core", "stages", stage) for stage in STAGES]
    with (
        mock.patch.dict(sys.modules),
        mock.patch("builtins.__import__", watched(builtins.__import__)),
        mock.patch("importlib.import_module", watched(real)),
    ):
        for name in ours():
            del sys.modules[name]
        for name in names:
            real(".".join(name))
        everything, imported = ours(), dict(sys.modules)  # NumPy's can't be imported twice
    sys.modules.update({name: imported[name] for name in imported.keys() - everything})
    found = {name: reached(".".join(name)) for name in names}
    # Nothing was imported in a way that is not watched.
    assert set().union(*found.values()) | {"trak_core", "trak_core.stages"} == everything
    for name, modules in found.items():
        walked = {
            ".".join(n) for n in dependency_digests._closure(name, [PACKAGE.parent], "trak_core")
        }
        assert modules <= walked, name


@pytest.mark.parametrize("name", ["trak_core.no_such", "pytest", "stages"])
def test_unknown_module(toy, name):
    with pytest.raises(ModuleNotFoundError, match=name):
        code_digest(name)


def test_packages_installed_beside_it_are_not_followed(toy):
    before = digests("stages.solve")
    for package in ("numpy", "torch", "trak_core_plugin"):
        (toy.parent / package).mkdir()
        (toy.parent / package / "__init__.py").write_text("this is no Python\n")
    assert digests("stages.solve") == before


def test_templates_and_styles_count_for_the_package_they_lie_in(toy):
    for folder in ("report/templates/deep", "report/inner/templates"):
        (toy / folder).mkdir(parents=True)
    (toy / "report/inner/__init__.py").write_text("")
    seen = [digests("report.words", "report.inner", "stages")]
    for name in ("style.css", "templates/deep/page.html.j2", "inner/templates/a.j2", "notes.txt"):
        for text in (b"a\n", b"b\n"):
            (toy / "report" / name).write_bytes(text)
            seen.append(digests("report.words", "report.inner", "stages"))
    counts = [[old[m] != new[m] for m in old] for old, new in itertools.pairwise(seen)]
    # Importing a package within runs the one around it; the other way round it does not.
    around, within, neither = [True, True, False], [False, True, False], [False] * 3
    assert counts == [*[around] * 4, *[within] * 2, *[neither] * 2]


def test_an_expression_of_many_terms(study):
    study.write_text("a = 1\nb = " + "a + " * 2000 + "a\n")
    before = study_digest(study)
    study.write_text("a = 1\nb = " + "a + " * 1999 + "a - a\n")
    assert study_digest(study) != before
    study.write_text("b = " + "1 + " * 10**5 + "1\n")  # more than Python can read
    with refused("provenance.nesting", study, re.compile(r"\(.*\)")):
        study_digest(study)


def test_digests_are_those_of_every_version_of_python(study):
    """Found once; a version that reads code in another way would train everything again."""
    study.write_text(
        '"""A study."""\n\nimport a.b as c\nfrom . import d\n\n\n@c\nclass E(d, f=1):\n'
        '    """Described."""\n\n    def g(self, h: int = 2, *i, j, **k) -> None:\n'
        '        """Described."""\n'
        '        return [f"{h!r:>{j}} \u20ac \U0001fae9" for l in i if l]\n\n'
        '    async def m(self):\n        """Described."""\n        await (lambda: ...)\n\n\n'
        'match E:\n    case [1.5, *_] | {"n": None}:\n        x: bytes = b"o"\n'
    )
    assert study_digest(study) == "4f2578292685d8f4"


def test_study_digest_follows_modules_beside_the_study(study):
    beside = study.with_name("layers.py")
    study.write_text("from layers import Block\nimport torch\n")
    beside.write_text("class Block: pass\n")
    before = study_digest(study)
    beside.write_text("class Block: size = 3\n")
    assert study_digest(study) != before
    study.write_text("# a comment\nfrom layers import Block\nimport torch\n")
    beside.write_text("class Block: pass\n")
    assert study_digest(study) == before


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
    with refused("provenance.study_file", tmp_path / name):
        study_digest(tmp_path / name)


STUDY = '''"""A study; `target_data` gives patients, `draw` draws one."""

import torch

SIZE = 3


def make_model():
    return torch.nn.Linear(SIZE, 1)


def train_data():
    """As in target_data."""
    return torch.arange(4)


def target_data(n: int = 2, *, like: "torch.Tensor | None" = None) -> torch.Tensor:
    return torch.arange(n)


def target_ids():
    return list(target_data())


def encode(text):
    return describe(text)


def train_columns():
    return {"annotator": ["anna"] * 4}


def draw(axes, sample):
    axes.text(0, 0, describe(sample))


def describe(sample):
    return str(sample)
'''
ALL = {"training", "targets", "texts", "columns", "whole"}
TARGETS, COLUMNS, SHOWN = ALL - {"training"}, {"columns", "whole"}, {"whole"}


def decided(study, old, new):
    """Return what an edit decides, and undo it."""
    text = study.read_text()
    before = study_digests(study)
    assert old in text
    study.write_text(text.replace(old, new))
    after = study_digests(study)
    study.write_text(text)
    assert before.keys() == ALL
    return {name for name in ALL if before[name] != after[name]}


@pytest.fixture
def study(tmp_path):
    (tmp_path / "study.py").write_text(STUDY)
    return tmp_path / "study.py"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("torch.arange(n)", "torch.arange(n + 1)", TARGETS),
        ("n: int = 2", "n: int = 3", TARGETS),
        ("list(target_data())", "[*target_data()]", TARGETS),
        ("def target_ids():\n    return list(target_data())", "", TARGETS),
        ("describe(text)", "describe(text.lower())", TARGETS),
        # Said by encode() alone.
        ("str(sample)", "repr(sample)", TARGETS),
        ("anna", "bert", COLUMNS),
        ("axes.text(0, 0,", "axes.text(0, 1,", SHOWN),
        ("def draw(axes, sample):\n    axes.text(0, 0, describe(sample))", "", SHOWN),
        ("patients", "persons", set()),
        # All else is of training, whoever uses it.
        ("SIZE = 3", "SIZE = 4", ALL),
        ("import torch\n", "import torch\nNOBODY_SAYS_THIS = 1\n", ALL),
        ("torch.arange(4)", "torch.arange(5)", ALL),
        ("def draw(", "def _few(n):\n    return n\n\n\ndef draw(", ALL),
    ],
)
def test_an_edit_of_some_functions_decides_less_than_others(study, old, new, what):
    assert decided(study, old, new) == what


def test_what_describes_a_sample_decides_its_text_and_no_training(study):
    """Words are searched where it is asked for: a drawing says nothing of them."""
    study.write_text(STUDY.replace("describe(text)", "text"))
    assert decided(study, "str(sample)", "repr(sample)") == {"texts", "whole"}


@pytest.mark.parametrize(
    "more",
    [
        # Code elsewhere that says the name, in a text too.
        "CHOSEN = target_data",
        "CHOSEN = {'data': 'study:target_data'}",
        "class Data:\n    def all(self):\n        return target_data()",
        "class Data:\n    def target_data(self):\n        pass",
        "if SIZE:\n    data = torch.target_data",
        "def train_ids():\n    return target_data().ids",
        "def train_ids():\n    import this.target_data",
        "def train_ids():\n    global target_data",
        "def train_ids():\n    return run(target_data=1)",
        "def train_ids():\n    return f'{SIZE}\\ntarget_data'",
        # By a function that counts because it is said itself.
        "def train_ids():\n    return target_ids()",
        # A definition that does more than define.
        "@print\ndef target_data():\n    pass",
        "def target_data(of=print()):\n    pass",
        "def target_data(of=SIZE):\n    pass",
        "def target_data(*, of=[]):\n    pass",
        "def target_data() -> print('x'):\n    pass",
        "async def target_data():\n    pass",
        # Code that looks at itself.
        "def train_ids():\n    return globals()['target' + '_data']()",
        "import sys\nsys.modules[__name__]",
        "import importlib\nimportlib.import_module('st' + 'udy')",
        "def train_ids():\n    return make_model.__globals__.values()",
        "def __getattr__(name):\n    return 1",
        "def train_ids():\n    import gc\n    return gc.get_objects()[0]()",
        "import importlib.util as u\nu.find_spec('st' + 'udy').loader.exec_module(torch)",
        "import yaml\ndef train_ids():\n    return yaml.load(open('ids'), yaml.Loader)",
        "import yaml\ndef train_ids():\n    return yaml.unsafe_load(open('ids'))",
        "import shelve\ndef train_ids():\n    return shelve.open('ids')['a']()",
        "import pickle\ndef train_ids():\n    return pickle.load(open('ids'))",
        "def train_ids():\n    return locate('study:target_' + 'data')",
        "import study as me",
        "from study import *",
    ],
)
def test_when_in_doubt_it_decides_everything(study, more):
    study.write_text(f"{STUDY}\n\n{more}\n")
    assert decided(study, "torch.arange(n)", "torch.arange(n + 1)") == ALL


@pytest.mark.parametrize(
    ("imported", "beside", "may"),
    [
        ("from mine import *", "def class_names():\n    return ['cat']\n", True),
        ("from mine import *", "from other import *\n", True),
        ("from mine import *", "x = 1\n", False),
        ("from other import x as y", "", False),
        ("from other import class_names", "", True),
    ],
)
def test_a_study_may_have_what_a_module_gives_it(study, imported, beside, may):
    study.with_name("mine.py").write_text(beside)
    study.write_text(f"{STUDY}\n\n{imported}\n")
    assert mentions(study, {"class_names"}) == may


@pytest.mark.parametrize(
    ("beside", "what"),
    [
        ("x = 1\n", TARGETS),
        ("def f(study):\n    return study.target_data()\n", ALL),
        ("import sys\n", ALL),
        ("import study\n", ALL),
        ("from . import study\n", ALL),
    ],
)
def test_modules_beside_a_study_are_looked_through(study, beside, what):
    """Where only a function of targets imports one, too: an edit of the module decides all."""
    mine = study.with_name("mine.py")
    mine.write_text(beside)
    study.write_text(STUDY.replace("    return torch.arange(n)", "    import mine\n    return n"))
    assert decided(study, "return n\n", "return n + 1\n") == what
    before = study_digests(study)
    mine.write_text(f"{beside}y = 2\n")
    assert not before.items() & study_digests(study).items()


def test_what_a_study_always_imports_is_imported_ahead(tmp_path):
    study = tmp_path / "study.py"
    (tmp_path / "beside.py").write_text("import numpy as np\n")
    text = "import torch.nn\nfrom sklearn import datasets\nimport beside\n"
    later = "def train():\n    import transformers\n"
    study.write_text(text + later)
    assert dependency_digests.study_imports(study) == ["numpy", "sklearn.datasets", "torch.nn"]
    for own in (
        *("import os\nos.environ['A'] = 'b'\n", "import sys\nsys.path[:0] = ['lib']\n"),
        *("import os\nos.environb[b'A'] = b'b'\n", "import dotenv\ndotenv.load_dotenv()\n"),
    ):
        study.write_text(own + text)
        assert dependency_digests.study_imports(study) == []


def test_content_digest_goes_by_text_and_order():
    parts = ([1, 2], [2, 1], [12], ["1, 2"], ["1", "2"], [], None)
    assert len({content_digest(part) for part in parts}) == len(parts)
    assert content_digest([1, 2]) == content_digest([1, 2])


def test_signature_notices_an_older_file_and_changes_in_a_folder(tmp_path):
    file = tmp_path / "a.pt"
    file.write_bytes(b"1234")
    before = dependency_digests.stat_signature(file)
    os.utime(file, (0, 0))
    assert dependency_digests.stat_signature(file) != before
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    before = dependency_digests.stat_signature(folder)
    (folder / "weights.bin").write_bytes(b"1")
    assert dependency_digests.stat_signature(folder) != before
