import pytest


@pytest.fixture
def no_detour(monkeypatch):
    """No operation may be differentiated for each sample, no output row by row."""
    monkeypatch.delattr("trak_core.gramian.jacobian_gramian.by_rows")
    monkeypatch.delattr("trak_core.gradients.one_pass._by_operation")


@pytest.fixture
def one_pass_only(no_detour, monkeypatch):
    """Neither may a tensor of parameters be differentiated for each sample."""
    monkeypatch.delattr("trak_core.gradients.one_pass.take_rows")
