"""Stages refuse files of another config."""

import shutil

import pytest
from pipeline import EXACTLY, averaged, changed, scores_spec

from trak_core.dependency_digests import content_digest
from trak_core.errors import InputError
from trak_core.settings import EXACT
from trak_core.stages.compute_scores import compute_exact_scores, compute_scores

RADEMACHER = {"kind": "rademacher", "proj_dim": 16, "seed": 0}
METHODS = {"projected": {"projection": RADEMACHER}, "exact": EXACTLY}


@pytest.fixture(scope="module")
def finished(digits):
    """The files of a small run and its spec, by the scoring method."""

    def run(method):
        spec = scores_spec(
            digits.models, digits.targets, model_output=digits.output, **METHODS[method]
        )
        return digits.features(16 if method == "projected" else None), spec

    return run


def solve(method, scores, folder, own):
    kind = "features" if method == "projected" else "gramian"
    train, mine = (folder / f"{kind}/c1/{split}.h5" for split in ("train", "mine"))
    paths = {"scores": scores, "train_path": train, "targets_path": mine}
    if method == "projected":
        settings = {"normal_matrix": folder / "normal_matrix/c1.h5", "keep": "full"}
        compute_scores(**paths, **settings, spec=own, code="code", memory_mb=100)
    else:
        compute_exact_scores(**paths, spec=own, code="code", memory_mb=100)


OTHER_CONFIGS = [
    *(
        (method, *change)
        for method in METHODS
        for change in (
            ("study_digest", "another"),
            ("parameter_patterns", ["8.*"]),
            ("targets_digest", content_digest([1, 2])),
            ("experiment", "other"),
        )
    ),
    ("exact", "projection", RADEMACHER),
    ("projected", "projection", {"kind": EXACT}),
    ("projected", "projection", RADEMACHER | {"seed": 1}),
    ("projected", "projection", RADEMACHER | {"kind": "normal"}),
    ("projected", "dtype", "float16"),
    ("projected", "model_output", "regression"),
]


@pytest.mark.parametrize(
    ("method", "key", "value"), [*OTHER_CONFIGS, ("projected", "checkpoint", "c2")]
)
def test_features_and_gramians_of_another_config_are_refused(
    finished, tmp_path, method, key, value
):
    folder, spec = finished(method)
    own = spec.under("c2") if key == "checkpoint" else changed(spec, **{key: value}).under("c1")
    part = "split" if key == "experiment" else key
    rule = "compute_features" if method == "projected" else "compute_gramian"
    with pytest.raises(InputError, match=rf"c1/\w+\.h5.*{part}.*rule {rule} remakes it"):
        solve(method, tmp_path / "out.h5", folder, own)
    assert not (tmp_path / "out.h5").exists()


def test_gramians_of_a_checkpoint_that_changed_between_two_jobs_are_refused(
    finished, digits, tmp_path
):
    """Its id is the same. The digests are those of its files, and of a model below an adapter."""
    folder, spec = finished("exact")
    digits.stages(tmp_path, checkpoints={"c1": digits.checkpoints["c2"]})
    shutil.copy(folder / "gramian/c1/train.h5", tmp_path / "gramian/c1")
    with pytest.raises(
        InputError, match=r"c1/mine\.h5.*settings of the gradients.*'checkpoint'.*'sha256'"
    ):
        solve("exact", tmp_path / "out.h5", tmp_path, spec.under("c1"))


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        *OTHER_CONFIGS,
        ("exact", "damping", 1),
        ("projected", "damping", 1),
        ("projected", "weighting", "curvature"),
        ("projected", "runs", {"c0": ["c0"], "c1": ["c1"], "c3": ["c3"]}),
        ("projected", "norm_power", 0.5),
        ("projected", "normalize", True),
    ],
)
def test_scores_of_another_config_are_refused(finished, tmp_path, method, key, value):
    folder, spec = finished(method)
    other = changed(spec, **{key: value})
    exact = other.features.projection["kind"] == EXACT
    rule = "compute_exact_scores" if exact else "compute_scores"
    paths = [folder / f"scores/mine/c{i}.h5" for i in range(3)]
    message = rf"mine/c\d\.h5.*{key.removesuffix('s')}.*rule {rule} remakes it"
    with pytest.raises(InputError, match=message):
        averaged(tmp_path / "out.h5", paths, other)
    assert not (tmp_path / "out.h5").exists()
