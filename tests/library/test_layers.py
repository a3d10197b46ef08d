"""Imports go down the layers only, and heavy packages stay where they belong."""

import ast
import graphlib
import re
from functools import cache
from pathlib import Path

import pytest
from patience import run_python

PACKAGE = Path(__file__).parents[2] / "trak_core"
LAYERS = [
    *("errors", "settings dependency_digests", "runtime", "projection model_outputs data"),
    *("study artifacts config", "ready_made gradients", "gramian", "attribution", "evaluation"),
    *("lists", "report", "stages", "queries compat", "command"),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}
ONLY_IN = {
    "numba": {"projection"},
    "h5py": {"artifacts"},
    "jinja2": {"report"},
    "snakemake": {"command"},
}


@cache
def imported(path):
    """Every dotted name that a module imports: of modules, and of what is taken from them."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, path
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_imports_point_down():
    offenders = []
    for path in MODULES:
        part = part_of(path)
        for name in imported(path):
            root, _, inside = name.partition(".")
            other = inside.split(".")[0]
            is_heavy = part not in ONLY_IN.get(root, {part})
            is_ours = root == "trak_core" and other in RANK and other != part
            if is_heavy or (is_ours and RANK[other] >= RANK[part]):
                offenders.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert offenders == []


def test_a_stage_imports_no_other_and_shares_at_most_four_files():
    stages = PACKAGE / "stages"
    assert len(list(stages.glob("_[a-z]*.py"))) <= 4
    for path in stages.glob("*.py"):
        assert not [x for x in imported(path) if re.match(r"trak_core\.stages\.[^_]", x)], path


def test_no_module_imports_itself_by_a_detour():
    """Imports inside functions and for type checkers alone count too."""
    dotted = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in MODULES]
    names = [name.removesuffix(".__init__") for name in dotted]
    graph = {}
    for name, path in zip(names, MODULES, strict=True):
        # The packages that a module lies in run already.
        above = {name.rsplit(".", n)[0] for n in range(name.count("."))} | {name}
        graph[name] = set(imported(path)) & set(names) - above
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_modules_are_small():
    lengths = {path: len(path.read_text().splitlines()) for path in MODULES}
    assert {path: length for path, length in lengths.items() if length > 500} == {}


# What each start of Snakemake, or each job, must not pay for. One process imports the modules of a
# list one after another: what an earlier one brings would count for those below it.
HEAVY = {"torch", "numpy", "h5py", "numba", "pandas"}
TABLES = ("average_scores", "compare_removals", "evaluate_scores", "write_list")
LIGHT = [
    [
        *((name, HEAVY) for name in ("dependency_digests", "model_outputs.about_outputs")),
        *((f"config.{name}", HEAVY) for name in ("cross_checks", "memory_needs", "preflight")),
        *((f"config.{name}", HEAVY) for name in ("read_config", "specs_from_config")),
        ("attribution.solve", {"torch", "h5py", "numba", "pandas"}),
        ("stages.compute_scores", {"torch", "numba", "pandas"}),
        ("stages.join_shards", {"torch", "numba", "pandas"}),
        *((f"stages.{name}", {"torch", "numba"}) for name in TABLES),
    ],
    [
        ("stages.train_checkpoint", {"numba", "pandas", "h5py", "torch._dynamo"}),
        ("stages.compute_outputs", {"numba", "pandas", "matplotlib", "torch._dynamo"}),
        ("stages.retrain", {"numba", "pandas", "torch._dynamo"}),
        ("stages.compute_gramian", {"numba", "pandas"}),
        ("stages.compute_features", {"pandas", "matplotlib", "torch._dynamo"}),
    ],
]


@pytest.mark.gate
@pytest.mark.parametrize("modules", LIGHT, ids=["starts", "jobs"])
def test_what_a_start_must_not_cost(modules):
    program = """
import importlib, sys
for module, absent in LIST:
    importlib.import_module("trak_core." + module)
    for package in sorted(absent & sys.modules.keys()):
        print(module, "imports", package)
"""
    assert run_python(program.replace("LIST", repr(modules))).stdout == ""
