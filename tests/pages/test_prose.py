"""The phrases that the style sheet of CONTRIBUTING.md bans, wherever users or programmers read."""

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
