"""Which checkpoints a config names, and of which runs they are."""

import json

import pytest

from trak_core.config.checkpoint_list import (
    Checkpoint,
    checkpoint_table,
    come_from_along_runs,
    runs_of,
)
from trak_core.errors import InputError
from trak_core.spec import FeaturesSpec, ScoresSpec


def test_a_study_of_thousands_of_checkpoints():
    table = {f"checkpoint-{i}": f"{i}.pt" for i in range(5000)}
    assert len(checkpoint_table(table, None)) == 5000


def test_paths_are_runs_of_their_own():
    found = checkpoint_table({"b": "b.pt", "a": "a.pt"}, None)
    assert found == {"a": Checkpoint("a", path="a.pt"), "b": Checkpoint("b", path="b.pt")}
    assert not come_from_along_runs(found)


MAPPING = {
    "x": {"path": "1.pt", "run": "first", "at": 2},
    "y": {"path": "2.pt", "run": "first", "at": 10},
    "z": {"path": "3.pt", "run": 7, "at": 0.5},
    "w": "4.pt",
}


def test_a_checkpoint_says_which_state_dict_it_is(tmp_path):
    given = {"path": "1.pt", "run": "r", "at": 3}
    table = {"a": {**given, "state_dict": "ema.model"}, "b": "1.pt", "c": {"path": "1.pt"}}
    found = checkpoint_table(table, None)
    assert [c.state_dict for c in found.values()] == ["ema.model", None, None]
    (tmp_path / "c.tsv").write_text(
        "checkpoint\tpath\tstate_dict\trun\tat\na\t1.pt\tema.model\tr\t3\nb\t1.pt\t\t\t\nc\t1.pt\t\t\t\n"
    )
    assert checkpoint_table(str(tmp_path / "c.tsv"), None) == found
    # Where the pipeline trains, it is an argument of the training like any other.
    trained = checkpoint_table({"a": {"state_dict": "x"}}, {})["a"]
    assert (trained.state_dict, trained.arguments) == (None, {"state_dict": "x"})
    (tmp_path / "out/checkpoint-5").mkdir(parents=True)
    of_trainer = checkpoint_table({"t": {"path": str(tmp_path / "out"), "state_dict": "m"}}, None)
    assert of_trainer["t-5"].state_dict == "m"


def test_checkpoints_say_their_run_and_when(tmp_path):
    found = checkpoint_table(MAPPING, None)
    assert runs_of(found) == {"7": ["z"], "first": ["x", "y"], "w": ["w"]}
    assert (found["z"].at, found["w"].at) == (0.5, None)
    assert come_from_along_runs(found)
    table = tmp_path / "checkpoints.tsv"
    rows = "x\t2\t1.pt\tfirst\ny\t10\t2.pt\tfirst\nz\t0.5\t3.pt\t7\nw\t\t4.pt\t\n"
    table.write_text(f"checkpoint\tat\tpath\trun\n{rows}")
    assert checkpoint_table(str(table), None) == found


@pytest.mark.parametrize(
    ("times", "along"), [([None, None], False), ([5, 5], False), ([5, None], False), ([5, 6], True)]
)
def test_one_checkpoint_of_each_run_is_along_if_times_differ(times, along):
    table = {f"c{i}": {"path": f"{i}.pt", "at": at} for i, at in enumerate(times)}
    assert come_from_along_runs(checkpoint_table(table, None)) == along


def test_an_end_beside_an_earlier_time_is_along():
    assert come_from_along_runs(checkpoint_table({"a": {"at": 3}, "b": {}}, {}))
    assert not come_from_along_runs(checkpoint_table({"a": {}, "b": {}}, {}))


def test_trainings_leave_a_checkpoint_at_each_time():
    table = {"s0": {"seed": 0}, "s1": {"seed": 1, "at": 3}, "s2": {"at": [10, 2.5]}}
    found = checkpoint_table(table, {"epochs": 10, "at": [1, 10]})
    assert list(found) == ["s0-1", "s0-10", "s1-3", "s2-10", "s2-2.5"]
    assert runs_of(found)["s2"] == ["s2-2.5", "s2-10"]
    assert found["s1-3"] == Checkpoint("s1", 3, arguments={"seed": 1})
    ends = checkpoint_table({"s0": {"seed": 0}}, {"epochs": 10})
    assert ends == {"s0": Checkpoint("s0", arguments={"seed": 0})}


def trainers(tmp_path, *steps, state=True):
    for step in steps:
        folder = tmp_path / f"out/checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
        if state:
            (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (tmp_path / "out/runs").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("state", [True, False])
def test_a_trainers_folder_gives_one_checkpoint_a_folder(tmp_path, state):
    out = trainers(tmp_path, 100, 1000, 200, state=state)
    found = checkpoint_table({"a": str(out), "b": {"path": str(out), "run": "other"}}, None)
    assert runs_of(found)["a"] == ["a-100", "a-200", "a-1000"]
    assert runs_of(found)["other"] == ["b-100", "b-200", "b-1000"]
    assert found["a-200"] == Checkpoint("a", 200, str(out / "checkpoint-200"), is_listed=True)
    one = checkpoint_table({"a": str(out / "checkpoint-100")}, None)
    assert one == {"a": Checkpoint("a", path=str(out / "checkpoint-100"))}


@pytest.mark.parametrize("state", ["{", "[]", "{}", '{"global_step": "x"}', "\xff"])
def test_a_trainers_state_that_is_none_is_named(tmp_path, state):
    out = trainers(tmp_path, 100)
    (out / "checkpoint-100/trainer_state.json").write_bytes(state.encode("latin-1"))
    with pytest.raises(InputError, match="checkpoint-100"):
        checkpoint_table({"a": str(out)}, None)


FIRST = {"path": "a.pt", "run": "r", "at": 1}


@pytest.mark.parametrize(
    ("table", "training", "message"),
    [
        (
            {"a": FIRST, "b": {"path": "b.pt", "run": "r"}},
            None,
            "different times `at`.*b: None, a: 1",
        ),
        ({"a": FIRST, "b": {**FIRST, "path": "b.pt"}}, None, "different times `at`"),
        ({"a": {"path": "a.pt", "at": "late"}}, None, r"a number of at least 0.*'late' for .*'a'"),
        ({"a": {"path": "a.pt", "at": True}}, None, "a number of at least 0.*True"),
        ({"a": {"path": "a.pt", "at": -1}}, None, "a number of at least 0.*-1"),
        ({"a": {"path": "a.pt", "epoch": 1}}, None, "with `path` .* Found epoch for .*'a'"),
        ({"a": {"path": "a.pt", 1: 2}}, None, "Found 1 for checkpoint 'a'"),
        ({"a": {"run": "r"}}, None, "with `path` and optionally `run`, `at` and `state_dict`"),
        ({"a": "a.pt"}, {"epochs": 3}, "must be a mapping of training arguments"),
        ({"a": {"at": [1, "2"]}}, {}, "a number of at least 0.*'2'"),
        ({"a": {"at": [1, 1.0]}}, {}, "list each time once. Found 1.0 twice for run 'a'"),
        ({"a": {"at": [1]}, "a-1": {}}, {}, "Found 'a-1' twice"),
        ({"a": {"at": [1e300]}}, {}, "becomes a file name"),
        ({"a": {"at": []}}, {}, "Found an empty list for run 'a'"),
        ({"a": {}}, {"at": []}, "Found an empty list for run 'a'"),
    ],
)
def test_what_cannot_be_meant_is_refused(table, training, message):
    with pytest.raises(InputError, match=message):
        checkpoint_table(table, training)


def test_a_time_for_a_trainers_folder_is_refused(tmp_path):
    table = {"a": {"path": str(trainers(tmp_path, 5)), "at": 3}}
    with pytest.raises(InputError, match="must have no `at`"):
        checkpoint_table(table, None)


def spec_of(runs):
    outputs = {"model_output": "regression", "parameter_patterns": None, "projection": {}}
    features = FeaturesSpec(**outputs, dtype="float32", study_digest="")
    return ScoresSpec(features=features, damping=2, weighting="plain", runs=runs)


def test_the_first_few_come_from_as_many_runs_and_times_as_can_be():
    spec = spec_of({"a": ["a1", "a2", "a3"], "b": ["b1", "b2", "b3"], "c": ["c1"]})
    assert spec.along_runs == ["a3", "b2", "c1", "a2", "b1", "a1", "b3"]
    assert spec.checkpoints == ["a1", "a2", "a3", "b1", "b2", "b3", "c1"]
    assert spec.ends == ["a3", "b3", "c1"]
    alone = spec_of({"x": ["x"], "y": ["y"]})
    assert alone.along_runs == alone.checkpoints == alone.ends == ["x", "y"]
