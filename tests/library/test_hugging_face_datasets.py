"""Data sets of the package `datasets`, in memory and in the folders that it saves."""

import json
from pathlib import Path

import pytest
import torch
from folders import write
from refused import refused

from trak_core import Attributor
from trak_core.command.init import config_for
from trak_core.data.row_files import read_rows
from trak_core.study.given_data import split_of_data

datasets = pytest.importorskip("datasets", reason="the test extra of pyproject.toml brings it")
datasets.disable_progress_bars()


def of_numbers():
    columns = {"input": [[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]], "labels": [0, 1, 0]}
    return datasets.Dataset.from_dict({**columns, "id": ["a", "b", "c"]})


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_a_data_set_gives_the_scores_of_its_tensors(form):
    """The model takes its input by the name of the column."""
    data = of_numbers()
    attributor = Attributor(torch.nn.Linear(2, 2), "image_classification", projection="exact")
    tensors = {key: torch.tensor(data[key][:]) for key in ("input", "labels")}
    expected = attributor.fit(tensors, ids=["a", "b", "c"]).score(tensors, ids=["a", "b", "c"])
    given = data.with_format(form)
    frame = attributor.fit(given).score(given).frame
    assert frame.equals(expected.frame)
    assert [*frame.index] == [*frame.columns] == ["a", "b", "c"]


def test_rows_keep_the_order_of_the_data_set():
    """A shuffled or selected data set has indices into its table."""
    data = of_numbers()
    for part in (data.shuffle(seed=1), data.select([2, 0]), data.filter(lambda row: row["labels"])):
        split = split_of_data(part, None)
        assert split.ids == [*part["id"]]
        assert [split.samples[i]["input"] for i in range(len(part))] == [*part["input"]]
        assert "id" not in split.samples[0]
        assert split_of_data(part, range(len(part))).ids == [*range(len(part))]
    assert split_of_data(data.remove_columns("id"), None).ids == [0, 1, 2]


def test_data_sets_of_another_kind_are_refused():
    data = of_numbers()
    with refused("study.given_tensors", "Dataset", "DatasetDict"):
        split_of_data(datasets.DatasetDict(train=data, test=data), None)
    with refused("study.given_data", "IterableDataset"):
        split_of_data(data.to_iterable_dataset(), None)
    texts = datasets.Dataset.from_dict({"text": ["a"], "labels": [0]})
    with refused("study.sample_shapes", "str for text"):
        split_of_data(texts, None)


def of_texts(names=("neg", "pos")):
    rows = {"id": [7, 8, 9], "text": ["x", "y", "z"], "label": [1, -1, 0]}
    rows["messages"] = [[{"role": "user", "content": "x"}], None, []]
    features = datasets.Features({
        "id": datasets.Value("int64"),
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=list(names)),
        "messages": [{key: datasets.Value("string") for key in ("role", "content")}],
    })
    return datasets.Dataset.from_dict(rows, features=features)


def test_a_saved_data_set_has_its_rows(tmp_path):
    """Classes have their names; -1, with which hidden labels are written, is no label."""
    of_texts().save_to_disk(tmp_path / "saved")
    rows = read_rows(tmp_path / "saved")
    assert rows.ids() == [7, 8, 9]
    assert rows.column("label") == ["pos", None, "neg"]
    assert rows.column("messages") == [[{"role": "user", "content": "x"}], None, []]
    assert rows.place(1) == f"{tmp_path}/saved, row 2"
    of_texts().select([2, 0]).save_to_disk(tmp_path / "selected")
    assert read_rows(tmp_path / "selected").rows == [rows.rows[2], rows.rows[0]]
    of_texts().with_format("torch", columns=["id"]).save_to_disk(tmp_path / "formatted")
    assert read_rows(tmp_path / "formatted").rows == rows.rows


def test_saved_data_sets_that_are_refused(tmp_path):
    datasets.DatasetDict(train=of_texts(), test=of_texts()).save_to_disk(tmp_path / "both")
    with refused("data.splits", f"{tmp_path}/both/train, {tmp_path}/both/test"):
        read_rows(tmp_path / "both")
    assert read_rows(tmp_path / "both/train").rows == read_rows(tmp_path / "both/test").rows
    of_texts(["1", "2"]).save_to_disk(tmp_path / "numbers")
    with refused("data.class_names", "1, 2"):
        read_rows(tmp_path / "numbers")
    of_texts().select([]).save_to_disk(tmp_path / "empty")
    with refused("data.rows", f"{tmp_path}/empty"):
        read_rows(tmp_path / "empty")
    (tmp_path / "folder").mkdir()
    with refused("data.missing_rows", "folder"):
        read_rows(tmp_path / "folder")


@pytest.mark.usefixtures("here")
def test_trak_init_takes_saved_data_sets():
    datasets.DatasetDict(train=of_texts(), test=of_texts()).save_to_disk("mine/data")
    write({"mine/out/config.json": json.dumps({"architectures": ["GPT2LMHeadModel"]})})
    text, _ = config_for(Path("mine"))
    assert "mine/data/train" in text
    assert "mine/data/test" in text
