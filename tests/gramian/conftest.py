import pytest
import torch


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def refuse(*_):
    raise AssertionError


@pytest.fixture
def no_detour(monkeypatch):
    """No operation may be differentiated for each sample, no output row by row."""
    monkeypatch.setattr("trak_core.gramian.engine.by_rows", refuse)
    monkeypatch.setattr("trak_core.autograd.one_pass._by_operation", refuse)


@pytest.fixture
def one_pass_only(no_detour, monkeypatch):
    """Neither may a tensor of parameters be differentiated for each sample."""
    monkeypatch.setattr("trak_core.autograd.one_pass.take_rows", refuse)
