"""What CONTRIBUTING.md names is there, and what its style sheet bans is not."""

import ast
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


# Wherever users or programmers read.
TEXTS = [
    *(REPOSITORY / page for page in ("README.md", "CONTRIBUTING.md")),
    *(
        path
        for folder in ("trak_core", "workflow", "benchmarks", "config", "docs", "examples")
        for path in sorted((REPOSITORY / folder).rglob("*"))
        if path.is_file() and path.suffix in {".py", ".smk", ".md", ".yaml", ".j2", ".toml", ""}
    ),
]
PHRASES = "but for", "the like", "is to be", "whether by itself", "asks for"
# Words may stand on two lines of a comment, or of a string in parts; in backticks they are quoted.
GAP = r"""(?:\s|f?"|#)+"""
BANNED = re.compile(rf"(?<!`)\b(?:Of|(?i:{'|'.join(PHRASES).replace(' ', GAP)}))\b")


def test_no_sentence_begins_with_of_and_no_phrase_is_banned():
    offenders = []
    for path in TEXTS:
        text = path.read_text()
        for match in BANNED.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            offenders.append(f"{path.relative_to(REPOSITORY)}:{line}: {match[0]}")
    assert offenders == []


def test_no_local_name_says_nothing():
    """``found``, ``what``, ``one`` and ``rest``: see "Names" in CONTRIBUTING.md."""
    offenders = []
    for path in sorted((REPOSITORY / "trak_core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if is_stored else node.arg if isinstance(node, ast.arg) else None
            if name in {"found", "what", "one", "rest"}:
                offenders.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}: {name}")
    assert offenders == []
