"""A study's words about a sample, made fit for a page, a picture and a table."""

import re
import unicodedata

# Without them letters of some scripts, and emoji, stand alone that belong together.
_JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"


def _printed(character: str) -> str:
    if character.isprintable() or character in _JOINERS:
        return character
    if character.isspace():
        return " "
    # Controls say nothing to an eye (NUL pads, others turn the direction of all that follows);
    # halves of surrogate pairs have no UTF-8.
    is_control = unicodedata.category(character) in ("Cc", "Cf")
    return "" if is_control else "\N{REPLACEMENT CHARACTER}"


def readable(text: str, characters: int) -> str:
    """Return the beginning of a text, in lines, without anything but printed characters.

    Args:
        text: Any.
        characters: How many are kept; what is left out is shown as three dots.
    """
    # Not all of a book, of which little is kept.
    begun = text[: 20 * characters]
    lines = ["".join(map(_printed, line.expandtabs(4))).rstrip() for line in begun.splitlines()]
    whole = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
    if len(whole) <= characters and len(begun) == len(text):
        return whole
    return whole[:characters].rstrip() + " ..."


def on_one_line(text: str) -> str:
    """Return a text with a single space for every run of spaces and line ends."""
    return " ".join(text.split())
