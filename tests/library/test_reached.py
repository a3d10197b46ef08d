"""What of a study counts for which job: exact where it is plain, everything when in doubt."""

import ast

import pytest

from trak_core.provenance import study_digest
from trak_core.reached import reached

STUDY = """
import torch

SIZE = 3
QUESTIONS = ["why", "how"]
print("loaded")

def _few(n):
    return torch.arange(n)

def _asked():
    return QUESTIONS

def make_model():
    return torch.nn.Linear(SIZE, 1)

def train_data():
    return _few(4)

def target_data():
    import mine
    return mine.of(_asked())

def train(seed, data=None):
    return make_model()

def draw(axes, sample):
    axes.text(0, 0, str(sample))
"""
TRAIN = {"make_model", "train_data", "train_ids"}


def kept(text, called=TRAIN):
    body = reached(ast.parse(text), called).body
    return [getattr(s, "name", None) or ast.unparse(s).split("=")[0].strip() for s in body]


def test_what_training_features_are_made_of():
    assert kept(STUDY) == [
        "import torch", "SIZE", "print('loaded')", "_few", "make_model", "train_data"
    ]  # fmt: skip
    assert kept(STUDY, {*TRAIN, "target_data"})[-2:] == ["train_data", "target_data"]
    assert {"QUESTIONS", "_asked"} < set(kept(STUDY, {*TRAIN, "target_data"}))


@pytest.mark.parametrize(
    "more",
    [
        # What runs when the file is loaded may use anything it names, by text too.
        "CHOSEN = target_data",
        "CHOSEN = {'data': 'target_data'}\nprint(CHOSEN)",
        "class Data:\n    def all(self):\n        return target_data()",
        "if SIZE:\n    data = target_data",
        # And a function that counts.
        "def train_ids():\n    return target_data().ids",
        "def train_ids():\n    import this.target_data",
        # A definition that does more than define.
        "@print\ndef target_data():\n    pass",
        "def target_data(of=print()):\n    pass",
        # Code that looks at itself.
        "def train_ids():\n    return globals()['target' + '_data']()",
        "import sys\nsys.modules[__name__]",
        "import importlib\nimportlib.import_module('study')",
        "def train_ids():\n    return make_model.__globals__.values()",
        "def __getattr__(name):\n    return 1",
        "import pickle\ndef train_ids():\n    return pickle.load(open('ids'))",
        "def train_ids():\n    return locate('study:target_data')",
        "def target_data() -> print('x'):\n    pass",
    ],
)
def test_when_in_doubt_it_counts(more):
    text = f"{STUDY}\n{more}"
    assert "target_data" in kept(text)


def test_a_constant_that_only_targets_name_does_not_count(tmp_path):
    study = tmp_path / "study.py"
    (tmp_path / "mine.py").write_text("def of(x):\n    return x\n")
    seen = {}
    for name, text in {
        "as it is": STUDY,
        "questions": STUDY.replace("how", "when"),
        "drawing": STUDY.replace("str(sample)", "repr(sample)"),
        "training": STUDY.replace("return make_model()", "return make_model().train()"),
        "model": STUDY.replace("SIZE = 3", "SIZE = 4"),
    }.items():
        study.write_text(text)
        seen[name] = [
            study_digest(study, called=called)
            for called in (TRAIN, {*TRAIN, "target_data"}, {*TRAIN, "train"}, None)
        ]
    before = seen.pop("as it is")
    changed = {
        name: [a != b for a, b in zip(before, after, strict=True)] for name, after in seen.items()
    }
    assert changed == {
        "questions": [False, True, False, True],
        "drawing": [False, False, False, True],
        "training": [False, False, True, True],
        "model": [True, True, True, True],
    }


def test_modules_beside_a_study_count_where_they_are_imported(tmp_path):
    study, mine = tmp_path / "study.py", tmp_path / "mine.py"
    study.write_text(STUDY)

    def digests(text):
        mine.write_text(text)
        return [study_digest(study, called=c) for c in (TRAIN, {*TRAIN, "target_data"})]

    first, second = digests("x = 1\n"), digests("x = 2\n")
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False]
    # One that imports the study, or may reach it in another way, could call anything; itself too.
    study.write_text(STUDY + "\nimport study as me\n")
    before = study_digest(study, called=TRAIN)
    study.write_text(study.read_text().replace("how", "when"))
    assert study_digest(study, called=TRAIN) != before
    for text in ("import study\n", "import sys\nsys.modules\n"):
        study.write_text(STUDY.replace("import torch", "import torch, mine"))
        mine.write_text(text)
        before = study_digest(study, called=TRAIN)
        study.write_text(study.read_text().replace("how", "when"))
        assert study_digest(study, called=TRAIN) != before
