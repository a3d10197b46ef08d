"""Products of float32 numbers have the precision of the config, and an Attributor restores it."""

import inspect
from dataclasses import replace

import pytest
import torch
from linear_study import with_two_checkpoints
from pipeline import EXACTLY, ON_CPU, features_spec
from refused import refused
from torch import backends

from trak_core.artifacts import FEATURES, ArtifactError, open_artifact
from trak_core.artifacts.check_consistency import check_made_for
from trak_core.attribution.device import float32_precision
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_gramian import compute_gramian
from trak_core.stages.compute_outputs import compute_embeddings, compute_outputs

TRAINING = {"model_output": "regression", "proj_dim": 8}
STAGES = {
    compute_features: ("features", features_spec(**TRAINING)),
    compute_outputs: ("outputs", features_spec(**TRAINING, split="all")),
    compute_embeddings: ("embeddings", features_spec(**TRAINING, split="all")),
    compute_gramian: ("gramian", features_spec("regression", **EXACTLY)),
}
# What a user may have set, in torch's older and newer way.
USERS = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "no TF32 in convolutions": lambda: setattr(backends.cudnn, "allow_tf32", False),
    "TF32 in products": lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
    "float32 in convolutions": lambda: setattr(backends.cudnn.conv, "fp32_precision", "ieee"),
}


def state():
    """Return torch's settings. An older one that differs from a newer one is an error."""

    def read(function):
        try:
            return function()
        except RuntimeError as error:
            return str(error)

    older = (
        torch.get_float32_matmul_precision,
        lambda: backends.cudnn.allow_tf32,
        lambda: backends.cuda.matmul.allow_tf32,
    )
    newer = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul
    return [*map(read, older), *(each.fp32_precision for each in newer)]


EXPECTED = {
    "highest": ["highest", False, False, *["ieee"] * 4],
    "high": ["high", True, True, *["tf32"] * 4],
}


@pytest.fixture(params=USERS)
def users(request):
    """Set what a user may have set; return the state."""
    before = [each.fp32_precision for each in (backends.cuda.matmul, backends.mkldnn.matmul)]
    USERS[request.param]()
    yield state()
    torch.set_float32_matmul_precision("highest")
    backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision = before
    backends.cudnn.allow_tf32 = True


@pytest.fixture
def seen():
    """The states in which modules run."""
    states = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda *_: states.append(state())
    )
    yield states
    hook.remove()


@pytest.mark.parametrize("precision", EXPECTED)
def test_products_have_a_precision_and_then_that_of_the_user(users, precision):
    with float32_precision(precision):
        assert state() == EXPECTED[precision]
        with backends.cudnn.flags(enabled=False):  # reads the older settings
            pass
    assert state() == users


@pytest.mark.parametrize("precision", EXPECTED)
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_a_stage_has_the_precision_of_its_spec(stage, precision, seen, tmp_path):
    study, checkpoints, _ = with_two_checkpoints(tmp_path)
    # As training scripts do.
    sets = 'import torch\ntorch.set_float32_matmul_precision("medium")\n'
    study.write_text(sets + study.read_text())
    output, spec = STAGES[stage]
    given = {"checkpoint": checkpoints["c0"], "study_file": study, **ON_CPU}
    given |= {"spec": replace(spec, precision=precision)}
    given |= {output: tmp_path / "made.h5"}
    taken = inspect.signature(stage).parameters
    with float32_precision("highest"):  # A stage sets the precision of its process.
        stage(**{name: value for name, value in given.items() if name in taken})
    assert seen
    assert all(each == EXPECTED[precision] for each in seen)


@pytest.mark.parametrize("precision", EXPECTED)
@pytest.mark.parametrize("projection", [None, "exact"])
def test_an_attributor_leaves_the_precision_of_the_process(linear, seen, precision, projection):
    train, targets, attributor = linear
    before = state()
    own = attributor(precision=precision, projection=projection).fit(train)
    own.score(targets)
    assert seen
    assert all(each == EXPECTED[precision] for each in seen)
    assert state() == before
    with refused("attribution.scoring", "`precision`", "highest, high", "'tf32'"):
        attributor(precision="tf32")


@pytest.mark.parametrize("projection", [None, "exact"])
def test_autocast_of_the_process_changes_no_score(linear, projection):
    train, targets, attributor = linear
    expected = attributor(projection=projection).fit(train).score(targets).frame
    with torch.autocast("cpu", torch.bfloat16):
        own = attributor(projection=projection).fit(train).score(targets).frame
        assert torch.is_autocast_enabled("cpu")
    assert own.equals(expected)


def test_features_of_different_precision_are_not_combined(linear, tmp_path):
    train, _, attributor = linear
    for own, other in (("highest", "high"), ("high", "highest")):
        attributor(precision=own).fit(train, own)
        with refused("attribution.other_folder", "precision"):
            attributor(precision=other).fit(train, own)
    with open_artifact(tmp_path / "highest/features/c0/train.h5", FEATURES) as features:
        assert "precision" not in features.spec  # as in files of earlier versions
    with open_artifact(tmp_path / "high/features/c0/train.h5", FEATURES) as features:
        assert features.spec["precision"] == "high"
        with pytest.raises(ArtifactError, match=r"'precision': None.*'precision': 'high'"):
            check_made_for(features, features_spec("regression", 8))
