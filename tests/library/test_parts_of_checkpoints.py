"""Which of a file's weights are a model's: several state dicts, wrappers, and keys of others."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from refused import refused
from stored_weights import save
from torch import nn

from trak_core.study.load_checkpoint import check_checkpoint, load_checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x))


def net():
    """A network that no seed draws twice, trained for a step."""
    layers = nn.ModuleDict({"layers": nn.Sequential(Block(), Block()), "head": nn.Linear(4, 2)})
    layers["layers"](torch.randn(8, 4))
    return layers


@contextmanager
def misfits(found):
    """Expect that all keys that differ are named, and no other."""
    with refused("study.checkpoint_keys") as error:
        yield error
    assert f" Found keys {found}. " in str(error.value)


def under(prefix, state):
    return {f"{prefix}{key}": value for key, value in state.items()}


def is_loaded(state, path, part=None, model=None):
    """Whether the start and a job both take a file, and the job has a network's weights."""
    model = model or net()
    check_checkpoint(model, path, part)
    load_checkpoint(model, path, part)
    own = dict(zip(model.state_dict().values(), state.values(), strict=True))
    return all(torch.equal(value, stored) for value, stored in own.items())


SEVERAL = {
    "model, model_ema": ("model", "model_ema"),
    "model_state_dict, ema": ("model_state_dict", "ema.model"),
    "of the average in a callback": ("state_dict", "callbacks.EMA.weights"),
    "two in one": ("state_dict.model", "state_dict.averaged.module"),
    "module, ema": ("", "module", "ema"),
    "student, teacher": ("", "student", "teacher"),
    "online, target": ("", "networks.online", "networks.target"),
}


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("kind", SEVERAL)
def test_one_of_several_state_dicts_is_named_or_chosen(kind, prefix, tmp_path, capsys):
    taken, *names = SEVERAL[kind]
    names = [taken, *names] if taken else names
    states = {name: net().state_dict() for name in names}
    optimizer = {"state": {"a": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    whole = {"optimizer": optimizer, "scores": {"best": torch.tensor(0.5)}, "epoch": 3}
    for name, state in states.items():
        *above, last = name.split(".")
        inner = whole
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = under(prefix, state)
    path = save(whole, tmp_path / "a.ckpt")
    for name, state in states.items():
        assert is_loaded(state, path, name)
    capsys.readouterr()
    if not taken:
        with refused("study.state_dict", path) as error:
            load_checkpoint(net(), path)
        assert all(f"`state_dict: {name}`" in str(error.value) for name in names)
        return
    _, notice = check_checkpoint(net(), path)
    assert is_loaded(states[taken], path)
    assert f"Notice: {path}: {notice}\n" in capsys.readouterr().out
    assert all(f"`{name}`" in notice for name in names)
    assert "optimizer" not in notice
    assert "scores" not in notice


@pytest.mark.parametrize("part", ["ema", "model.layers.7", "optimizer", "mod"])
def test_a_choice_that_is_not_there(part, tmp_path):
    state = net().state_dict()
    for path in (
        save({"model": state, "averaged": state, "epoch": 3}, tmp_path / "a.pt"),
        save(under("model.", state) | {"averaged.n": torch.ones(2)}, tmp_path / "a.safetensors"),
    ):
        for read in (check_checkpoint, load_checkpoint):
            with refused("study.no_such_part", path) as error:
                read(net(), path, part)
            assert f"Found no weights under {part}. The file contains weights" in str(error.value)
            assert "under averaged, model." in str(error.value)


BESIDE = {
    "Lightning's loss": ("model.", ["loss.weight"]),
    "an average's counter": ("module.", ["n_averaged"]),
    "a network inside of a network": ("module.net.", ["module.teacher.proto", "queue"]),
    "compiled around and within": ("_orig_mod.model._orig_mod.", ["_orig_mod.loss.weight"]),
    "a key that is called as one of the model": ("model.", ["head.weight"]),
}


@pytest.mark.parametrize(
    ("wrapper", "suffix"), [(None, ".pt"), ("state_dict", ".pt"), (None, ".safetensors")]
)
@pytest.mark.parametrize("kind", BESIDE)
def test_keys_of_something_else_are_named_and_left_out_on_demand(kind, suffix, wrapper, tmp_path):
    prefix, others = BESIDE[kind]
    state = net().state_dict()
    stored = {name: torch.ones(3) for name in others} | under(prefix, state)
    path = save({wrapper: stored} if wrapper else stored, tmp_path / f"a{suffix}")
    part = f"{wrapper}.{prefix}"[:-1] if wrapper else prefix[:-1]
    for read in (check_checkpoint, load_checkpoint):
        with misfits(f"not under {prefix}: {', '.join(others)}") as error:
            read(net(), path)
        assert f"`state_dict: {part}`" in str(error.value)
    assert is_loaded(state, path, part)
    # What differs inside is named too, and nothing else.
    del stored[f"{prefix}head.bias"]
    path = save({wrapper: stored} if wrapper else stored, tmp_path / f"a{suffix}")
    outside = f"not under {prefix}: {', '.join(others)}"
    with misfits(f"missing from the checkpoint: head.bias; {outside}"):
        check_checkpoint(net(), path)
    with misfits("missing from the checkpoint: head.bias"):
        load_checkpoint(net(), path, part)


def test_of_two_networks_in_one_list_of_keys_none_is_taken(tmp_path):
    states = {name: net().state_dict() for name in ("student", "teacher")}
    stored = {k: v for name, state in states.items() for k, v in under(f"{name}.", state).items()}
    for path in (save(stored, tmp_path / "a.pt"), save(stored, tmp_path / "a.safetensors")):
        with refused("study.checkpoint_keys") as error:
            load_checkpoint(net(), path)
        assert "`state_dict: student` or `state_dict: teacher`" in str(error.value)
        assert all(is_loaded(state, path, name) for name, state in states.items())


def in_every(part):
    """Wrap every block, as a name that stands before each of its own."""
    return lambda key: key.replace("linear.", f"{part}linear.").replace("norm.", f"{part}norm.")


WRAPPED = {
    "FSDP": in_every("_fsdp_wrapped_module."),
    "compiled layers": in_every("_orig_mod."),
    "checkpointed layers": in_every("_checkpoint_wrapped_module."),
    "compiled and checkpointed": in_every("_orig_mod._checkpoint_wrapped_module."),
    "FSDP around and within": lambda key: "_fsdp_wrapped_module." + WRAPPED["FSDP"](key),
    "Lightning around compiled": lambda key: f"model._orig_mod.{key}",
    "Lightning around compiled layers": lambda key: "model." + WRAPPED["compiled layers"](key),
    "the head": lambda key: key.replace("head.", "head._orig_mod."),
}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kind", WRAPPED)
def test_wrappers_within_keys_are_taken_off(kind, suffix, tmp_path, capsys):
    state = net().state_dict()
    stored = {WRAPPED[kind](key): value for key, value in state.items()}
    path = save(stored, tmp_path / f"a{suffix}")
    assert is_loaded(state, path)
    assert capsys.readouterr().out.startswith(f"{path}: ")


class Around(nn.Module):
    """What FSDP and checkpointing are to names."""

    def __init__(self, module, name):
        super().__init__()
        self.add_module(name, module)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("prefix", ["", "model.", "module.", "_orig_mod."])
@pytest.mark.parametrize("name", ["_fsdp_wrapped_module", "_orig_mod", "module"])
def test_a_model_that_is_wrapped_takes_a_file_that_is_not(name, prefix, suffix, tmp_path):
    state = net().state_dict()
    path = save(under(prefix, state), tmp_path / f"a{suffix}")
    within, around = net(), net()
    within["layers"][1] = Around(within["layers"][1], name)
    within["head"] = Around(within["head"], name)
    assert is_loaded(state, path, model=within)
    assert is_loaded(state, path, model=Around(around, name))


def test_torchs_own_wrappers(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    state = net().state_dict()
    for wrap in (torch.compile, checkpoint_wrapper, nn.DataParallel):
        model = net()
        with warnings.catch_warnings(action="ignore"):  # of what torch's compiler imports
            model["layers"][0] = wrap(model["layers"][0])
        model.load_state_dict(dict(zip(model.state_dict(), state.values(), strict=True)))
        path = save(model.state_dict(), tmp_path / "a.pt")
        assert is_loaded(state, path)
        assert is_loaded(state, save(state, tmp_path / "b.pt"), model=model)
        by_name = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        path = save({k: v.detach() for k, v in by_name.items()}, tmp_path / "c.pt")
        load_checkpoint(other := net(), path)
        assert all(torch.equal(v, state[k]) for k, v in other.state_dict().items())


class Named(nn.Module):
    """Its parts are told apart by names that wrappers have too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))
        self.module = nn.Linear(2, 2, bias=False)
        self._orig_mod = nn.Linear(2, 2, bias=False)


def test_parts_of_the_model_itself_are_never_mixed_up(tmp_path):
    state = Named().state_dict()
    for prefix in ("", "module.", "_orig_mod.", "module._orig_mod.", "model.net."):
        path = save(under(prefix, state), tmp_path / "a.pt")
        assert is_loaded(state, path, model=Named())
        # All of the model's own keys begin with `module.`.
        path = save(under(f"{prefix}module.", state), tmp_path / "a.pt")
        assert is_loaded(state, path, model=Around(Named(), "module"))
    for lacking in state:
        stored = {key: value for key, value in state.items() if key != lacking}
        path = save(stored | {f"module.module.{lacking}": state[lacking]}, tmp_path / "a.pt")
        unknown = f"module.module.{lacking}"
        with misfits(f"missing from the checkpoint: {lacking}; unknown to the model: {unknown}"):
            load_checkpoint(Named(), path)


class Norms(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norms = nn.Sequential(*(kind(4, track_running_stats=True) for _ in range(2)))


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm1d]
)
def test_counters_of_norms_need_not_be_there(kind, suffix, prefix, tmp_path):
    """Files from before torch 0.4.1, and of timm, lack them; evaluation mode reads none."""
    trained = Norms(kind)
    with torch.no_grad():
        for value in trained.state_dict().values():
            value += 1
    stored = {k: v for k, v in trained.state_dict().items() if "num_batches" not in k}
    path = save(under(prefix, stored), tmp_path / f"a{suffix}")
    model = Norms(kind)
    check_checkpoint(model, path)
    load_checkpoint(model, path)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in stored.items())
    del stored["norms.1.running_mean"]
    with misfits("missing from the checkpoint: norms.1.running_mean"):
        load_checkpoint(model, save(stored, tmp_path / f"a{suffix}"))


def test_a_counter_of_the_models_own_must_be_there(tmp_path):
    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("num_batches_tracked", torch.tensor(3))

    path = save(nn.Linear(2, 2).state_dict(), tmp_path / "a.pt")
    with misfits("missing from the checkpoint: num_batches_tracked"):
        load_checkpoint(Counts(), path)
