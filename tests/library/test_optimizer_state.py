"""Adam's second moments of a checkpoint: whose they are, and features of what they divide."""

import hashlib
from functools import partial

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from pipeline import run_stages
from refused import refused
from stored_weights import save
from torch import nn
from trained_cases import STUDIES

from trak_core.study.optimizer_state import adam_scales
from trak_core.study.study import Study

BETAS, EPS, STEPS = (0.8, 0.9), 1e-3, 3


def gpt2(kind="gpt2"):
    return getattr(pytest.importorskip("texts", reason="needs transformers"), kind)()


llama = partial(gpt2, "llama")


def trainer_checkpoints(model, folder):
    """The Trainer's own groups: with weight decay, and without."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    how = TrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True)
    groups = Trainer(model=model, args=how).create_optimizer().param_groups
    assert len(groups) == 2
    return [{"params": group["params"]} for group in groups]


def by_dimensions(model):
    """Groups as many training loops make them: matrices, and vectors."""
    parameters = list(model.parameters())
    return [{"params": [p for p in parameters if (p.ndim > 1) is big]} for big in (True, False)]


def stepped(model, groups, kind=torch.optim.AdamW):
    """Take steps on made-up gradients, other ones for each parameter."""
    optimizer = kind(groups, lr=1e-3, betas=BETAS, eps=EPS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator) if p.requires_grad else None
        optimizer.step()
    return optimizer


def saved(folder, optimizer):
    """As a Trainer leaves it, beside weights that are not looked at here."""
    folder.mkdir()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder


def digits():
    return Study.load(STUDIES / "small_digits.py").make_model()


def expected(optimizer, parameter, moment="exp_avg_sq", steps=STEPS):
    """What the optimizer itself would divide by, from its own state."""
    corrected = optimizer.state[parameter][moment].double() / (1 - BETAS[1] ** steps)
    return 1 / (corrected.sqrt() + EPS)


def scales(model, names, checkpoint):
    """What a job gets that differentiates parameters of these names."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = {name: p for name, p in model.named_parameters() if name in names}
    found, sha256 = adam_scales(model, parameters, trained, checkpoint)
    file = checkpoint / "optimizer.pt" if checkpoint.is_dir() else checkpoint
    assert sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def all_scales(model, checkpoint):
    return scales(model, [name for name, _ in model.named_parameters()], checkpoint)


def assert_own(model, optimizer, checkpoint, names):
    parameters = dict(model.named_parameters())
    found = scales(model, names, checkpoint)
    assert list(found) == names
    for name, scale in found.items():
        own = expected(optimizer, parameters[name])
        torch.testing.assert_close(scale.double(), own, rtol=1e-6, atol=0)


def named(model, prefix=""):
    """Backwards: names alone tell."""
    return [(prefix + name, p) for name, p in model.named_parameters()][::-1]


GROUPS = {
    "by_dimensions": lambda model, folder: by_dimensions(model),
    "one": lambda model, folder: [{"params": list(model.parameters())}],
    "named": lambda model, folder: named(model),
    "named in parallel": lambda model, folder: named(model, "module."),
    "named within another": lambda model, folder: named(model, "net.a."),
}


@pytest.mark.parametrize(
    ("make", "groups"),
    [
        *((make, trainer_checkpoints) for make in (gpt2, llama)),
        *((digits, groups) for groups in GROUPS.values()),
        *((gpt2, GROUPS["by_dimensions"]), (llama, GROUPS["one"]), (gpt2, GROUPS["named"])),
    ],
)
def test_each_parameter_gets_its_own(tmp_path, make, groups):
    model = make()
    optimizer = stepped(model, groups(model, tmp_path))
    checkpoint = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    assert_own(model, optimizer, checkpoint, [name for name, _ in model.named_parameters()])


def with_the_last_block_trained():
    model = gpt2()
    names = [name for name, _ in model.named_parameters() if ".h.1." in name]
    for name, p in model.named_parameters():
        p.requires_grad_(name in names)
    return model, names


def test_frozen_parameters_have_no_number(tmp_path):
    model, names = with_the_last_block_trained()
    optimizer = stepped(model, trainer_checkpoints(model, tmp_path))
    folder = saved(tmp_path / "checkpoint-3", optimizer)
    assert_own(model, optimizer, folder, names)
    assert_own(model, optimizer, folder, names[2:5])  # a part of what was trained
    # All frozen, as what is loaded for inference: what is asked for is what was trained.
    model.requires_grad_(False)
    assert_own(model, optimizer, folder, names)
    model.requires_grad_(True)
    with refused("study.optimizer_order", "12 parameters in 2 groups", 28, "no match"):
        all_scales(model, folder)


def test_frozen_parameters_that_have_a_number_have_no_moments(tmp_path):
    model, names = with_the_last_block_trained()
    optimizer = stepped(model, [{"params": list(model.parameters())}])
    folder = saved(tmp_path / "checkpoint-3", optimizer)
    assert_own(model, optimizer, folder, names)
    with refused("study.second_moments", "transformer.wte.weight", "8 more"):
        all_scales(model, folder)


def test_the_largest_second_moments_count_where_adam_takes_them(tmp_path):
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True, betas=BETAS, eps=EPS)
    for size in (1.0, 1e-3):
        model.weight.grad = torch.full((1, 3), size)
        optimizer.step()
    folder = saved(tmp_path / "checkpoint", optimizer)
    (scale,) = all_scales(model, folder).values()
    largest = expected(optimizer, model.weight, "max_exp_avg_sq", steps=2)
    torch.testing.assert_close(scale, largest.float())


def test_what_training_never_moved_counts_nothing(tmp_path):
    model = nn.Embedding(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([0, 2])).sum().backward()
    optimizer.step()
    torch.save({"optimizer_state_dict": optimizer.state_dict()}, tmp_path / "x.pt")
    (scale,) = all_scales(model, tmp_path / "x.pt").values()
    assert torch.equal(scale > 0, torch.tensor([[True], [False], [True], [False]]).expand(4, 3))
    # Of equal gradients of 1 the second moment is 1.
    torch.testing.assert_close(scale[0], torch.ones(3), rtol=1e-6, atol=0)


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)


def ambiguous(model):
    return stepped(model, [{"params": x.parameters()} for x in (model.second, model.first)])


def without_moments(model):
    return without_gradients(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))


def without_gradients(model, optimizer=None):
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    model.first(torch.ones(3)).sum().backward()
    optimizer.step()
    return optimizer


def spoiled(model):
    optimizer = stepped(model, model.parameters())
    optimizer.state[model.first.bias]["exp_avg_sq"][0] = torch.nan
    return optimizer


@pytest.mark.parametrize(
    ("made", "code", "values"),
    [
        (ambiguous, "optimizer_order", ["4 parameters in 2 groups", 4, "more than one match"]),
        (without_moments, "optimizer_kind", ["momentum_buffer"]),
        (without_gradients, "second_moments", ["second.weight, second.bias"]),
        (spoiled, "second_moments", ["first.bias"]),
        (lambda model: torch.optim.Adam(model.parameters()), "optimizer_kind", ["nothing"]),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, made, code, values):
    model = Twins()
    folder = saved(tmp_path / "checkpoint", made(model))
    with refused(f"study.{code}", *values):
        all_scales(model, folder)


class Headed(nn.Linear):
    def __init__(self):
        super().__init__(3, 3, bias=False)
        self.head = nn.Linear(3, 3, bias=False)


@pytest.mark.parametrize("more", [[], ["ema"]])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_part_with_the_names_of_the_whole_keeps_its_own(tmp_path, prefix, more):
    """Moments of `head.weight` are never those of `weight`."""
    model = Headed()
    named = [(f"{prefix}head.weight", model.head.weight)]
    named += [(f"{prefix}head.{name}", nn.Parameter(torch.ones(1))) for name in more]
    optimizer = stepped(model, named)
    folder = saved(tmp_path / "checkpoint", optimizer)
    assert_own(model, optimizer, folder, ["head.weight"])
    given = ", ".join(f"head.{name}" for name in ["weight", *more])
    with refused("study.optimizer_names", given, "weight"):
        scales(model, ["weight"], folder)


@pytest.mark.parametrize(
    ("name", "content", "code", "value"),
    [
        ("optimizer.pt", None, "tensor_file", "No such file"),
        ("optimizer.pt", b"PK\x03\x04 and no more", "tensor_file", "it was cut off"),
        ("optimizer.pt", {"step": torch.ones(1)}, "optimizer_state", "step"),
        ("plain.safetensors", {"weight": torch.ones(1)}, "optimizer_state", "weight"),
    ],
)
def test_where_there_is_no_state(tmp_path, name, content, code, value):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save(content, path)
    checkpoint = tmp_path if name == "optimizer.pt" else path
    with refused(f"study.{code}", path, value):
        all_scales(nn.Linear(1, 1), checkpoint)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint with its optimizer's state, and what gradients are multiplied by."""
    model = digits()
    optimizer = stepped(model, by_dimensions(model))
    path = tmp_path_factory.mktemp("checkpoints") / "c0.pt"
    states = {"model_state_dict": model, "optimizer_state_dict": optimizer}
    torch.save({key: value.state_dict() for key, value in states.items()}, path)
    scale = torch.cat([expected(optimizer, p).flatten() for p in model.parameters()])
    return path, model, scale.numpy()


@pytest.mark.parametrize("kind", ["rademacher", "hadamard", "tensor_sketch"])
def test_features_are_those_of_divided_gradients(trained, tmp_path, kind, monkeypatch):
    """The scales of a matrix that comes in parts are those of the whole."""
    monkeypatch.setattr("trak_core.gradients.gradient_terms.PIECE", 1000)
    path, model, scale = trained
    study = Study.load(STUDIES / "small_digits.py")
    targets = study.function("target_ids")()[:5].tolist()
    settings = {"model_output": "image_classification", "proj_dim": 64, "kind": kind}
    run_stages(tmp_path, study.path, {"c0": path}, targets, preconditioner="adam", **settings)
    split = study.split("mine", targets)
    samples = [split.samples[i] for i in range(len(targets))]
    gradients, _, _ = oracle.jacobian(model.double().eval(), samples, "image_classification")
    wanted = oracle.projected(gradients * scale, 64, kind, parameters=model.parameters())
    file = tmp_path / "features/c0/mine.h5"
    found = pd.read_hdf(file, "features").to_numpy()
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
