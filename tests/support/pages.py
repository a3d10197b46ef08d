"""Run the commands and code of pages of the documentation."""

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import patience
from workspace import REPOSITORY, forked_python, snakemake


def blocks(page: str, section: str = "") -> list[tuple[str, str]]:
    """Return the info line and text of each fenced block, of a section (##) if given."""
    text = (REPOSITORY / page).read_text()
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^```([^\n]+)\n(.*?)^```", text, flags=re.S | re.M)


def commands(page: str) -> list[list[str]]:
    """Return the words of every command of a page."""
    consoles = [text for info, text in blocks(page) if info == "console"]
    lines = [line for text in consoles for line in text.splitlines()]
    assert lines
    return [shlex.split(line.removeprefix("$ ")) for line in lines]


def run_code(text: str) -> str:
    """Run a block of Python in this process and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(text, {})
    return out.getvalue()


def follow(
    page: str, folder: Path, monkeypatch, less: Mapping[str, str] = {}, more: Sequence[str] = ()
) -> list[str]:
    """Save blocks with a file name, run commands and code, and return what the code printed.

    ``less`` has patterns and replacements in files and code, such as fewer models. Each pattern
    must occur. ``more`` has further arguments of Snakemake.
    """
    unused = set(less)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    printed = []
    for info, text in blocks(page):
        language, _, name = info.partition(" ")
        for pattern, shorter in less.items():
            text, n_found = re.subn(pattern, shorter, text)
            unused -= {pattern} if n_found else set()
        if name:
            Path(name).write_text(text)
        elif language == "console":
            for command in re.findall(r"^\$ (.*)", text, flags=re.M):
                program, *arguments = shlex.split(command)
                if program == ".venv/bin/snakemake":
                    snakefile = ("--snakefile", str(REPOSITORY / "Snakefile"))
                    status, output = snakemake(folder, *snakefile, *arguments, *more)
                else:
                    assert program == ".venv/bin/python"
                    run = [forked_python(), *arguments]
                    result = patience.run(run, 500, text=True, stderr=subprocess.PIPE)
                    status, output = result.returncode, result.stderr
                assert status == 0, output
        elif language == "python":
            printed.append(run_code(text))
    assert not unused
    return [text for text in printed if text]
