"""The specs of all jobs of a config."""

import copy
from dataclasses import fields, replace
from pathlib import Path

import pytest
from pipeline import features_spec
from refused import refused

from trak_core.config import specs_from_config
from trak_core.config.specs_from_config import Specs
from trak_core.dependency_digests import content_digest
from trak_core.settings import (
    Combine,
    FeaturesSpec,
    ScoresSpec,
    parse_spec,
    projection_of,
    removed_sizes,
    subset_size,
    usual_kind,
)

# With the schema's defaults, but for what depends on the model output.
CONFIG = {
    "study": "study.py",
    "data_files": [],
    "results": "results",
    "model_output": "image_classification",
    "training": {"steps": 5},
    "checkpoints": {"c1": {"seed": 1}, "c0": {"seed": 0}},
    "experiments": {"few": {"targets": [3, 1], "shards": 1}, "one": {"targets": [3], "shards": 2}},
    "parameters": "all",
    "preconditioner": "none",
    "features_dtype": "float32",
    "projection": {"kind": "rademacher", "proj_dim": 32, "seed": 0},
    "scoring": {"damping": 2, "normalize": False, "keep": "full", "top": 20},
    "compute": {"shards": 3, "memory_mb": 1000, "device": "cpu", "precision": "highest"},
}
EVALUATION = {
    "subsets": {"count": 60, "seeds": 2, "seed": 7, "fraction": 0.5},
    "baselines": ["random"],
    "sweep": {"damping": [0.5], "loss_weight_power": [1], "proj_dim": [16]},
    "removals": {"experiment": "few", "targets": 2, "n_removed": [4], "baselines": []},
}


@pytest.fixture
def made(here):
    """Make the specs of a changed config.

    Keys of a change may be paths, such as scoring__top; None takes a key away.
    """
    (here / "study.py").write_text("make_model = None\n")

    def specs(**changes):
        config = copy.deepcopy(CONFIG)
        for path, value in changes.items():
            *above, key = path.split("__")
            inner = config
            for name in above:
                inner = inner[name]
            inner[key] = copy.deepcopy(value)
            if value is None:
                del inner[key]
        return Specs(config, Path("results"))

    return specs


def all_specs(specs):
    """Return the spec of every job, by the name of the job."""
    by_job = {
        "features": specs.features("c0", "few"),
        "train": specs.features("c0", "train"),
        "normal_matrix": specs.normal_matrix("c0"),
        "embeddings": specs.embeddings.under("c0"),
        "checkpoint_scores": specs.scores("few").under("c0"),
        "scores": specs.scores("few"),
        "self_influence": specs.self_influence,
    }
    if "subsets" in specs.evaluation:
        by_job["random_subsets"] = specs.random_subsets
    if "removals" in specs.evaluation:
        by_job |= {by: specs.removals_spec(by) for by in ("random", "top")}
    return by_job


def test_a_spec_is_what_its_plain_values_say(made):
    for spec in all_specs(made(evaluation=EVALUATION)).values():
        plain = spec.as_dict()
        assert parse_spec(type(spec), plain).as_dict() == plain
        assert list(plain) == sorted(plain)


@pytest.mark.parametrize("other", ["c0", "c1"])
def test_the_choice_of_a_state_dict_decides_what_its_checkpoint_does_and_averages(made, other):
    paths = {"c0": "a.pt", "c1": {"path": "b.pt", "state_dict": "model"}}
    chosen = paths | {other: {"path": "a.pt", "state_dict": "ema"}}
    before, after = (made(training=None, checkpoints=own) for own in (paths, chosen))
    changed = [name for name, spec in all_specs(after).items() if spec != all_specs(before)[name]]
    assert {"scores", "self_influence"} <= {*changed}
    jobs = [
        lambda specs, name: specs.features(name, "train"),
        lambda specs, name: specs.features(name, "few"),
        lambda specs, name: specs.outputs.under(name),
        lambda specs, name: specs.embeddings.under(name),
        lambda specs, name: specs.normal_matrix(name),
        lambda specs, name: specs.scores("few").under(name),
    ]
    for name in paths:
        for job in jobs:
            plain = [job(specs, name).as_dict() for specs in (before, after)]
            assert (plain[0] != plain[1]) == (name == other)


def test_the_file_of_an_own_output_decides_features_and_what_is_retrained_but_no_training(made):
    Path("beside.py").write_text("scale = 2\n")
    found = []
    measured = {"evaluation": {"subsets": EVALUATION["subsets"], "baselines": []}}
    for text in ("def f(x):\n    return x.sum()\n", "import beside\n\ndef f(x):\n    return 0\n"):
        Path("outputs.py").write_text(text)
        found.append(made(model_output="outputs.py:f", **measured))
    Path("beside.py").write_text("scale = 3\n")
    found.append(made(model_output="outputs.py:f", **measured))
    words = {"function": "outputs.py:f", "unit": "metres"}
    found.append(made(model_output=words, **measured))
    before, after, edited, worded = map(all_specs, found)
    assert {name for name in after if after[name] != before[name]} == set(after) - {"embeddings"}
    assert {name for name in after if after[name] != edited[name]} == set(after) - {"embeddings"}
    assert edited == worded
    assert len({specs.study_digest for specs in found}) == 1
    assert found[2].output_words == {}
    assert found[3].output_words == words
    assert {"outputs.py", "beside.py"} <= {str(path) for path in found[3].files}
    # In the study's own file it counts as the study does.
    Path("study.py").write_text("make_model = None\n\ndef f(x):\n    return x.sum()\n")
    study = made(model_output="study.py:f")
    assert study.study_and_output_digest == study.study_digest
    assert study.all_features.study_digest == study.study_digest


@pytest.mark.parametrize(
    ("question", "beside", "found"),
    [
        ("asked/study.py", "asked/other.py", "study.py and asked/study.py"),
        ("asked/question.py", "asked/common.py", "common.py and asked/common.py"),
    ],
)
def test_two_modules_of_one_name_are_refused(made, question, beside, found):
    Path("study.py").write_text("import common\nmake_model = None\n")
    Path("common.py").write_text("")
    Path("asked").mkdir()
    Path(beside).write_text("")
    Path(question).write_text("import common\ntarget_data = None\n")
    Path("same.py").write_text("import common\ntarget_data = None\n")
    made(experiments__asked={"data": "same.py", "shards": 1})
    made(experiments__asked={"data": "asked/../same.py", "shards": 1})
    with refused("config.module_names", f"Found {found}. Rename one"):
        made(experiments__asked={"data": question, "shards": 1})


def test_what_a_question_imports_beside_the_study_decides_it(made):
    Path("apart").mkdir()
    Path("apart/asked.py").write_text("import mine\ntarget_data = None\n")
    found = []
    for text in ("a = 1\n", "a = 2\n"):
        Path("mine.py").write_text(text)
        specs_from_config._question_digest.cache_clear()
        specs = made(experiments__asked={"data": "apart/asked.py", "shards": 1})
        found.append((specs.targets_digest("asked"), specs.study_digest))
        assert Path("mine.py") in specs.files
    (first, second), (of_training, unchanged) = zip(*found, strict=True)
    assert first != second
    assert of_training == unchanged
    # A job of the question would find the file in its folder, where the study says `import mine`.
    Path("study.py").write_text("def make_model():\n    import mine\n")
    Path("apart/asked.py").write_text("target_data = None\n")
    Path("apart/mine.py").write_text("")
    with refused("config.module_names", "Found mine.py and apart/mine.py. Rename one"):
        made(experiments__asked={"data": "apart/asked.py", "shards": 1})


def test_no_field_of_scores_hides_one_of_features():
    """Both are written into one mapping; targets_digest is the scores' own there."""
    names = [{field.name for field in fields(spec)} for spec in (FeaturesSpec, ScoresSpec)]
    assert names[0] & names[1] == {"targets_digest"}


# What a change decides, of the jobs above.
STORED = {"features", "train", "normal_matrix"}
FEATURES = {"embeddings", *STORED}
AVERAGES = {"scores", "self_influence"}
SCORES = {"checkpoint_scores", *AVERAGES}
RETRAINED = {"random_subsets", "random", "top"}


@pytest.mark.parametrize(
    ("change", "decided"),
    [
        ({"compute__memory_mb": 5}, set()),
        ({"compute__shards": 1}, set()),
        ({"scoring__top": 3}, set()),
        ({"scoring__combine": "average_of_products"}, AVERAGES),
        ({"scoring__combine": "unit_average"}, SCORES | {"normal_matrix"}),
        ({"scoring__loss_weight_power": 1}, AVERAGES),
        ({"scoring__damping": 1}, SCORES),
        ({"scoring__weighting": "curvature"}, SCORES | {"normal_matrix"}),
        ({"scoring__normalize": True}, SCORES | {"normal_matrix"}),
        ({"features_dtype": "int8"}, {*STORED, *SCORES}),
        ({"projection__seed": 1}, {*STORED, *SCORES}),
        ({"parameters": ["fc.*"]}, FEATURES | SCORES),
        ({"experiments__few__targets": [1, 3]}, {"features", "checkpoint_scores", "scores"}),
        ({"checkpoints": {"c0": {"seed": 0}}}, AVERAGES),
        ({"training": {"steps": 6}}, RETRAINED),
        ({"evaluation__subsets__seeds": 3}, {"random_subsets"}),
        ({"evaluation__subsets__count": 9}, set()),
        ({"evaluation__subsets__fraction": 0.9}, {"random_subsets"}),
        ({"evaluation__removals__n_removed": [4, 8]}, {"random", "top"}),
    ],
)
def test_what_a_change_of_the_config_decides(made, change, decided):
    before = all_specs(made(evaluation=EVALUATION))
    after = all_specs(made(**{"evaluation": EVALUATION, **change}))
    assert {job for job in before if before[job].as_dict() != after[job].as_dict()} == decided


@pytest.mark.parametrize(
    ("path", "value", "decided"),
    [
        ("preconditioner", "adam", {*STORED, *SCORES}),
        ("compute__precision", "high", FEATURES | SCORES),
        ("label_draws", 4, {"train", "normal_matrix", *SCORES}),
    ],
)
def test_a_key_is_stored_in_the_specs_that_it_decides(made, path, value, decided):
    """Files of versions without the key stay valid, if its value is the default."""
    own = {"training": None, "checkpoints": {"c0": "c0.pt", "c1": "c1.pt"}}
    before, after = (all_specs(made(**own, **change)) for change in ({}, {path: value}))
    key = path.rpartition("__")[2]
    for name, spec in after.items():
        plain = before[name].as_dict()
        assert key == "preconditioner" or key not in plain
        assert spec.as_dict() == plain | ({key: value} if name in decided else {})


@pytest.mark.parametrize("edited", ["study.py", "data.csv"])
def test_an_edit_of_the_study_or_its_data_decides_everything(made, tmp_path, edited):
    (tmp_path / "data.csv").write_text("1,2\n")
    before = all_specs(made(evaluation=EVALUATION, data_files=["*.csv"]))
    (tmp_path / edited).write_text("make_model = 1\n")
    after = all_specs(made(evaluation=EVALUATION, data_files=["*.csv"]))
    assert {job for job in before if before[job] == after[job]} == set()


def test_the_order_of_a_configs_keys_does_not_count(made):
    turned = {key: dict(reversed(CONFIG[key].items())) for key in ("checkpoints", "projection")}
    plain, other = (
        [repr(spec.as_dict()) for spec in all_specs(specs).values()]
        for specs in (made(), made(**turned))
    )
    assert plain == other


def test_a_checkpoints_spec_knows_nothing_of_the_others(made):
    spec = made().scores("few")
    assert spec.checkpoints == ["c0", "c1"]
    own = spec.under("c1")
    assert (own.runs, own.combine, own.loss_weight_power) == (None, None, None)
    assert own.of_normal_matrix() == made().normal_matrix("c1")
    assert own.features.checkpoint == "c1"
    assert own.of_train() == made().features("c1", "train")
    assert own.of_targets() == made().features("c1", "few")
    assert own.of_targets().targets_digest == content_digest(["3", "1"])


ENDS, ALONG = CONFIG["checkpoints"], {"c": {"seed": 0, "at": [1, 5]}}
PRODUCT, UNIT = {"combine": "product_of_averages"}, {"combine": "unit_average"}
WHOLE = {**UNIT, "weighting": "plain", "loss_weight_power": 1}


@pytest.mark.parametrize(
    ("output", "checkpoints", "given", "combine", "weighting", "power"),
    [
        ("image_classification", ENDS, {}, "product_of_averages", "plain", 0.5),
        ("regression", ENDS, {}, "product_of_averages", "plain", 1),
        ("image_classification", ALONG, {}, "unit_average", "curvature", 0.75),
        ("regression", ALONG, {}, "unit_average", "curvature", 1),
        # No curvature, or one of e^-100.
        ("segmentation", ALONG, {}, "unit_average", "plain", 0.75),
        ("language_modelling", ALONG, {}, "unit_average", "plain", 0.75),
        # What is given decides what is left.
        ("image_classification", ALONG, PRODUCT, "product_of_averages", "plain", 0.5),
        ("image_classification", ENDS, UNIT, "unit_average", "curvature", 0.75),
        ("image_classification", ALONG, WHOLE, *WHOLE.values()),
    ],
)
def test_the_defaults_of_scoring(made, output, checkpoints, given, combine, weighting, power):
    scoring = {**CONFIG["scoring"], **given}
    specs = made(model_output=output, checkpoints=checkpoints, scoring=scoring)
    spec = specs.scores("few")
    assert (spec.combine, spec.weighting, spec.loss_weight_power) == (combine, weighting, power)
    assert spec.norm_power == (power if combine == "unit_average" else None)
    of_curvature = {"plain": None, "curvature": 1 if output == "regression" else power}
    assert spec.curvature_power == of_curvature[weighting]
    for key in WHOLE:
        assert (f"{key} is" in specs.defaults) == (key not in given)


def test_drawn_labels_replace_the_curvature_of_the_default(made):
    along = [made(checkpoints=ALONG, label_draws=n).self_influence.weighting for n in (0, 4)]
    assert along == ["curvature", "plain"]


def test_a_run_is_trained_once_for_all_of_its_times(made):
    specs = made(
        training={"steps": 5, "at": [5]},
        checkpoints={"a": {"seed": 1, "at": [2, 5]}, "b": {"seed": 2}, "c": {"at": [5, 2]}},
    )
    assert specs.training_arguments("a") == {"seed": 1, "steps": 5}
    assert specs.times("c") == [2, 5]
    assert specs.trained_together == [(["-2", "-5"], ["a", "c"]), (["-5"], ["b"])]
    assert specs.training == {"steps": 5}
    assert made().times("c0") is None
    assert made().trained_together == [([""], ["c0", "c1"])]


def test_jobs_of_retraining(made):
    specs = made(evaluation=EVALUATION)
    assert specs.subset_groups()[:2] == [(0, 9), (10, 19)]
    of_scores = {"scores_spec": specs.scores("few").as_dict(), "target_ids": [3, 1]}
    assert specs.removal_jobs == {"top": [of_scores], "random": [{}]}
    assert [*specs.removals] == ["few"]
    assert specs.random_subsets.seed == 7
    assert specs.random_subsets == replace(specs.random_subsets, arguments={"steps": 5})
    removals = {"drop": {"seeds": 2}, "select": {"experiment": "one", "seeds": 2}}
    lists = {"drop": {"experiment": "few"}, "select": {"experiment": "few"}}
    specs = made(evaluation={"removals": removals}, lists=lists)
    assert specs.removals["lists/drop"]["experiment"] == "few"
    assert specs.removals["lists/select"]["experiment"] == "one"
    drop = {"kind": "drop", "fractions": [0.05, 0.1, 0.2]}
    assert specs.removal_jobs["drop"] == [drop | {"draw": draw} for draw in range(2)]
    assert specs.removal_jobs["select"][1]["fractions"] == [0.0125, 0.025, 0.05]
    assert specs.removals_spec("drop").subsets == "list"


@pytest.mark.parametrize(
    ("n", "fraction", "size"), [(31, 0.5, 15), (100, 0.29, 29), (1200, 0.99, 1188), (7, 0.99, 6)]
)
def test_a_part_of_the_samples_is_rounded_down(n, fraction, size):
    assert subset_size(n, fraction) == size


def test_removals_of_parts_take_one_sample_at_least_and_no_size_twice():
    assert removed_sizes([20, 0.05, 0.001, 1, 0.1], 200) == [20, 10, 1]


def test_a_sweep_takes_each_value_with_each_and_the_studys_own(made):
    settings = made(evaluation=EVALUATION).settings
    assert len(settings) == len(set(settings)) == 2 * 2 * 3 * 2
    assert {s.damping for s in settings} == {0.5, 2}
    assert {s.loss_weight_power for s in settings} == {0.5, 1}
    assert {s.proj_dim for s in settings} == {16, 32}
    assert {s.combine for s in settings} == set(Combine)
    assert made().settings == []


def test_what_is_measured(made):
    assert made().measured == []
    specs = made(evaluation=EVALUATION)
    assert specs.measured == ["few", "one"]
    assert specs.measures_features
    assert not specs.measures("embedding_cosine")
    some = made(evaluation={**EVALUATION, "experiments": ["one"], "baselines": []})
    assert some.measured == ["one"]


@pytest.mark.parametrize(
    ("n_params", "proj_dim", "kind"),
    [
        (2**17, 1024, "rademacher"),
        (2**17 + 1, 1024, "hadamard"),
        (2**17, 1023, "rademacher"),
        (2**20, 1000, "tensor_sketch"),
        (2**24, 4096, "hadamard"),
        (2**24 + 1, 4096, "tensor_sketch"),
    ],
)
def test_the_kind_that_a_size_takes(n_params, proj_dim, kind):
    assert usual_kind(n_params, proj_dim) == kind
    spec = features_spec("regression", projection={"proj_dim": proj_dim, "seed": 0})
    shapes = [(n_params // 2, 2), (n_params % 2,), ()][: 2 if n_params % 2 else 1]
    found = projection_of(spec, shapes)
    assert (found.kind, found.n_params) == (kind, n_params)
    assert (found.shapes is not None) == (kind == "tensor_sketch")
    given = replace(spec, projection={**spec.projection, "kind": "normal"})
    assert projection_of(given, shapes).kind == "normal"
