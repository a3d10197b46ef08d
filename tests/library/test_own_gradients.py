"""Models with backward hooks, sparse gradients, or derivatives of their own."""

import pytest
import torch
from architectures import Net
from gramians import by_autograd, gramian_of
from refused import refused
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from trak_core.compat.gradient_computers import FunctionalGradientComputer
from trak_core.compat.modelout_functions import ImageClassificationModelOutput
from trak_core.gradients import formed_gradients, gradient_method, select_parameters
from trak_core.gradients.check_gradients import check_samples_apart
from trak_core.gradients.gradient_methods import gradients_at_once, gradients_one_by_one
from trak_core.gramian import Engine
from trak_core.model_outputs.model_output import ModelOutput

pytestmark = pytest.mark.usefixtures("float64")
OUTPUT = ModelOutput(
    read=lambda returned: returned.flatten(1),
    value=lambda x, _: (x * torch.arange(1.0, 1 + len(x)).sqrt()).square().sum(),
    loss_weight=lambda x, _: x.sum(),
    has_labels=False,
)


def values(model, inputs):
    """f of all samples, by one forward pass."""
    x = model.eval()(inputs).flatten(1)
    return (x * torch.arange(1.0, 1 + x.shape[1]).sqrt()).square().sum(1)


def assert_all_give(model, inputs, expected):
    """The chosen method, plain autograd and all Gramians give these gradients."""
    parameters = select_parameters(model, None)
    method = gradient_method(model, parameters, OUTPUT, (inputs,))
    scale = max(float(rows.abs().max()) for rows in expected.values())
    assert scale > 0
    for way in {method, gradients_one_by_one}:
        for given, rows in ((inputs, slice(None)), (inputs[1:2], slice(1, 2))):
            found = formed_gradients(way, model, parameters, OUTPUT, (given,)).gradients
            for name, gradients in expected.items():
                error = float((found[name] - gradients[rows]).abs().max())
                assert error <= 1e-9 * scale, (way.__name__, name)
    flat = torch.cat([rows.flatten(1) for rows in expected.values()], 1)
    truth = flat @ flat.T
    gramians = [
        Engine(model, batch_dim=batch_dim).compute_gramian(values(model, inputs))
        for batch_dim in (None, 0)
    ]
    gramians.append(gramian_of(model, parameters, OUTPUT, (inputs,)))
    for gramian in gramians:
        assert float((gramian - truth).abs().max()) <= 1e-9 * float(truth.abs().max())
    alone = Engine(model).compute_gramian(values(model, inputs[:1]))
    assert float((alone - truth[:1, :1]).abs().max()) <= 1e-9 * float(truth.abs().max())
    return method


def mask(gradient):
    return gradient * (torch.arange(len(gradient)) % 2).view(-1, *[1] * (gradient.ndim - 1))


def clip(gradient):
    return gradient / gradient.norm().clamp(min=1e-3)


def in_place(gradient):
    gradient[0] = 0


HOOKS = {
    "mask": mask,
    "clipping": clip,
    "written into": in_place,
    "added decay": lambda gradient: gradient + 1,
    "no change": lambda gradient: None,
}


def tokens():
    return torch.randint(0, 7, (4, 3))


class Tied(nn.Embedding):
    def forward(self, x):
        return super().forward(x).sum(1).tanh() @ self.weight.T


def flat(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.Tanh(), nn.LazyLinear(2))


LAYERS = {
    "linear": (lambda: flat(nn.Linear(3, 4)), "0.weight", lambda: torch.randn(4, 3)),
    "embedding": (lambda: flat(nn.Embedding(7, 4)), "0.weight", tokens),
    "tied": (lambda: Tied(7, 4), "weight", tokens),
    "convolution": (lambda: flat(nn.Conv2d(2, 3, 2)), "0.weight", lambda: torch.randn(4, 2, 4, 4)),
    "normalised weight": (
        lambda: flat(weight_norm(nn.Linear(3, 4))),
        "0.parametrizations.weight.original1",
        lambda: torch.randn(4, 3),
    ),
    "recurrent": (
        lambda: Net(lambda m, x: m.lstm(x)[0], {"lstm": lambda: nn.LSTM(3, 2, batch_first=True)}),
        "lstm.weight_hh_l0",
        lambda: torch.randn(4, 3, 3),
    ),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_hooks_on_parameters_change_the_gradient_of_each_sample(layer, hook, capsys):
    make, name, inputs = LAYERS[layer]
    model, inputs = make(), inputs()
    model(inputs)
    expected = by_autograd(model, OUTPUT, [inputs])[0]
    changed = [HOOKS[hook](row) for row in expected[name]]  # or written into
    expected[name] = torch.stack([
        row if new is None else new for row, new in zip(expected[name], changed, strict=True)
    ])
    model.get_parameter(name).register_hook(HOOKS[hook])
    assert assert_all_give(model, inputs, expected) is gradients_one_by_one
    assert "it has backward hooks on parameters or modules" in capsys.readouterr().out


def test_hooks_of_other_parameters_and_of_optimizers_change_nothing():
    """Hooks after the accumulation of a gradient into ``.grad`` are not called."""
    model, inputs = flat(nn.Linear(3, 4)), torch.randn(4, 3)
    model(inputs)
    expected = by_autograd(model, OUTPUT, [inputs])[0]
    model[0].weight.register_hook(torch.neg)
    model[0].weight.requires_grad_(False)
    model[-1].weight.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
    del expected["0.weight"]
    assert assert_all_give(model, inputs, expected) is gradients_at_once


def both(function):
    """A hook of a module after its pass, from one before it."""
    return lambda module, inputs, outputs: function(module, inputs)


def each(function):
    return lambda module, gradients: tuple(g if g is None else function(g) for g in gradients)


MODULE_HOOKS = {"clipping": each(clip), "no change": lambda *_: None}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("hook", MODULE_HOOKS)
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("place", [0, 2, 3])
def test_hooks_on_modules_change_the_gradient_of_each_sample(place, is_before, hook):
    model, inputs = flat(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 3)
    model(inputs)
    if is_before:
        model[place].register_full_backward_pre_hook(MODULE_HOOKS[hook])
    elif place:  # the first module's inputs have no gradient
        model[place].register_full_backward_hook(both(MODULE_HOOKS[hook]))
    assert_all_give(model, inputs, by_autograd(model, OUTPUT, [inputs])[0])


class OwnTask(ImageClassificationModelOutput):
    """Computed by ``torch.vmap``, because a subclass may compute anything."""


@pytest.mark.parametrize("of_module", [False, True])
def test_tasks_of_trak_obey_hooks_or_refuse_them(of_module):
    model, batch = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(4, 3)
    batch = batch, torch.arange(4) % 2
    task, own = ImageClassificationModelOutput(), OwnTask()
    expected = FunctionalGradientComputer(model, task).compute_per_sample_grad(batch)
    if of_module:
        model[1].register_full_backward_hook(both(each(torch.neg)))
    else:
        model[0].weight.register_hook(torch.neg)
    found = FunctionalGradientComputer(model, task).compute_per_sample_grad(batch)
    for name, gradients in expected.items():
        sign = -1 if name == "0.weight" or (of_module and name == "0.bias") else 1
        torch.testing.assert_close(found[name], sign * gradients)
    with refused("gradients.hooks", "1" if of_module else "0.weight"):
        FunctionalGradientComputer(model, own).compute_per_sample_grad(batch)


class Adjoint(torch.autograd.Function):
    """Steps of a layer, which the backward pass recomputes and differentiates itself."""

    @staticmethod
    def forward(ctx, layer, x, *parameters):
        ctx.layer, ctx.start = layer, x
        return steps(layer, x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            start = ctx.start.detach().requires_grad_()
            last = steps(ctx.layer, start)
        inputs = [start, *ctx.layer.parameters()]
        return None, *torch.autograd.grad(last, inputs, gradient)


def steps(layer, x):
    for _ in range(3):
        x = x + layer(x + layer(x) / 2)
    return x


class Steps(nn.Module):
    """The layer is also used ``before`` or ``after`` the steps."""

    def __init__(self, used, layer):
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(3, 4), layer(), nn.Linear(4, 2)
        self.used, self.is_plain = used, False

    def forward(self, x):
        x = self.first(x).tanh()
        if self.used == "before":
            x = self.layer(x)
        if self.is_plain:
            x = steps(self.layer, x)
        else:
            x = Adjoint.apply(self.layer, x, *self.layer.parameters())
        if self.used == "after":
            x = self.layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Linear(4, 4),
        lambda: nn.Sequential(nn.LayerNorm(4), weight_norm(nn.Linear(4, 4)), nn.Sigmoid()),
    ],
)
@pytest.mark.parametrize("used", ["before", "after", "nowhere else"])
def test_an_operation_that_differentiates_its_own_layer(used, layer):
    model, inputs = Steps(used, layer), torch.randn(4, 3)
    model.is_plain = True
    expected = by_autograd(model, OUTPUT, [inputs])[0]
    model.is_plain = False
    assert_all_give(model, inputs, expected)


class Energy(nn.Module):
    """Returns derivatives of a network with respect to its inputs."""

    def __init__(self, how):
        super().__init__()
        self.net, self.how = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)), how

    def forward(self, x):
        with torch.enable_grad():
            x = x.requires_grad_()
            energy = self.net(x)
            (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, forces], 1) if self.how == "with the energy" else forces


@pytest.mark.parametrize("how", ["forces", "with the energy"])
def test_a_forward_that_differentiates(how):
    model, inputs = Energy(how), torch.randn(4, 3)
    check_samples_apart(model, OUTPUT, (inputs,))
    assert_all_give(model, inputs, by_autograd(model, OUTPUT, [inputs])[0])


SPARSE = {
    "padding": lambda k: nn.Sequential(
        nn.Embedding(7, 4, padding_idx=2, **k), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)
    ),
    "tied": lambda k: Net(
        lambda m, x: m.table(x).sum(1).tanh() @ m.table.weight.T,
        {"table": lambda: nn.Embedding(7, 4, **k)},
    ),
    "gathered": lambda k: Net(
        lambda m, x: m.w.gather(0, x.flatten(), sparse_grad=bool(k)).view(x.shape).sin(),
        {"w": lambda: nn.Parameter(torch.randn(7))},
    ),
    "below a recurrent layer": lambda k: Net(
        lambda m, x: m.lstm(m.table(x))[0],
        {"table": lambda: nn.Embedding(7, 3, **k), "lstm": lambda: nn.LSTM(3, 2, batch_first=True)},
    ),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_give_what_dense_ones_do(name):
    inputs = tokens()
    dense, model = (SPARSE[name](k) for k in ({}, {"sparse": True}))
    model.load_state_dict(dense.state_dict())
    assert_all_give(model, inputs, by_autograd(dense, OUTPUT, [inputs])[0])


class ScaledDotProductEfficientAttention(torch.autograd.Function):
    """Has the name of a GPU kernel, which takes a trained bias too."""

    @staticmethod
    def forward(ctx, q, k, v, bias):
        weights = (q @ k.mT + bias).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx, up):
        q, k, v, weights = ctx.saved_tensors
        onto = up @ v.mT
        onto = weights * (onto - (onto * weights).sum(-1, keepdim=True))
        return onto @ k, onto.mT @ q, weights.mT @ up, onto


def attended(m, x):
    q, k, v = m.inner(x).view(len(x), 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    bias = m.bias.weight.view(2, 5, 5).expand(len(x), -1, -1, -1)
    mixed = ScaledDotProductEfficientAttention.apply(q, k, v, bias)
    return m.head(mixed.transpose(1, 2).flatten(1))


def test_a_bias_that_a_kernel_of_attention_takes_belongs_to_its_sample():
    """The kernel is of GPUs alone; a CPU operation of the same name has its rule."""
    parts = {"bias": lambda: nn.Embedding(10, 5), "head": lambda: nn.Linear(40, 3)}
    model = Net(attended, {"inner": lambda: nn.Linear(6, 24), **parts})
    inputs = torch.randn(4, 5, 6)
    expected = by_autograd(model, OUTPUT, [inputs])[0]
    assert assert_all_give(model, inputs, expected) is gradients_at_once
