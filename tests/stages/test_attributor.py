"""An attributor gives the pipeline's scores, for all forms of data and weights."""

import gc
import inspect
import pickle
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from linear_study import with_two_checkpoints
from pipeline import read_scores, run_config
from refused import refused
from torch.utils.data import DataLoader, TensorDataset
from workspace import REPOSITORY

import trak_core
from trak_core import Attributor
from trak_core.artifacts import FEATURES, open_artifact
from trak_core.runtime.progress import notice
from trak_core.study.study import Study

SCHEMA = yaml.safe_load((REPOSITORY / "workflow/schemas/config.schema.yaml").read_text())
# Settings of a config.
SETTINGS = {
    "defaults": {},
    "normal": {"projection": {"kind": "normal", "proj_dim": 7, "seed": 3}},
    "sketch": {
        "projection": {"kind": "tensor_sketch", "proj_dim": 16},
        "features_dtype": "float16",
    },
    "normalized": {"projection": {"proj_dim": 9}, "scoring": {"normalize": True, "damping": 0.3}},
    "some": {"parameters": ["weight"], "scoring": {"combine": "unit_average", "damping": 1}},
    "drawn": {
        "label_draws": 2,
        "projection": {"proj_dim": 5},
        "scoring": {"combine": "unit_average", "damping": 0.3},
    },
    "exact": {"projection": "exact", "scoring": {"weighting": "curvature", "damping": 1}},
    "drawn exact": {"label_draws": 2, "projection": "exact", "scoring": {"damping": 0.3}},
    "along": {
        "checkpoints": {n: {"path": f"{n}.pt", "run": "a", "at": int(n[1])} for n in ("c0", "c1")}
    },
}


def spread_apart(a, b):
    """How far scores are from each other, in units of their spread."""
    return np.abs(np.asarray(a) - np.asarray(b)).max() / np.asarray(b).std()


@pytest.mark.parametrize("name", SETTINGS)
def test_it_gives_the_scores_of_the_pipeline(name, here):
    """Also a run that is opened, and the attributor that the study gives."""
    settings = SETTINGS[name]
    _, checkpoints, targets = with_two_checkpoints(here)
    config = {
        "study": "study.py",
        "model_output": "regression",
        "checkpoints": {name: path.name for name, path in checkpoints.items()},
        "experiments": {"mine": {"targets": targets}},
        "results": "results",
        **settings,
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    expected = read_scores(run_config(here / "config.yaml") / "scores/mine.h5")
    # The same settings as keywords.
    keywords = {k: v for k, v in settings.items() if k not in ("checkpoints", "scoring")}
    if isinstance(keywords.get("projection"), dict):
        keywords |= keywords.pop("projection")
    keywords |= settings.get("scoring", {})
    study = Study.load(Path("study.py"))
    train, targets = study.split("train", None), study.split("targets", expected.columns.tolist())
    given = Attributor(study.make_model, "regression", config["checkpoints"], **keywords)
    scores = given.fit(train, ids=train.ids).score(targets)
    assert scores.frame.index.equals(expected.index)
    assert scores.frame.columns.equals(expected.columns)
    assert spread_apart(scores.frame, expected) < 1e-6
    run = trak_core.open("results")
    assert spread_apart(run.score(targets).frame, expected) < 1e-6
    assert spread_apart(run.scores("mine").frame, expected) == 0
    of_study = Attributor.of_study(study, config).fit()
    assert spread_apart(of_study.score(targets).frame, expected) < 1e-6
    file = run.scores("mine")
    for table, own in ((file.targets, scores.targets), (file.train, scores.train)):
        pd.testing.assert_frame_equal(own, table[own.columns], rtol=1e-4, check_dtype=False)


def test_settings_have_the_defaults_of_the_config():
    """And every key of ``projection`` and ``scoring`` but how files are kept is a keyword."""
    properties = SCHEMA["properties"]
    given = {
        **properties["projection"]["anyOf"][1]["properties"],
        **{
            k: v for k, v in properties["scoring"]["properties"].items() if k not in ("keep", "top")
        },
        **{k: properties["compute"]["properties"][k] for k in ("device", "precision", "memory_mb")},
        **{k: properties[k] for k in ("parameters", "preconditioner", "label_draws")},
        "features_dtype": properties["features_dtype"],
    }
    defaults = {n: p.default for n, p in inspect.signature(Attributor).parameters.items()}
    assert {name: about.get("default") for name, about in given.items()} == {
        name: defaults[name] for name in given
    }
    score = inspect.signature(Attributor.score).parameters
    kept = properties["scoring"]["properties"]
    assert {k: score[k].default for k in ("keep", "top")} == {
        k: kept[k]["default"] for k in ("keep", "top")
    }


def test_data_may_be_tensors_arrays_a_dataset_a_list_or_a_loader(linear):
    train, targets, attributor = linear
    dataset = TensorDataset(*train)

    def collated(rows):
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    kinds = [
        dataset,
        [*dataset],
        tuple(tensor.numpy() for tensor in train),
        {"input": train[0], "labels": train[1]},
        DataLoader(dataset, batch_size=7, shuffle=True, drop_last=True),
        DataLoader(dataset, batch_size=4, collate_fn=collated),
    ]
    expected = attributor().fit(train).score(targets).frame
    for kind in kinds:
        assert attributor().fit(kind).score(targets).frame.equals(expected)


def test_augmented_data_is_refused(linear):
    """Also if most samples are read as before."""
    train, _, attributor = linear
    torch.manual_seed(0)

    class Augmented(TensorDataset):
        def __getitem__(self, index):
            return train[0][index] * (1 - 2 * (torch.rand(()) < 0.1)), 0.0

    for _ in range(20):
        with refused("study.random_samples"):
            attributor().fit(Augmented(*train))


def test_data_that_may_be_read_wrongly_is_refused(linear):
    train, _, attributor = linear
    dataset = TensorDataset(*train)
    sampler = torch.utils.data.SubsetRandomSampler(range(4))
    for data, *expected in (
        (
            (train[0][1:], train[1]),
            "study.given_tensors",
            "torch.Size([30])",
            "torch.Size([29, 3])",
        ),
        ((sample for sample in dataset), "study.given_data", "generator"),
        (DataLoader(dataset, sampler=sampler), "study.given_sampler", "SubsetRandomSampler"),
        ([], "study.given_nothing"),
    ):
        with refused(*expected):
            attributor().fit(data)
    with refused("attribution.not_fitted"):
        attributor().score(train)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("projection", "Exact"), ("proj_dim", "64"), ("seed", 1.5), ("features_dtype", "bf16")),
        *(("damping", "auto"), ("loss_weight_power", "1"), ("combine", ["unit_average"])),
    ],
)
def test_settings_of_a_wrong_type_or_name_are_refused(linear, key, value):
    with refused("attribution.scoring", f"`{key}`", repr(value)):
        linear[2](**{key: value})


def test_a_run_is_opened_by_its_folder(tmp_path):
    (tmp_path / "config.yaml").touch()
    for name in ("nope", "config.yaml"):
        with refused("artifacts.no_results", name):
            trak_core.open(tmp_path / name)


def test_checkpoints_that_are_no_weights_are_refused():
    model = torch.nn.Linear(3, 1)
    for given, kind in (([model], "Linear"), ({"a": model}, "Linear"), ("", "''"), ([""], "''")):
        with refused("attribution.no_checkpoint", kind):
            Attributor(model, "regression", given)


@pytest.mark.parametrize("projection", [None, "exact"])
@pytest.mark.parametrize(
    ("row", "told"), [(0, "one sample"), (1, "8 samples"), (7, "8 samples"), (33, "sample text-33")]
)
def test_a_sample_that_the_model_does_not_take_is_named(row, told, projection):
    """Here one with a token outside of the vocabulary."""
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    tokens, labels = torch.arange(80).view(40, 2) % 9, torch.arange(40) % 3
    wrong, ids = tokens.clone(), [f"text-{i}" for i in range(40)]
    wrong[row, 1] = 9
    own = Attributor(model, "image_classification", projection=projection, batch_size=8)
    found = f"called with {told} of", "IndexError: index out of range"
    with refused("gradients.model_call", *found):
        own.fit((wrong, labels), ids=ids)
    own.fit((tokens, labels))
    with refused("gradients.model_call", *found):
        own.score((wrong, labels), ids=ids)


def test_weights_may_be_paths_or_state_dicts(linear):
    train, targets, attributor = linear
    states = [torch.load(f"c{i}.pt") for i in (0, 1)]
    expected = attributor().fit(train).score(targets).frame
    for given in (
        [Path("c0.pt"), Path("c1.pt")],
        {"c0": states[0], "c1": "c1.pt"},
        {"c0": {"path": states[0]}, "c1": {"path": "c1.pt", "run": "c1"}},
    ):
        assert attributor(given).fit(train).score(targets).frame.equals(expected)
    # Lightning's names of files have signs that are in no id.
    Path("epoch=1-step=60.ckpt").write_bytes(Path("c0.pt").read_bytes())
    assert attributor(["epoch=1-step=60.ckpt"]).checkpoints == ["epoch_1-step_60"]
    # State dicts in a list have ids 0 and 1, and so other projections.
    assert attributor(states).checkpoints == ["0", "1"]
    along = {f"c{i}": {"path": states[i], "run": "a", "at": i} for i in (0, 1)}
    assert attributor(along).settings.combine == "unit_average"
    # The model's own weights. The model does not change.
    model = torch.nn.Linear(3, 1)
    model.load_state_dict(states[0])
    own = Attributor(model, "regression", proj_dim=8).fit(train)
    alone = attributor({"model": states[0]}).fit(train)
    assert own.score(targets).frame.equals(alone.score(targets).frame)
    assert model.training
    with refused("attribution.no_checkpoint", "c9.pt"):
        attributor("c9.pt")
    # Iterators are read once. Training that continues doesn't change a state dict of before.
    assert attributor(map(Path, ["c0.pt", "c1.pt"])).checkpoints == ["c0", "c1"]
    for nothing in ([], {}, Path().glob("c9*.pt")):
        with refused("attribution.no_checkpoint", "none"):
            attributor(nothing)
    before = attributor({"c0": states[0], "c1": "c1.pt"}, parameters="*")
    states[0]["weight"] += 1
    assert before.fit(train).score(targets).frame.equals(expected)
    with refused("model.no_optimizer_path", "c0"):
        attributor({"c0": states[0]}, preconditioner="adam").fit(train)


def test_self_influence_is_the_diagonal(linear):
    train, _, attributor = linear
    fitted = attributor(damping=0.1).fit(train)
    own = np.abs(np.diagonal(fitted.score(train).frame))
    table = fitted.self_influence()
    np.testing.assert_allclose(table["self_influence"], own, rtol=1e-4)


def test_memory_and_batches_change_no_scores(linear):
    """Checkpoints that don't fit into half of the memory are read for each call."""
    train, targets, attributor = linear
    fitted = attributor().fit(train)
    expected = fitted.score(targets).frame
    assert len(fitted._held) == 2
    other = attributor(batch_size=3).fit(train)
    other._setup = replace(other._setup, compute=replace(other._setup.compute, memory_mb=64))
    other._holds = False
    assert spread_apart(other.score(targets).frame, expected) < 1e-6
    assert not other._held
    # A single one stays, and its features are read again for each call.
    single = attributor("c0.pt").fit(train)
    single._holds = False
    again = [single.score(targets).frame for _ in range(2)]
    assert again[0].equals(again[1])
    assert not isinstance(single._held["c0"].features, np.ndarray)


def test_an_output_of_ones_own(linear, capsys):
    train = linear[0]

    def squared(returned, label):
        return -((returned[0] - label) ** 2) / 2

    made = Attributor(torch.nn.Linear(3, 1), squared, ["c0.pt"], proj_dim=8).fit(train)
    with open_artifact(made._features("c0"), FEATURES) as file:
        assert file.spec["model_output"].endswith("squared")
    assert "all loss weights are 1" in capsys.readouterr().out
    with refused("attribution.output", "'squared'"):
        Attributor(torch.nn.Linear(3, 1), "squared")


def test_a_module_is_copied_and_the_same_weights_twice_are_told(linear, capsys):
    train, targets, _ = linear
    model = torch.nn.Linear(3, 1)
    made = Attributor(model, "regression", proj_dim=8)
    expected = Attributor(model, "regression", proj_dim=8).fit(train).score(targets).frame
    with torch.no_grad():
        model.weight.add_(1)
    pd.testing.assert_frame_equal(made.fit(train).score(targets).frame, expected)
    checkpoints = [model.state_dict() for _ in range(2)]
    Attributor(model, "regression", checkpoints, proj_dim=8).fit(train)
    assert "checkpoints 0, 1 have the same weights" in capsys.readouterr().out


def test_names_of_checkpoints_of_one_run_are_told(tmp_path, capsys):
    """Which names these are: library/test_choose_weights.py. Entries with `run` say it already."""
    model = torch.nn.Linear(3, 1)
    paths = [tmp_path / f"net_epoch{at:03}.pth" for at in (5, 10)]
    for path in paths:
        torch.save(model.state_dict(), path)
    runs = {f"c{i}": {"path": path, "run": "a", "at": i} for i, path in enumerate(paths)}
    for checkpoints, is_told in ((paths, True), (runs, False)):
        notice.cache_clear()
        Attributor(model, "regression", checkpoints)
        assert ("net_epoch010.pth differ only" in capsys.readouterr().out) == is_told


def test_samples_that_the_output_is_not_meant_for_are_told(capsys):
    torch.manual_seed(0)
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    logits = torch.nn.Linear(4, 3)
    for last, n in ((torch.nn.Identity(), 0), (torch.nn.Softmax(-1), 1)):
        notice.cache_clear()
        model = torch.nn.Sequential(logits, last)
        Attributor(model, "image_classification", proj_dim=4).fit((x, y))
        assert capsys.readouterr().out.count("These numbers are used as logits") == n
    images, masks = torch.randn(20, 1, 3, 3), torch.randint(2, (20, 3, 3))
    for last, n in ((torch.nn.Identity(), 0), (torch.nn.Softmax(1), 1)):
        notice.cache_clear()
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), last)
        Attributor(model, "segmentation", proj_dim=4).fit((images, masks))
        assert capsys.readouterr().out.count("These numbers are used as logits") == n
    for f, n in ((lambda z, y: z[0], 1), (lambda z, y: -((z[0] - y) ** 2), 0)):
        for labels in (y, torch.zeros(20)):
            notice.cache_clear()
            Attributor(torch.nn.Linear(4, 1), f, proj_dim=4).fit((x, labels))
            told = capsys.readouterr().out.count("be the same with other labels")
            assert told == (n if labels is y else 0)
    embedding = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9))
    tokens = torch.randint(9, (12, 6))
    for labels, n in ((tokens, 0), (tokens.roll(-1, 1), 1), (tokens[:, 1:], 1)):
        if labels.shape != tokens.shape:
            labels = torch.cat([labels, torch.full((12, 1), -100)], dim=1)
        notice.cache_clear()
        Attributor(embedding, "language_modelling", proj_dim=4).fit((tokens, labels))
        assert capsys.readouterr().out.count("labels seem to be shifted") == n


def test_scores_can_be_pickled_or_the_strongest_kept_alone(linear):
    train, targets, attributor = linear
    made = attributor().fit(train)
    scores = made.score(targets)
    again = pickle.loads(pickle.dumps(scores))
    pd.testing.assert_frame_equal(again.frame, scores.frame)
    pd.testing.assert_frame_equal(again.top(3), scores.top(3))
    kept = made.score(targets, keep="top_k", top=3)
    pd.testing.assert_frame_equal(kept.top(3), scores.top(3))
    pd.testing.assert_frame_equal(kept.bottom(3), scores.bottom(3))
    with refused("artifacts.no_matrix", 3):
        kept.frame  # ruff: ignore[useless-expression]
    with refused("attribution.no_tokens", "pickle"):
        made.tokens(again)
    with refused("attribution.no_tokens", "another fit"):
        made.fit(train).tokens(scores)


@pytest.mark.parametrize("projection", [{"proj_dim": 4}, {"projection": "exact"}])
def test_labels_of_any_type_are_read_as_written(linear, projection):
    """Whole numbers, as JSON has them, in a batch before numbers with a fraction."""
    (inputs, _), *_ = linear
    labels = [3, 0, -1] + [i / 8 for i in range(len(inputs) - 3)]
    samples = [*zip(inputs, labels, strict=True)]
    made = Attributor(torch.nn.Linear(inputs.shape[1], 1), "regression", **projection, batch_size=2)
    scores = made.fit(samples).score(samples[:7])
    assert scores.train["label"].tolist() == labels
    assert scores.targets["label"].tolist() == labels[:7]


def test_a_list_that_changes_after_fit_changes_nothing(linear):
    (inputs, labels), targets, _ = linear
    samples = [*zip(inputs, labels, strict=True)]
    shown = {"describe": lambda sample: f"{sample[1].item():.9f}", "proj_dim": 4}
    scores = Attributor(torch.nn.Linear(inputs.shape[1], 1), "regression", **shown)
    scores = scores.fit(samples).score(samples[:3])
    before = scores._repr_html_()
    samples.reverse()
    assert scores._repr_html_() == before
    # With exact scores, samples are differentiated again, so changed tensors are refused.
    exact = Attributor(torch.nn.Linear(inputs.shape[1], 1), "regression", projection="exact")
    exact.fit((inputs, labels))
    inputs[5] += 1
    with refused("attribution.changed_data", "Call `fit` again"):
        exact.score(targets)


def test_after_a_failed_fit_there_is_none(linear):
    train, targets, attributor = linear
    made = attributor().fit(train)
    with refused("gradients.model_call"):
        made.fit((train[0][:, :1], train[1]))
    with refused("attribution.not_fitted"):
        made.score(targets)


def test_memory_for_the_projection_is_known_before_the_work(linear):
    train, _, attributor = linear
    with refused("config.memory", "proj_dim 9000"):
        attributor(proj_dim=9000).fit(train)


def test_texts_by_token_and_in_a_notebook():
    """A GPT-2: tokens add up to scores, and samples show as the texts that ``describe`` returns."""
    lora_models = pytest.importorskip("lora_models", reason="with the extra `test`")
    texts = lora_models.texts(12)
    data = {"input_ids": texts, "labels": texts}
    made = Attributor(
        lora_models.gpt2(),
        "language_modelling",
        proj_dim=32,
        describe=lambda sample: f"<{' '.join(map(str, sample['input_ids'].tolist()))}>",
    ).fit(data)
    scores = made.score({name: values[:2] for name, values in data.items()})
    assert scores.top(1)["train"].tolist() == [0, 1]
    tokens, layers = made.tokens(scores, top=3)
    both = pd.concat([scores.top(3), scores.bottom(3)]).set_index(["target", "train"])["score"]
    for table in (tokens[tokens["side"] == "train"], tokens[tokens["side"] == "target"], layers):
        sums = table.groupby(["target_id", "train_id"])["score"].sum()
        np.testing.assert_allclose(sums.loc[both.index], both, rtol=1e-3, atol=1e-5)
    assert f"&lt;{' '.join(map(str, texts[0].tolist()))}&gt;" in scores._repr_html_()


def test_pictures_show_in_a_notebook():
    torch.manual_seed(0)
    images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 2
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    made = Attributor(model, "image_classification", proj_dim=16).fit((images, labels))
    scores = made.score((images[:3], labels[:3]))
    shown = scores._repr_html_()
    for row in pd.concat([scores.top(3), scores.bottom(3)]).itertuples():
        assert f"<b>{row.train}</b> label {labels[row.train]}, {row.score:+.3g}</div>" in shown
    assert "5 of 6 targets are shown" in made.score((images[:6], labels[:6]))._repr_html_()
    assert shown.count('<img src="data:image/png') >= 9


@pytest.mark.parametrize("projection", ["projected", "exact"])
def test_an_attributor_is_freed_without_the_garbage_collector(projection):
    """Otherwise the memory of a GPU would be in use until a later collection."""
    settings = {"projection": "exact"} if projection == "exact" else {"proj_dim": 4}
    model = torch.nn.Linear(3, 2)
    gc.disable()
    try:
        attributor = Attributor(model, "image_classification", **settings)
        attributor.fit((torch.randn(6, 3), torch.arange(6) % 2))
        attributor.score((torch.randn(2, 3), torch.arange(2)))
        freed = weakref.ref(attributor)
        del attributor
        assert freed() is None
    finally:
        gc.enable()
