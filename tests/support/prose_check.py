"""Find phrases that the style sheet of CONTRIBUTING.md bans, wherever users or programmers read.

Run as a program it prints every offender: `python tests/support/prose_check.py [folder]`.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("trak_core", "workflow", "benchmarks", "config", "docs")
PAGES = ("README.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".smk", ".md", ".yaml", ".j2", ".toml", ""}
# Words may stand on two lines of a comment, or of a string in parts; in backticks they are quoted.
GAP = r"""(?:\s|f?"|#)+"""
BANNED = {
    phrase: re.compile(r"(?<!`)\b" + phrase.replace(" ", GAP) + r"\b", flags)
    for phrase, flags in {
        "Of": re.NOFLAG,  # with a capital letter it begins a sentence
        "but for": re.IGNORECASE,
        "the like": re.IGNORECASE,
        "is to be": re.IGNORECASE,
        "whether by itself": re.IGNORECASE,
        "asks for": re.IGNORECASE,
    }.items()
}


def sources(folder: str = ".") -> list[Path]:
    """Return every text of the repository, or of one folder, that the rules hold for."""
    paths = [REPOSITORY / page for page in PAGES]
    for name in FOLDERS:
        paths += sorted(p for p in (REPOSITORY / name).rglob("*") if p.suffix in SUFFIXES)
    inside = (REPOSITORY / folder).resolve()
    return [path for path in paths if path.is_file() and path.is_relative_to(inside)]


def offenders(path: Path) -> Iterator[str]:
    """Yield the place, the phrase and what stands around it."""
    text = path.read_text()
    for phrase, pattern in BANNED.items():
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            around = " ".join(text[max(0, match.start() - 20) : match.end() + 40].split())
            yield f"{path.relative_to(REPOSITORY)}:{line}: {phrase!r}: ...{around}..."


def test_no_banned_phrase():
    assert [line for path in sources() for line in offenders(path)] == []


if __name__ == "__main__":
    found = [line for path in sources(*sys.argv[1:]) for line in offenders(path)]
    print(*found, f"{len(found)} in all", sep="\n")
    sys.exit(bool(found))
