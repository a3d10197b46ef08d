"""The examples in docstrings of public entry points run, and print what stands there."""

import doctest
import importlib

import pytest

# Each has an example at least: a package counts by its public names.
PACKAGES = ("gradients", "gramian", "projection", "settings", "artifacts")
MODULES = ("attribution.solve",)


@pytest.mark.parametrize("name", [*PACKAGES, *MODULES])
def test_examples_run(name):
    module = importlib.import_module(f"trak_core.{name}")
    runner, finder = doctest.DocTestRunner(), doctest.DocTestFinder()
    own = [k for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    for public in module.__all__ if name in PACKAGES else own:
        value = getattr(module, public)
        for example in finder.find(value, public, globs={public: value}):
            runner.run(example)
    result = runner.summarize()
    assert result.attempted
    assert not result.failed  # pytest shows what was printed instead
