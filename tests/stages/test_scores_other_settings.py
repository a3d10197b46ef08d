"""Files made for another config are refused by the stages that read them."""

import pytest
from pipeline import averaged, changed, scores_spec

from trak_core.errors import InputError
from trak_core.provenance import content_digest
from trak_core.stages.compute_scores import compute_scores


@pytest.fixture(scope="module")
def finished(digits):
    """Every file of a small run, and what today's config expects of its features."""
    projection = {"kind": "rademacher", "proj_dim": 33, "seed": 0}
    settings = {"model_output": digits.output, "projection": projection}
    return digits.features(33), scores_spec(digits.models, digits.targets, **settings)


OTHER_CONFIGS = [
    ("projection", {"kind": "exact"}),
    ("projection", {"kind": "rademacher", "proj_dim": 33, "seed": 1}),
    ("projection", {"kind": "sjlt", "proj_dim": 33, "seed": 0}),
    ("projection", {"kind": "rademacher", "proj_dim": 33, "seed": 0, "stripes": 4}),
    ("dtype", "float16"),
    ("study_digest", "another"),
    ("model_output", "regression"),
    ("parameter_patterns", ["8.*"]),
    ("targets_digest", content_digest([1, 2])),
]


@pytest.mark.parametrize(
    ("key", "value"), [*OTHER_CONFIGS, ("checkpoint", "c2"), ("experiment", "other")]
)
def test_features_of_another_config_are_refused(finished, tmp_path, key, value):
    folder, spec = finished
    own = spec.under("c2") if key == "checkpoint" else changed(spec, **{key: value}).under("c1")
    part = "split" if key == "experiment" else key
    with pytest.raises(InputError, match=rf"c1/\w+\.h5.*{part}.*rule compute_features remakes it"):
        compute_scores(
            scores=tmp_path / "out.h5",
            train_path=folder / "features/c1/train.h5",
            targets_path=folder / "features/c1/mine.h5",
            normal_matrix=folder / "normal_matrix/c1.h5",
            spec=own,
            keep="full",
            code="code",
            memory_mb=100,
        )
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *OTHER_CONFIGS,
        ("experiment", "other"),
        ("damping", 1),
        ("weighting", "curvature"),
        ("runs", {"c0": ["c0"], "c1": ["c1"], "c3": ["c3"]}),
        ("norm_power", 0.5),
        ("normalize", True),
    ],
)
def test_scores_of_another_config_are_refused(finished, tmp_path, key, value):
    folder, spec = finished
    rule = "compute_exact_scores" if value == {"kind": "exact"} else "compute_scores"
    paths = [folder / f"scores/mine/c{i}.h5" for i in range(3)]
    message = rf"mine/c\d\.h5.*{key.removesuffix('s')}.*rule {rule} remakes it"
    with pytest.raises(InputError, match=message):
        averaged(tmp_path / "out.h5", paths, changed(spec, **{key: value}))
    assert not (tmp_path / "out.h5").exists()
