"""The phrases that the style sheet of CONTRIBUTING.md bans, wherever users or programmers read."""

import ast
import re

from workspace import REPOSITORY

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
