"""A label is a class's number or its name, and no label that could be both is read."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from refused import refused

from trak_core.ready_made.image_folder import image_folder
from trak_core.ready_made.language_model import language_model
from trak_core.ready_made.tabular import tabular
from trak_core.ready_made.text_classification import text_classification
from trak_core.study.dataset_split import with_label

NET = "from torch import nn\n\ndef net(n=2):\n    return nn.Linear(2, n)\n"
SUFFIXES = [".csv", ".tsv", ".jsonl"]


@pytest.fixture(autouse=True)
def net(here):
    (here / "net.py").write_text(NET)


def rows_with(labels, suffix, **fields):
    """Write rows with these labels; a table has their texts."""
    name, rows = f"rows{suffix}", [{**fields, "label": label} for label in labels]
    if suffix == ".jsonl":
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        Path(name).write_text(text)
    else:
        pd.DataFrame(rows).to_csv(name, index=False, sep="\t" if suffix == ".tsv" else ",")
    return name


@pytest.fixture
def classifier(tmp_path):
    transformers = pytest.importorskip("transformers", reason="with the extra `test`")
    few_words = pytest.importorskip("few_words")

    def saved(names, **size):
        tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
        config = transformers.GPT2Config(
            vocab_size=20, n_embd=8, n_layer=1, n_head=1, **tokens, **size
        )
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
        config.save_pretrained(tmp_path / "out")
        few_words.tokenizer().save_pretrained(tmp_path / "out")
        return "out"

    return saved


def numbers(study):
    return [int(sample[-1] if isinstance(sample, tuple) else sample["labels"]) for sample in study]


@pytest.mark.parametrize(
    "names",
    [list("12345"), ["1", "0"], ["zero", "2", "one"], ["-", "0"], ["01", "02"], ["1.0", "2.0"]],
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_classes_called_by_the_numbers_of_others_need_to_be_told_apart(classifier, names, suffix):
    """Names were looked up first: 0, 1, 2 of classes "1", "2", "3" were 0, 0, 1."""
    weights, n = classifier(names), len(names)
    by_number = rows_with(range(n), suffix, text="sky")
    with refused("studies.ambiguous_labels", str([*range(n)]), str(names)):
        text_classification(by_number, weights)
    study = text_classification(by_number, weights, classes=[*range(n)])
    assert numbers(study.train_data()) == [*range(n)]
    by_name = rows_with(names, suffix, text="sky")
    assert numbers(text_classification(by_name, weights, classes=names).train_data()) == [*range(n)]


@pytest.mark.parametrize(
    "names", [["no", "yes"], ["0", "1"], ["LABEL_0", "LABEL_1"], ["0.0", "1.0"]]
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_names_that_no_number_is_may_stand_with_numbers(classifier, names, suffix):
    file = rows_with([1, names[1], names[0], 0], suffix, text="sky")
    assert numbers(text_classification(file, classifier(names)).train_data()) == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "label", ["perhaps", "01", "1.0", "-1", "", ["no"], [0, 1], True, 1.0, None]
)
def test_what_is_neither_is_refused(classifier, label):
    file = rows_with([label], ".jsonl", text="sky")
    with refused("studies.label", "rows.jsonl, line 1", "no, yes"):
        text_classification(file, classifier(["no", "yes"])).train_data()[0]


def test_an_empty_text_and_other_classes_than_the_models_are_refused(classifier):
    weights = classifier(["no", "yes"])
    with refused("studies.empty_text", "rows.jsonl, line 1"):
        text_classification(rows_with([0], ".jsonl", text=" "), weights).train_data()[0]
    with refused("studies.classes", 2, "a, b, c"):
        text_classification(rows_with(["a"], ".jsonl", text="sky"), weights, classes=[*"abc"])


CLASSES = [
    *(["01", "02", "10"], ["1.1", "1.10"], ["FALSE", "TRUE"], ["1000", "1e3"], ["1", "one"]),
    *(["NA", "nan"], ["-1", "1"], ["0.5", "10.0"]),
]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [(["2", "0"], ["0", "1", "2"]), *((names[::-1], names) for names in CLASSES)],
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_classes_of_images_keep_their_names(labels, classes, suffix):
    Image.new("RGB", (2, 2)).save("1.png")
    study = image_folder(rows_with(labels, suffix, path="1.png"), "net.py:net")
    assert study.class_names() == classes
    assert numbers(study.train_data()) == [classes.index(label) for label in labels]


@pytest.mark.parametrize("labels", [["0.0", "10.0", "2.0"], ["1e1", "2.0"], ["", "a"]])
def test_labels_of_images_that_have_no_order_are_refused(labels):
    """Numbers of classes that became floats would stand by the alphabet, and 10.0 before 2.0."""
    Image.new("RGB", (2, 2)).save("1.png")
    with refused("studies.label"):
        image_folder(rows_with(labels, ".csv", path="1.png"), "net.py:net")
    for label in (None, [1], {}):
        with refused("studies.label", "rows.jsonl, line 2"):
            image_folder(rows_with(["a", label], ".jsonl", path="1.png"), "net.py:net")


@pytest.mark.parametrize("said", [{"no": 1, "yes": 0}, {"no": 0}, {"other": 0, "yes": 1}])
def test_a_config_that_says_two_orders_is_refused(classifier, said):
    weights = Path(classifier(["no", "yes"]))
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps({**config, "label2id": said}))
    file = rows_with(["no"], ".csv", text="sky")
    with refused("studies.ambiguous_labels", "no"):
        text_classification(file, str(weights))
    del config["label2id"]
    (weights / "config.json").write_text(json.dumps(config))
    assert numbers(text_classification(file, str(weights)).train_data()) == [0]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_classes_of_a_table_are_compared_as_texts(suffix):
    for labels in (["01", "1"], ["1.10", "1.1"], ["yes", "no"], ["TRUE", "1"]):
        file = rows_with(labels, suffix, a=1, b=2)
        study = tabular(file, "label", "net.py:net", classes=labels[::-1])
        assert numbers(study.train_data()) == [1, 0]
        with refused("studies.numbers", labels[0]):
            tabular(file, "label", "net.py:net", classes=[labels[1], "x"]).train_data()[0]
    with refused("studies.classes", "'01'"):
        tabular(file, "label", "net.py:net", classes=[1.10, 1.1])


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [([1, 2], torch.int64), ([1, 2.5], torch.float32), ([1.0, 2.0], torch.float32)],
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_labels_of_a_table_are_integers_if_all_are(labels, dtype, suffix):
    texts = labels if suffix == ".jsonl" else [str(label) for label in labels]
    samples = tabular(rows_with(texts, suffix, a=1, b="true"), "label", "net.py:net").train_data()
    assert [label.dtype for _, label in samples] == [dtype] * 2
    assert [label.item() for _, label in samples] == labels
    assert samples[0][0].tolist() == [1, 1]


@pytest.mark.parametrize("cell", ["1,234", "1.234,5", "12 kg", "", "nan", "-", "0x1F", "1_000"])
def test_a_cell_that_is_no_number_is_named(cell):
    for fields in ({"a": cell, "b": 2}, {"a": 1, "b": 2}):
        label = 1 if cell in fields.values() else cell
        study = tabular(rows_with([label], ".csv", **fields), "label", "net.py:net")
        with refused("studies.numbers", "rows.csv, line 2", "thousands separators"):
            study.train_data()[0]


def test_pairs_of_texts(classifier, capsys):
    """The second text has segment 1, and pages show both texts as in the file."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    weights = classifier(["no", "yes"])
    names = ["input_ids", "token_type_ids", "attention_mask"]
    made = AutoTokenizer.from_pretrained(weights, sep_token="?", model_input_names=names)
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A ?", pair="$A ? $B:1 ?:1", special_tokens=[("?", 0)]
    )
    made.save_pretrained(weights)
    expected = made("sky is", "blue", padding="max_length", max_length=128)
    assert expected["token_type_ids"][:5] == [0, 0, 0, 1, 1]
    for fields, settings in (
        ({"text": "sky  is", "text_pair": "blue"}, {}),
        ({"a": "sky  is", "b": "blue"}, {"text": "{a}", "text_pair": "{b}"}),
    ):
        study = text_classification(rows_with(["no"], ".jsonl", **fields), weights, **settings)
        for sample in (study.train_data()[0], study.encode(label="no", **fields)):
            assert {name: sample[name].tolist() for name in expected} == dict(expected)
            assert study.describe(with_label(sample, 1)) == "sky  is\nblue"
    assert not capsys.readouterr().err
    rows_with(["no"], ".jsonl", text="sky", text_pair="")
    (sample,) = text_classification("rows.jsonl", weights).train_data()
    assert sample["input_ids"][:4].tolist() == [5, 0, 0, 0]
    text_classification(rows_with(["no"], ".jsonl", a="sky", b="is"), weights, text="{a} ? {b}")
    assert "'{a} ? {b}' is read as one text" in capsys.readouterr().err


def test_texts_are_cut_as_by_the_saved_tokenizer(classifier, capsys):
    from transformers import AutoTokenizer

    weights = classifier(["no", "yes"])
    made = AutoTokenizer.from_pretrained(weights)
    made("sky", truncation=True, max_length=3)
    made.save_pretrained(weights)
    file = rows_with(["no"], ".jsonl", text="sky is blue sky is")
    for max_tokens, length, told in ((None, 3, "texts are cut to 3 tokens"), (4, 4, "")):
        (sample,) = text_classification(file, weights, max_tokens=max_tokens).train_data()
        assert sample["input_ids"].shape == (length,)
        assert told in capsys.readouterr().err
    (sample,) = language_model(file, weights).train_data()
    assert sample["input_ids"].shape == (3,)
    # `model_max_length`, to which tokenizers cut by default, counts if there is no such number.
    for truncation, model_max_length, n_tokens in ((True, 2, 3), (False, 2, 2)):
        made("sky", truncation=truncation, max_length=3)
        made.model_max_length = model_max_length
        made.save_pretrained(weights)
        (sample,) = language_model(file, weights).train_data()
        assert sample["input_ids"].shape == (n_tokens,)
        (sample,) = text_classification(file, weights).train_data()
        assert sample["input_ids"].shape == (n_tokens,)
    assert "texts are cut to 2 tokens" in capsys.readouterr().err
    # A longer length than that of the padding, or than the context, cuts no text.
    made("sky", truncation=True, max_length=512)
    made.save_pretrained(weights)
    (sample,) = text_classification(file, weights).train_data()
    assert sample["input_ids"].shape == (128,)
    weights = classifier(["no", "yes"], n_positions=4)
    made.save_pretrained(weights)
    with refused("studies.context", "4 tokens"):
        language_model(file, weights).train_data()


@pytest.mark.parametrize(
    "about",
    [{"problem_type": name} for name in ("multi_label_classification", "regression")]
    + [{"num_labels": 1}],
)
def test_models_that_do_not_predict_one_class_are_refused(classifier, about):
    weights = classifier(["no", "yes"])
    pytest.importorskip("transformers").GPT2Config(**about).save_pretrained(weights)
    with refused("studies.problem_type", "num_labels"):
        text_classification(rows_with(["no"], ".jsonl", text="sky"), weights)


@pytest.mark.parametrize(("n_words", "positions", "length"), [(130, 512, 128), (40, 32, 32)])
def test_a_text_beyond_the_length_is_not_cut_unasked(classifier, n_words, positions, length):
    weights = classifier(["no", "yes"], n_positions=positions)
    file = rows_with(["no"], ".jsonl", text="sky " * n_words)
    with refused("studies.context", length, n_words, "rows.jsonl, line 1", "max_tokens"):
        text_classification(file, weights).train_data()[0]
    (sample,) = text_classification(file, weights, max_tokens=9).train_data()
    assert sample["input_ids"].shape == (9,)
    (sample,) = text_classification(rows_with(["no"], ".jsonl", text="sky"), weights).train_data()
    assert sample["input_ids"].shape == (length,)
