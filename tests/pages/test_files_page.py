"""`docs/reference/files.md` against files: every object, its type, and what can be searched."""

import re
from dataclasses import replace

import h5py
import numpy as np
import pandas as pd
from linear_study import SPEC, with_two_checkpoints
from pipeline import ON_CPU, run_exact_stages, run_stages, token_scores
from workspace import REPOSITORY

from trak_core.stages.compute_outputs import compute_outputs
from trak_core.stages.select_targets import select_targets

PAGE = (REPOSITORY / "docs/reference/files.md").read_text()
SECTIONS = re.findall(r"^## `results/(\S+\.h5)`\n(.*?)(?=^## )", PAGE, flags=re.M | re.S)
ROW = re.compile(r"^\| (\*?`[^|]+`\*?) \| (\w+)(?:, ([^|]+))? \| (.*) \|$", flags=re.M)
TYPES = {"text": "SO", "id": "iSO", "float": "f", "as the study's": "iufS"}


def types_in(name, section):
    """Return the types of a column; ``train_ids`` has those of ``sample_ids``, for example."""
    plain = re.sub(r"^(train|target)_", "", name)
    names = {name, "sample_ids" if plain == "ids" else plain}
    rows = described(section)
    return next(types for key, _, types, *_ in rows if {key, key[1]} & names)


def described(section):
    """Yield the objects of a file: name, kind, types, whether it is there always and searchable."""
    table = None
    others = {path.split("/")[0]: text for path, text in reversed(SECTIONS)} | {"above": section}
    for names, kind, types, meaning in ROW.findall(section):
        always = not re.search(r"only|[Nn]ot with|where|for classes", meaning)
        for searchable, name in re.findall(r"(\*?)`(\w+)`", names):
            table = name if kind == "table" else table
            key = (table, name) if kind == "column" else name
            other = types.removeprefix("as in ").removeprefix("as ")
            of_object = types_in(name, others[other]) if other in others else types
            yield key, kind, of_object, always, bool(searchable)


def has_type(dtype, types):
    return any(
        dtype.kind in TYPES.get(name, "") or dtype.name == name for name in types.split(" or ")
    )


def check_file(path, section):
    rows = list(described(section))
    tables = {}
    with h5py.File(path) as file:
        objects = {name: node for name, node in file.items() if name not in {"spec", "provenance"}}
        names = {name for name, kind, *_ in rows if kind != "column"}
        assert set(objects) <= names, path
        for name, kind, types, always, searchable in rows:
            if kind == "column":
                tables.setdefault(name[0], []).append((name[1], types, always, searchable))
            elif name not in objects:
                assert not always, (path, name)
            elif kind == "frame":
                assert has_type(objects[name]["block0_values"].dtype, types), (path, name)
            elif kind in {"vector", "number"}:
                assert (objects[name].shape == ()) == (kind == "number"), (path, name)
                assert has_type(objects[name].dtype, types), (path, name)
            else:
                assert kind == "table"
                assert "table" in objects[name]
        fields = {name: objects[name]["table"].dtype.names for name in tables if name in objects}
    for table, searched in fields.items():
        frame = pd.read_hdf(path, table)
        columns = {column: rest for column, *rest in tables[table]}
        assert set(frame) <= set(columns), (path, table)
        for column, (types, always, searchable) in columns.items():
            if column in frame:
                kind = np.dtype("O") if frame[column].dtype.name == "str" else frame[column].dtype
                assert has_type(kind, types), (path, table, column)
                assert (column in searched) == searchable, (path, table, column)
            else:
                assert not always, (path, table, column)


def section_of(name):
    """Return what the page says of a file; some are of the form of others."""
    name = re.sub(r"^retrained/\w+/\d+\.h5", "retrained/0-1.h5", name)
    name = re.sub(r"^removals/lists/", "removals/", name)
    for pattern, section in SECTIONS:
        if re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(pattern)), name):
            return pattern, section
    raise AssertionError(f"{name} must be on the page")


def check_run(results):
    """Check every file of a run, and return the patterns that were seen."""
    seen = set()
    for path in sorted(results.rglob("*.h5")):
        pattern, section = section_of(path.relative_to(results).as_posix())
        check_file(path, section)
        seen.add(pattern)
    return seen


def test_files_of_an_evaluated_study(evaluated):
    patterns = {pattern for pattern, _ in SECTIONS}
    seen = check_run(evaluated.path("results"))
    others = {pattern.split("/")[0] for pattern in patterns - seen}
    assert others == {"gramian", "outputs", "targets", "token_scores"}


def test_files_that_other_settings_leave(tmp_path):
    study, checkpoints, _ = given = with_two_checkpoints(tmp_path)
    kept, unit, exact = (tmp_path / name for name in ("top", "unit", "exact"))
    run_stages(kept, *given, model_output="regression", proj_dim=8, keep="top_k")
    other = {"combine": "unit_average", "dtype": "int8"}
    run_stages(unit, *given, model_output="regression", proj_dim=8, **other)
    run_exact_stages(exact, *given, model_output="regression")
    spec = replace(SPEC.features, projection={"kind": "none"}, split="all")
    outputs = unit / "outputs/c0.h5"
    given = {"checkpoint": checkpoints["c0"], "study_file": study, "spec": spec.under("c0")}
    compute_outputs(outputs=outputs, **given, **ON_CPU)
    given = {"outputs": [outputs], "spec": spec, "experiment": "mine", "where": "label != 0"}
    select_targets(targets=unit / "targets/mine.h5", **given, targets_digest="", code="code")
    path = token_scores(kept, study, checkpoints, SPEC)
    # No text has tokens here.
    assert set(pd.read_hdf(path, "tokens")["token"]) == {-1}
    in_unit = {"outputs/{checkpoint}.h5", "targets/{experiment}.h5"}
    assert in_unit <= check_run(unit)
    assert "gramian/{checkpoint}/{split}.h5" in check_run(exact)
    assert {"scores/{experiment}.h5", "token_scores/{experiment}.h5"} <= check_run(kept)
