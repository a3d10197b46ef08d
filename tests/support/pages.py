"""Pages of the documentation, followed as a reader would."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

from workspace import REPOSITORY, snakemake


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the info line and the text of every fenced block, in order."""
    text = (REPOSITORY / page).read_text()
    return re.findall(r"^```([^\n]+)\n(.*?)^```", text, flags=re.S | re.M)


def follow(page: str, folder: Path, monkeypatch) -> list[str]:
    """Save what has a file's name, run the commands and the code, and return what code printed."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    printed = []
    for info, text in blocks(page):
        language, _, name = info.partition(" ")
        if name:
            Path(name).write_text(text)
        elif language == "console":
            for command in re.findall(r"^\$ (.*)", text, flags=re.M):
                program, *arguments = shlex.split(command)
                if program == ".venv/bin/snakemake":
                    snakefile = ("--snakefile", str(REPOSITORY / "Snakefile"))
                    status, output = snakemake(folder, *snakefile, *arguments)
                else:
                    assert program == ".venv/bin/python"
                    run = [sys.executable, *arguments]
                    result = subprocess.run(run, capture_output=True, text=True, timeout=500)
                    status, output = result.returncode, result.stderr
                assert status == 0, output
        elif language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(text, {})
            printed.append(out.getvalue())
    return printed
