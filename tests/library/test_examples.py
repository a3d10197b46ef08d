"""The examples in docstrings of public entry points run, and print what stands there."""

import doctest
import importlib

import pytest

# Each has an example at least.
MODULES = (
    *("trak_core.gradients", "trak_core.gramian", "trak_core.projection", "trak_core.spec"),
    *(f"trak_core.compat.{name}" for name in ("gradient_computers", "modelout_functions")),
    *(f"trak_core.compat.{name}" for name in ("projectors", "score_computers", "traker", "utils")),
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner()
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == name]
    for public in getattr(module, "__all__", own):
        value = getattr(module, public)
        for example in doctest.DocTestFinder().find(value, public, globs={public: value}):
            runner.run(example)
    result = runner.summarize()
    assert result.attempted
    assert not result.failed  # pytest shows what was printed instead
