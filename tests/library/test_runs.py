"""A config's checkpoints, their runs and their times are read from mappings, tables and folders."""

import json
import re

import pytest
from refused import refused

from trak_core.config.checkpoint_list import (
    Checkpoint,
    checkpoint_table,
    have_several_times,
    mixed_runs,
    runs_of,
    unread_weights,
)
from trak_core.settings import FeaturesSpec, ScoresSpec

MAPPING = {
    "x": {"path": "1.pt", "run": "first", "at": 2},
    "y": {"path": "2.pt", "run": "first", "at": 10},
    "z": {"path": "3.pt", "run": 7, "at": 0.5},
    "w": "4.pt",
}


def test_a_checkpoint_may_name_its_state_dict(tmp_path):
    given = {"path": "1.pt", "run": "r", "at": 3}
    table = checkpoint_table({"a": {**given, "state_dict": "ema.model"}, "b": "1.pt"}, None)
    assert [c.state_dict for c in table.values()] == ["ema.model", None]
    (tmp_path / "c.tsv").write_text(
        "checkpoint\tpath\tstate_dict\trun\tat\na\t1.pt\tema.model\tr\t3\nb\t1.pt\t\t\t\n"
    )
    assert checkpoint_table(str(tmp_path / "c.tsv"), None) == table
    # If the pipeline trains, it is an argument of the training like any other.
    trained = checkpoint_table({"a": {"state_dict": "x"}}, {})["a"]
    assert (trained.state_dict, trained.arguments) == (None, {"state_dict": "x"})
    (tmp_path / "out/checkpoint-5").mkdir(parents=True)
    trainer_checkpoints = checkpoint_table(
        {"t": {"path": str(tmp_path / "out"), "state_dict": "m"}}, None
    )
    assert trainer_checkpoints["t-5"].state_dict == "m"


def test_checkpoints_have_runs_and_times(tmp_path):
    table = checkpoint_table(MAPPING, None)
    assert runs_of(table) == {"7": ["z"], "first": ["x", "y"], "w": ["w"]}
    assert (table["z"].at, table["w"]) == (0.5, Checkpoint("w", path="4.pt"))
    assert have_several_times(table)
    file = tmp_path / "checkpoints.tsv"
    rows = "x\t2\t1.pt\tfirst\ny\t10\t2.pt\tfirst\nz\t0.5\t3.pt\t7\nw\t\t4.pt\t\n"
    file.write_text(f"checkpoint\tat\tpath\trun\n{rows}")
    assert checkpoint_table(str(file), None) == table


@pytest.mark.parametrize(
    ("times", "along"), [([None, None], False), ([5, 5], False), ([5, None], False), ([5, 6], True)]
)
def test_single_checkpoints_are_along_runs_if_their_times_differ(times, along):
    table = {f"c{i}": {"path": f"{i}.pt", "at": at} for i, at in enumerate(times)}
    assert have_several_times(checkpoint_table(table, None)) == along


def test_trainings_write_a_checkpoint_at_each_time():
    table = {"s0": {"seed": 0}, "s1": {"seed": 1, "at": 3}, "s2": {"at": [10, 2.5]}}
    table = checkpoint_table(table, {"epochs": 10, "at": [1, 10]})
    assert list(table) == ["s0-1", "s0-10", "s1-3", "s2-10", "s2-2.5"]
    assert runs_of(table)["s2"] == ["s2-2.5", "s2-10"]
    assert table["s1-3"] == Checkpoint("s1", 3, arguments={"seed": 1})
    assert have_several_times(checkpoint_table({"a": {"at": 3}, "b": {}}, {}))
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
def test_a_trainers_folder_has_a_checkpoint_in_each_folder(tmp_path, state):
    out = trainers(tmp_path, 100, 1000, 200, state=state)
    table = checkpoint_table({"a": str(out), "b": {"path": str(out), "run": "other"}}, None)
    assert runs_of(table)["a"] == ["a-100", "a-200", "a-1000"]
    assert runs_of(table)["other"] == ["b-100", "b-200", "b-1000"]
    assert table["a-200"] == Checkpoint("a", 200, str(out / "checkpoint-200"), is_in_folder=True)
    single = checkpoint_table({"a": str(out / "checkpoint-100")}, None)
    assert single == {"a": Checkpoint("a", path=str(out / "checkpoint-100"))}


@pytest.mark.parametrize("state", ["{", '{"global_step": "x"}', "\xff"])
def test_an_unreadable_state_of_a_trainer_is_named(tmp_path, state):
    out = trainers(tmp_path, 100)
    (out / "checkpoint-100/trainer_state.json").write_bytes(state.encode("latin-1"))
    with refused("config.trainer_state", re.compile(r"checkpoint-100")):
        checkpoint_table({"a": str(out)}, None)


def test_checkpoints_of_another_training_in_a_trainers_folder_are_told_of(tmp_path):
    """A second training in the same folder replaces only some of the first one's checkpoints."""
    out = trainers(tmp_path, 10, 20, 30)
    for step, logs in ((10, [1.5]), (20, [1.5, float("nan")]), (30, [1.5, float("nan"), 0.5])):
        state = {"global_step": step, "log_history": [{"loss": loss} for loss in logs]}
        (out / f"checkpoint-{step}/trainer_state.json").write_text(json.dumps(state))
    assert mixed_runs(checkpoint_table({"a": str(out)}, None)) is None
    state = {"global_step": 20, "log_history": [{"loss": 1.4}, {"loss": 1.0}]}
    (out / "checkpoint-20/trainer_state.json").write_text(json.dumps(state))
    told = mixed_runs(checkpoint_table({"a": str(out)}, None))
    assert told
    assert f"{out}/checkpoint-10 and {out}/checkpoint-20 seem to be from different" in told
    entries = {str(step): str(out / f"checkpoint-{step}") for step in (10, 20)}
    assert mixed_runs(checkpoint_table(entries, None)) is None


def test_weights_beside_a_trainers_checkpoints_are_told_of_if_they_differ(tmp_path):
    out = trainers(tmp_path, 10, 20)
    table = checkpoint_table({"a": str(out)}, None)
    assert unread_weights(table) is None
    for folder, content in ((out / "checkpoint-20", b"last"), (out, b"last")):
        (folder / "model.safetensors").write_bytes(content)
        assert unread_weights(table) is None
    (out / "model.safetensors").write_bytes(b"best")
    assert str(out / "model.safetensors") in (unread_weights(table) or "")


FIRST = {"path": "a.pt", "run": "r", "at": 1}


@pytest.mark.parametrize(
    ("table", "training", "code", "message"),
    [
        ({"a": FIRST, "b": {"path": "b.pt", "run": "r"}}, None, "time", "b: None, a: 1"),
        ({"a": FIRST, "b": {**FIRST, "path": "b.pt"}}, None, "time", "`at`"),
        ({"a": {"path": "a.pt", "at": "late"}}, None, "time", "'late'.*'a'"),
        ({"a": {"path": "a.pt", "at": -1}}, None, "time", "-1"),
        ({"a": {"path": "a.pt", "epoch": 1}}, None, "value", "epoch.*'a'"),
        ({"a": {"run": "r"}}, None, "value", "`path`"),
        ({"a": "a.pt"}, {"epochs": 3}, "value", "`training`"),
        ({"a": {"at": [1, 1.0]}}, {}, "id", "'a-1' twice"),
        ({"a": {"at": [1]}, "a-1": {}}, {}, "id", "'a-1'"),
        ({"a": {"at": [1e300]}}, {}, "id", "file name"),
        ({"a": {"at": []}}, {}, "time", "'a'"),
    ],
)
def test_impossible_checkpoints_are_refused(table, training, code, message):
    with refused(f"config.checkpoint_{code}", re.compile(message)):
        checkpoint_table(table, training)


def test_a_time_for_a_trainers_folder_is_refused(tmp_path):
    table = {"a": {"path": str(trainers(tmp_path, 5)), "at": 3}}
    with refused("config.checkpoint_time", re.compile(r"`at`")):
        checkpoint_table(table, None)


def spec_of(runs):
    outputs = {"model_output": "regression", "parameter_patterns": None, "projection": {}}
    features = FeaturesSpec(**outputs, dtype="float32", study_digest="")
    return ScoresSpec(features=features, damping=2, weighting="plain", runs=runs)


def test_the_first_checkpoints_of_a_curve_are_of_different_runs_and_times():
    spec = spec_of({"a": ["a1", "a2", "a3"], "b": ["b1", "b2", "b3"], "c": ["c1"]})
    assert spec.along_runs == ["a3", "b2", "c1", "a2", "b1", "a1", "b3"]
    assert spec.checkpoints == ["a1", "a2", "a3", "b1", "b2", "b3", "c1"]
    assert spec.ends == ["a3", "b3", "c1"]
    alone = spec_of({"x": ["x"], "y": ["y"]})
    assert alone.along_runs == alone.checkpoints == alone.ends == ["x", "y"]
