"""What CONTRIBUTING.md names is there."""

import re

from workspace import REPOSITORY

PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text()


def named():
    """Every path in the page, in code or in a command."""
    text = re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S)
    words = {word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()}
    words |= {word for line in re.findall(r"^\$ (.*)", PAGE, flags=re.M) for word in line.split()}
    files = {word for word in words if "/" in word or (REPOSITORY / word).exists()}
    return {file for file in files if not file.startswith(".venv/")}  # which make makes


def test_every_path_exists():
    paths = named()
    assert len(paths) > 40
    placeholders = {path for path in paths if "<" in path}
    assert placeholders == {"trak_core/stages/<rule>.py"}
    assert [path for path in sorted(paths - placeholders) if not (REPOSITORY / path).exists()] == []
