"""The examples in docstrings of public entry points run, and print what stands there."""

import doctest
import importlib

import pytest

# Each has an example at least: of a package its public names count, of a module all.
PACKAGES = ("gradients", "gramian", "projection", "spec", "artifacts")
MODULES = ("scoring.solve", "scoring.exact", "evaluation.correlations", "provenance")


@pytest.mark.parametrize("name", [*PACKAGES, *MODULES])
def test_examples_run(name):
    module = importlib.import_module(f"trak_core.{name}")
    runner, finder = doctest.DocTestRunner(), doctest.DocTestFinder()
    if name in PACKAGES:
        examples = [e for p in module.__all__ for e in finder.find(getattr(module, p), p, globs={})]
    else:
        examples = finder.find(module)
    for example in examples:
        runner.run(example)
    result = runner.summarize()
    assert result.attempted
    assert not result.failed  # pytest shows what was printed instead
