"""Files made for another config are refused by the stages that read them."""

import pytest
import torch
from trained_cases import Case

from trak_core.errors import InputError
from trak_core.provenance import ids_digest
from trak_core.stages.average_scores import average_scores
from trak_core.stages.compute_scores import compute_scores


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Every file of a small run, and what today's config expects of its features."""
    folder = tmp_path_factory.mktemp("finished")
    torch.set_num_threads(1)
    case = Case("small_digits", folder)
    case.stages(folder, proj_dim=32)
    return folder, {
        "model_output": case.output,
        "projection": {"kind": "rademacher", "proj_dim": 32, "seed": 0},
        "dtype": "float32",
        "study": "digest",
        "parameter_patterns": None,
        "targets_digest": ids_digest(case.targets),
    }


OTHER_CONFIGS = [
    ("projection", {"kind": "exact"}),
    ("projection", {"kind": "rademacher", "proj_dim": 32, "seed": 1}),
    ("projection", {"kind": "sjlt", "proj_dim": 32, "seed": 0}),
    ("projection", {"kind": "rademacher", "proj_dim": 32, "seed": 0, "stripes": 4}),
    ("dtype", "float16"),
    ("study", "another"),
    ("model_output", "regression"),
    ("parameter_patterns", ["8.*"]),
    ("targets_digest", ids_digest([1, 2])),
    ("checkpoint", "c2"),
]


@pytest.mark.parametrize(("key", "value"), [*OTHER_CONFIGS, ("split", "other")])
def test_features_of_another_config_are_refused(finished, tmp_path, key, value):
    folder, expected = finished
    expected = {**expected, "checkpoint": "c1", "split": "mine", key: value}
    with pytest.raises(InputError, match=rf"c1/\w+\.h5.*{key}.*rule compute_features remakes it"):
        compute_scores(
            scores=tmp_path / "out.h5",
            train=folder / "features/c1/train.h5",
            targets=folder / "features/c1/mine.h5",
            normal_matrix=folder / "normal_matrix/c1.h5",
            expected=expected,
            damping=2,
            weighting="plain",
            keep="full",
            code="code",
            memory_mb=100,
        )
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(pair for pair in OTHER_CONFIGS if pair[0] != "checkpoint"),
        ("experiment", "other"),
        ("damping", 1),
        ("weighting", "curvature"),
        ("checkpoints", ["c0", "c2", "c1"]),
    ],
)
def test_scores_of_another_config_are_refused(finished, tmp_path, key, value):
    folder, expected = finished
    mine = {"experiment": "mine", "damping": 2, "weighting": "plain"}
    expected = {**expected, **mine, "checkpoints": ["c0", "c1", "c2"], key: value}
    rule = "compute_exact_scores" if value == {"kind": "exact"} else "compute_scores"
    found = rf"mine/c\d\.h5.*{key.removesuffix('s')}.*rule {rule} remakes it"
    with pytest.raises(InputError, match=found):
        average_scores(
            scores=tmp_path / "out.h5",
            checkpoint_scores=[folder / f"scores/mine/c{i}.h5" for i in range(3)],
            features=[],
            expected=expected,
            combine="product_of_averages",
            loss_weight_power=1,
            top=3,
            code="code",
            memory_mb=100,
        )
    assert not (tmp_path / "out.h5").exists()
