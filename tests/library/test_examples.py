"""The examples in docstrings of public entry points run, and print what stands there."""

import doctest
import importlib

import pytest

# Each has an example at least.
MODULES = ("trak_core.gradients", "trak_core.gramian", "trak_core.projection", "trak_core.spec")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner()
    for public in module.__all__:
        for example in doctest.DocTestFinder().find(getattr(module, public), public, globs={}):
            runner.run(example)
    result = runner.summarize()
    assert result.attempted
    assert not result.failed  # pytest shows what was printed instead
