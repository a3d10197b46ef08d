"""The notebooks run in an empty folder, and what they print is what stands in them.

Numbers differ between machines, so kinds of outputs are compared, and what the text says of them.
`TRAK_CORE_UPDATE_NOTEBOOKS=1` keeps the outputs of this run in the notebooks.
"""

import os
import re
import sys
from itertools import groupby
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from patience import longer
from workspace import forked_python

NOTEBOOKS = Path(__file__).parents[2] / "docs/notebooks"


def outputs_of(notebook):
    """What each cell of code shows, without what libraries say on standard error."""
    return [
        [output for output in cell.outputs if output.get("name") != "stderr"]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def kinds(outputs):
    """Kinds of each cell's outputs; a program's lines may come in one stream or in several."""
    named = [[(output.output_type, output.get("name")) for output in cell] for cell in outputs]
    return [[kind for kind, _ in groupby(cell)] for cell in named]


def run(name, folder, monkeypatch):
    """Run a notebook in a folder and return what it prints, all cells together."""
    programs = folder.with_name(f"{folder.name}-programs")
    programs.mkdir()
    trak = programs / "trak"
    trak.write_text(f'#!/bin/sh\nexec {forked_python()} -m trak_core.command.main "$@"\n')
    trak.chmod(0o755)
    path = (programs, Path(sys.executable).parent, os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, path)))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests have the other cores
    path = NOTEBOOKS / name
    stored = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(
        notebook, timeout=int(longer(600)), kernel_name="python3", resources=place
    ).execute()
    shown = outputs_of(notebook)
    if os.environ.get("TRAK_CORE_UPDATE_NOTEBOOKS"):
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for cell, outputs in zip(code, shown, strict=True):
            cell.outputs = outputs
            cell.metadata.pop("execution", None)
        text = nbformat.writes(notebook).replace(f"{folder}/", "")
        path.write_text(text + "\n", encoding="utf-8")
    else:
        assert kinds(shown) == kinds(outputs_of(stored))
    printed = [
        output.get("text") or output.data.get("text/plain", "")
        for outputs in shown
        for output in outputs
    ]
    return "\n".join(printed)


@pytest.mark.gate
def test_wrong_labels_among_pictures(tmp_path, monkeypatch):
    printed = run("images.ipynb", tmp_path, monkeypatch)
    (found,) = re.findall(r"of the first 40, (\d+) are wrong", printed)
    assert int(found) >= 30


@pytest.mark.gate
def test_a_language_model_and_its_questions(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    printed = run("texts.ipynb", tmp_path, monkeypatch)
    assert "Answers: results-texts/answers/asked.html" in printed
    assert "A class definition is an executable statement." in printed
    (said,) = re.findall(
        r"^the joint log-odds of the tokens that count: (?:.*); (.*)$", printed, re.M
    )
    assert re.fullmatch(r"tokens \d+, right \d+(?:\.\d+)?", said)


@pytest.mark.gate
def test_reading_and_plotting_results(tmp_path, monkeypatch):
    printed = run("results.ipynb", tmp_path, monkeypatch)
    lds = [float(line.split()[2]) for line in printed.splitlines() if " scores " in line]
    assert 0.3 < lds[0] < 1
