"""Data that would be read as something else without an error: it is refused, or reported."""

import json
import pickle
import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from refusals import preflight
from refused import refused
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from trak_core.config.bind_study_arguments import with_ready_study
from trak_core.data.row_files import read_rows
from trak_core.ready_made.image_folder import image_folder
from trak_core.ready_made.tabular import tabular
from trak_core.settings import TRAIN
from trak_core.study.as_read import lines_as_read, missing_tokens
from trak_core.study.dataset_split import Split, with_label
from trak_core.study.given_data import split_of_data
from trak_core.study.sample_columns import short_columns
from trak_core.study.show_samples import sample_as_html
from trak_core.study.study import Study

NET = "from torch import nn\n\ndef net(n=2):\n    return nn.Linear(2, n)\n"
DATA = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))


@pytest.mark.parametrize("name", ["ID", "Id"])
def test_ids_in_a_field_of_nearly_that_name_are_refused(tmp_path, name):
    """Rows would be numbered from 0, and the targets [5, 6] be others."""
    (tmp_path / "a.jsonl").write_text(json.dumps({name: 5, "text": "x"}))
    with refused("data.near_id", repr(name)):
        read_rows(tmp_path / "a.jsonl").ids()


def test_a_header_with_spaces_is_refused(tmp_path):
    """The field `id` would be missing."""
    (tmp_path / "a.csv").write_text("text, id\nx, 5\n")
    with refused("data.rows", "' id'"):
        read_rows(tmp_path / "a.csv")


def test_true_is_no_id():
    with pytest.raises(ValueError, match="Found True"):
        Split("ab", [0, 1]).take([True])


def test_integers_that_floats_round_stay_distinct():
    columns = short_columns({"user": [2**53 + 1, 2**53, 0.5], "n": [1, 2, 0.5]})
    assert columns["user"].tolist() == [str(2**53 + 1), str(2**53), "0.5"]
    assert columns["n"].tolist() == [1, 2, 0.5]


def test_a_column_that_is_renamed_replaces_no_other():
    columns = short_columns({"own_label": [1], "label": [2]})
    assert columns.to_dict("list") == {"own_label": [1], "own_own_label": [2]}


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_bytes_among_floats_are_refused(kind):
    samples = [(kind([0.5]), 0), (kind([255]), 1)]
    with refused("study.sample_shapes", re.compile(r"float\d\d, torch.int64")):
        Split(samples, [0, 1]).batch(0, 2)


def time_first(samples):
    x, y = zip(*samples, strict=True)
    return torch.stack(x, dim=1), torch.stack(y)


@pytest.mark.parametrize(
    ("settings", "code", "value"),
    [
        # Half of the samples; some twice; the label would be cut off.
        ({"batch_sampler": BatchSampler(range(3), 2, drop_last=False)}, "given_sampler", "range"),
        ({"sampler": RandomSampler(DATA, num_samples=3)}, "given_sampler", "RandomSampler"),
        ({"sampler": RandomSampler(DATA, replacement=True)}, "given_sampler", "RandomSampler"),
        ({"batch_size": None}, "given_sampler", "batch_size=None"),
        ({"collate_fn": time_first}, "given_collate", "torch.Size([2, 1])"),
    ],
)
def test_loaders_whose_samples_are_not_those_of_their_dataset(settings, code, value):
    with refused(f"study.{code}", value):
        split_of_data(DataLoader(DATA, **settings), None)


def test_loaders_of_all_samples():
    batches = BatchSampler(RandomSampler(DATA), 4, drop_last=True)
    for settings in ({"shuffle": True, "batch_size": 4}, {"batch_sampler": batches}):
        samples = split_of_data(DataLoader(DATA, **settings), None).samples
        assert all(torch.equal(samples[i][0], DATA[i][0]) for i in range(6))


def test_rows_of_pandas_are_no_samples():
    """[i] is the sample with the label i."""
    with refused("study.given_data", "Series"):
        split_of_data(pd.Series([(1.0, 0), (2.0, 1)], index=[1, 0]), None)
    table = pd.DataFrame({"a": [1.0, 2, 3], "b": [4.0, 5, 6], "y": [0, 1, 0]})
    inputs, labels = table[["a", "b"]], table["y"]
    with refused("study.given_data", "Found DataFrame", "to_numpy"):
        split_of_data(table, None)
    for data in ((inputs.to_numpy(), labels), (inputs, labels), {"x": inputs, "labels": labels}):
        with refused("study.given_tensors", "Series int64 (3,)", "`.to_numpy()`"):
            split_of_data(data, None)
    split = split_of_data((inputs.to_numpy(), labels.to_numpy()), None)
    assert split.samples[1][0].tolist() == [2, 5]


@pytest.mark.parametrize("kind", [object, str, "datetime64[s]"])
def test_arrays_of_other_things_than_numbers_are_refused(kind):
    labels = np.array(["2020-01-01", "2020-01-02"], kind)
    for data in ((np.ones((2, 3)), labels), {"x": np.ones((2, 3)), "labels": labels}):
        with refused("study.given_tensors", f"ndarray {labels.dtype} (2,)", "texts to numbers"):
            split_of_data(data, None)


def test_masked_values_are_refused():
    """The values under the mask would be used."""
    inputs, labels = np.ma.masked_array(np.ones((2, 3)), [[0] * 3, [0, 0, 1]]), np.arange(2)
    for data in ((inputs, labels), (np.ones((2, 3)), np.ma.masked_equal(labels, 1))):
        with refused("study.given_tensors", "MaskedArray", "`.filled()`"):
            split_of_data(data, None)
        with refused("study.sample_shapes", "some values are masked"):
            Split([*map(list, zip(inputs, labels, strict=True))], [0, 1]).batch(0, 2)
    split_of_data((np.ma.masked_array(np.ones((2, 3))), labels), None)


@pytest.mark.parametrize("kind", [">i8", "<i8", "uint8", "uint16", "uint32", "uint64", "int16"])
def test_integers_of_every_kind_are_read(kind):
    labels = np.array([5, 3, 7], kind)
    inputs = np.ones((3, 2), ">f4")
    for given in (labels, labels[::-1]):
        for data in ((inputs[::-1], given), [*zip(inputs[:, ::-1], given[:, None], strict=True)]):
            x, y = split_of_data(data, None).batch(0, 3)
            assert x.tolist() == inputs.tolist()
            assert y.view(-1).tolist() == given.tolist()
            assert (y == y.long()).all()


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_of_ids_is_refused(kind):
    with refused("study.ids", "`ids`", "Use a list"):
        split_of_data(DATA, kind(range(6)))
    assert split_of_data(DATA, dict.fromkeys(range(5, -1, -1)).keys()).ids == [5, 4, 3, 2, 1, 0]


def test_images(tmp_path, capsys):
    (tmp_path / "net.py").write_text(NET)
    for name in ("cat/1.ppm", "dog/2.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True)
        Image.new("RGB", (2, 2)).save(tmp_path / "images" / name)
    arguments = str(tmp_path / "images"), f"{tmp_path}/net.py:net"
    assert image_folder(*arguments).train_ids() == ["cat/1.ppm", "dog/2.png"]
    assert not capsys.readouterr().err
    # ImageFolder reads hidden images, and no .gif.
    for name in ("cat/.3.png", "cat/3.gif", "cat/3.heic", "4.png", ".DS_Store", "empty/"):
        path = tmp_path / "images" / name
        path.mkdir() if name.endswith("/") else path.touch()
    assert len(image_folder(*arguments).train_ids()) == 2
    told = capsys.readouterr().err
    assert "not read: 4.png, cat/.3.png, cat/3.gif, cat/3.heic. " in told
    assert "do not become classes: empty." in told
    # PIL would make all values above 255 white.
    Image.fromarray(np.full((2, 2), 300, np.uint16)).save(tmp_path / "images/dog/2.png")
    with refused("studies.image_depth", "I;16", "dog/2.png"):
        image_folder(*arguments).train_data()[1]
    frames = [Image.new("L", (2, 2), shade) for shade in (0, 255)]
    frames[0].save(tmp_path / "images/dog/3.tif", save_all=True, append_images=frames[1:])
    with refused("studies.image_frames", 2, "dog/3.tif"):
        image_folder(*arguments).train_data()[2]


def test_pages_show_images_as_in_their_files(tmp_path):
    """The model gets normalized values, from which the colours cannot be restored."""
    (tmp_path / "net.py").write_text(
        NET + "\ndef shifted(image):\n"
        "    import numpy, torch\n"
        "    return 3 - torch.from_numpy(numpy.array(image)).movedim(-1, 0) / 9\n"
    )
    image = Image.new("RGB", (8, 4), (90, 80, 70))
    image.putpixel((0, 0), (100, 100, 100))
    (tmp_path / "images/cat").mkdir(parents=True)
    image.save(tmp_path / "images/cat/1.png")
    arguments = str(tmp_path / "images"), f"{tmp_path}/net.py:net"
    study = image_folder(*arguments, transform=f"{tmp_path}/net.py:shifted")
    asked = study.encode(path=str(tmp_path / "images/cat/1.png"), label="cat")
    copied = pickle.loads(pickle.dumps(asked))
    for sample in (study.train_data()[0], asked, with_label(asked, 0), copied):
        shown = re.search(r'base64,([^"]*)', sample_as_html(sample, "cat/1.png", None))[1]
        with Image.open(BytesIO(b64decode(shown))) as picture:
            pixels = picture.resize((8, 4), Image.Resampling.NEAREST)
        assert pixels.tobytes() == image.tobytes()


def test_folders_of_splits_are_no_classes(tmp_path):
    for name in ("train/cat", "test/cat"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (2, 2)).save(tmp_path / name / "1.png")
    with refused("studies.splits", "test, train"):
        image_folder(str(tmp_path), "net.py:net")


def table_of(folder, rows, **settings):
    (folder / "a.csv").write_text("income,age,y\n" + rows)
    return tabular(str(folder / "a.csv"), "y", "net.py:net", **settings)


def test_points_that_may_separate_thousands_are_told(tmp_path, capsys):
    """25.697 is the number 25697 in many countries."""
    table_of(tmp_path, "25.697,1.5,0\n850,2,1\n")
    assert "in the column income, points are read as decimal points: 25.697 is" in (
        capsys.readouterr().err
    )
    table_of(tmp_path, "25.697,1.250,0\n25.6,2.125,1\n")
    table_of(tmp_path, "0.125,1,0\n1,2,1\n")
    assert not capsys.readouterr().err


def test_asked_numbers_outside_of_the_training_range_are_told(tmp_path, capsys):
    study = table_of(tmp_path, "25000,20,0\n850,70,1\n", scale="standard")
    study.encode(income="850", age="70", y="1")
    assert not capsys.readouterr().err
    study.encode(income="37.636", age="70", y="1")
    assert "income 37.636 is outside of the range" in capsys.readouterr().err


def test_an_input_that_is_listed_twice_is_refused(tmp_path):
    with refused("studies.columns", "income"):
        table_of(tmp_path, "1,2,0\n", columns=["income", "age", "income"])


@pytest.mark.parametrize("scale", [None, "standard"])
def test_pages_show_the_numbers_of_the_table(scale, tmp_path):
    """After scaling, float32 numbers would have lost digits. Without ids, rows have lines."""
    cells = "1684329600,37.636,0\n1684329659,1.10,1\n"
    study = table_of(tmp_path, cells, scale=scale)
    texts = [study.describe(sample) for sample in study.train_data()]
    assert texts == ["line 2: income 1684329600, age 37.636", "line 3: income 1684329659, age 1.10"]
    asked = study.encode(income="7", age="0.50", y="1")
    assert study.describe(with_label(asked, 0)) == "income 7, age 0.50"
    assert "income" in study.describe(tuple(asked))
    (tmp_path / "a.json").write_text('[{"income": 1.10, "y": 0}]')
    study = tabular(str(tmp_path / "a.json"), "y", "net.py:net", scale=scale)
    assert study.describe(study.train_data()[0]) == "row 1: income 1.10"


def test_pages_show_all_digits_of_a_parquet_file(tmp_path):
    """Numbers that fit into float32 are not shown with its shorter digits."""
    pytest.importorskip("pyarrow", reason="with the extra `test`")
    pd.DataFrame({"income": [123456792.0], "y": [0]}).to_parquet(tmp_path / "a.parquet")
    study = tabular(str(tmp_path / "a.parquet"), "y", "net.py:net")
    assert study.describe(study.train_data()[0]) == "row 1: income 123456792.0"


def test_booleans_of_yaml_are_named(tmp_path):
    study = table_of(tmp_path, "1,2,no\n", classes=[False, True])
    with refused("studies.numbers", "YAML reads yes and no as booleans", 'Found {"y": "no"}'):
        study.train_data()[0]


@pytest.mark.parametrize("stray", ["b ", "B"])
def test_a_stray_class_that_changes_the_number_of_outputs_is_named(stray, here):
    for path in ("a/1.png", "a/2.png", "b/1.png", "b/2.png", f"{stray}/3.png"):
        (here / "images" / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (1, 1)).save(here / "images" / path)
    (here / "net.py").write_text(
        "from torch import nn\n\ndef net(n):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3, n))\n"
    )
    torch.save({"1.weight": torch.zeros(2, 3), "1.bias": torch.zeros(2)}, "m.pt")
    given = {"images": "images", "model": "net.py:net"}
    study = with_ready_study({"study": "image_folder", "study_arguments": given})["study"]
    about = {"model_output": "image_classification", "checkpoints": {"m.pt": [None]}}
    classes = f"3 classes, which are the labels in images.* {stray!r} .1., 'a' .2., 'b' "
    with refused("study.checkpoint_keys", re.compile(classes), "(2, 3) for (3, 3)"):
        preflight(Path(study), {TRAIN: None}, **about)


def test_a_table_of_images_without_paths_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("file,class\n1.png,a\n")
    with refused("studies.field", "a.csv, line 2", "the field path", "file, class"):
        image_folder(str(tmp_path / "a.csv"), "net.py:net")


@pytest.mark.parametrize("folders", [("9", "10"), ("a", "B")])
def test_classes_that_timm_orders_otherwise(folders, tmp_path, capsys):
    for name in folders:
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (2, 2)).save(tmp_path / "images" / name / "1.png")
    study = image_folder(str(tmp_path / "images"), "net.py:net")
    assert study.class_names() == [folders[1], folders[0]]
    told = capsys.readouterr().err
    assert f"class 0 is '{folders[1]}'" in told
    assert "as in torchvision's ImageFolder. In timm's ImageDataset, class" in told
    image_folder(str(tmp_path / "images"), "net.py:net", classes=folders)
    assert not capsys.readouterr().err


SYSTEM, END = ["you", "are", "kind", ".", "ask", ":"], "</s>"
WORDS = [*SYSTEM, END, *"abcdefghijklmnop"]


@pytest.fixture
def study():
    module = ModuleType("own")
    module.as_read = lambda sample: " ".join(WORDS[i] for i in sample["input_ids"])
    module.token_texts = lambda sample: [f"{WORDS[i]} " for i in sample["input_ids"]]
    return Study(Path("own.py"), module)


def split_of(*texts):
    samples = [{"input_ids": [WORDS.index(word) for word in text]} for text in texts]
    return Split(samples, [*range(len(texts))])


def trained_texts(n=20, first=SYSTEM, last=(END,)):
    letters = WORDS[-16:]
    return split_of(*([*first, letters[i % 16], letters[-i % 5], *last] for i in range(n)))


def test_first_and_last_tokens_that_training_samples_share(study):
    train, whole = trained_texts(), " ".join([*SYSTEM, ""])
    for asked, differs in (
        ([*SYSTEM, "b", END], {}),
        ([*SYSTEM, "b", "c"], {"end with": f"{END} "}),
        (["b", END], {"begin with": whole}),
        ([*SYSTEM[:3], "b"], {"begin with": whole, "end with": f"{END} "}),
        (SYSTEM[:2], {"begin with": whole, "end with": f"{END} "}),
        (["a", *SYSTEM, END], {"begin with": whole}),
    ):
        assert missing_tokens(study, train, split_of(asked)) == differs
    ends = missing_tokens(study, trained_texts(last=[".", END]), split_of([*SYSTEM, "b"]))
    assert ends == {"end with": f". {END} "}
    line, notice = lines_as_read(study, split_of([*SYSTEM, "b"]), "The first asked sample", train)
    assert line == "The first asked sample, 0, as the model reads it: you are kind . ask : b"
    assert notice.startswith(f"Notice: training samples end with '{END} ', but this sample does")
    assert len(lines_as_read(study, train, "The first training sample", train)) == 1


def test_padding_is_no_part_of_a_format(study):
    padded, masks = trained_texts(), ([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0], [1] * 10)
    for sample in padded.samples:
        sample |= {"input_ids": [9, *sample["input_ids"], 9], "attention_mask": masks[0]}
    asked = split_of([*SYSTEM, "b", "c", END, END])
    asked.samples[0]["attention_mask"] = masks[1]
    assert missing_tokens(study, padded, asked) == {}
    assert [*missing_tokens(study, padded, split_of(["b", END])).values()] == [
        " ".join([*SYSTEM, ""])
    ]


def test_nothing_is_said_without_eight_different_samples_that_agree(study):
    for train in (
        trained_texts(7),
        split_of(*[[*SYSTEM, "b", END]] * 30),
        split_of(*([word, word] for word in WORDS)),
    ):
        assert missing_tokens(study, train, split_of(["b"])) == {}
    assert missing_tokens(study, trained_texts(8), split_of(["b"])).keys() == {
        "begin with",
        "end with",
    }
    own = Study(Path("own.py"), ModuleType("own"))
    assert lines_as_read(own, split_of(["b"]), "The first", trained_texts()) == []
    assert missing_tokens(own, Split([(1, 2)] * 20, [*range(20)]), Split([(1, 2)], [0])) == {}
