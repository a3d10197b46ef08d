"""HTML that is safe by construction: text is escaped where it enters an element."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

_VOID = {"img", "meta", "link", "br"}


class Html(str):
    """Markup made by ``element``: the only text that is not escaped again."""

    __slots__ = ()


def joined(content: Iterable[Any]) -> Html:
    """Return pieces one after another: markup as it is, anything else as escaped text."""
    return Html(
        "".join(p if isinstance(p, Html) else html.escape(str(p), quote=True) for p in content)
    )


def element(name: str, /, *content: Any, **attributes: str | None) -> Html:
    """Return one element.

    Args:
        name: Tag.
        *content: Markup, or text to escape.
        **attributes: Escaped; ``class_`` stands for class, ``_`` for a hyphen, None for no
            attribute.

    Returns:
        ``<name ...>content</name>``.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value, quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{joined(content)}</{name}>")


def paragraph(*content: Any) -> Html:
    """Return a paragraph."""
    return element("p", *content)


def bullets(items: Iterable[Any]) -> Html:
    """Return a list."""
    return element("ul", *(element("li", item) for item in items))


def section(anchor: str, title: str, *content: Any) -> Html:
    """Return a section with a heading that links can lead to."""
    return element("section", element("h2", title), *content, id=anchor)


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Html:
    """Return a table that scrolls inside its own box.

    Args:
        caption: What the table shows.
        columns: Headings; cells under one that starts with ``#`` are numbers (the sign goes).
        rows: Cells, the first of a row its heading.
    """
    numeric = [name.startswith("#") for name in columns]

    def cell(i: int, value: Any) -> Html:
        kind = "number" if numeric[i] else None
        if i == 0:
            return element("th", value, scope="row", class_=kind)
        return element("td", value, class_=kind)

    head = (
        element("th", name.removeprefix("#"), scope="col", class_="number" if number else None)
        for name, number in zip(columns, numeric, strict=True)
    )
    body = (element("tr", *(cell(i, v) for i, v in enumerate(row))) for row in rows)
    whole = element(
        "table", element("thead", element("tr", *head)), element("tbody", *body), aria_label=caption
    )
    # tabindex: a box that scrolls must be reachable by keyboard.
    box = element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)
    return element("figure", element("figcaption", caption), box, class_="table")


def number(value: float, digits: int = 3) -> str:
    """Return a number in so many digits, with a true minus sign; no exponent for everyday sizes."""
    text = f"{value:,.{digits}g}" if abs(value) < 1e6 else f"{value:.{digits}g}"
    if "e" in text and 1e3 <= abs(value) < 1e6:
        text = f"{value:,.0f}"
    return text.replace("-", "\N{MINUS SIGN}")


def fixed(value: float, decimals: int) -> str:
    """Return a number with so many decimals, with a true minus sign: for correlations."""
    return f"{value:.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def percent(part: float, decimals: int = 0) -> str:
    """Return a part of 1 as a percentage."""
    return f"{100 * part:.{decimals}f}\N{NO-BREAK SPACE}%"


def plural(count: int, noun: str, more: str | None = None) -> str:
    """Return a count with its noun: 1 target, 2,000 targets."""
    return f"{count:,} {noun if count == 1 else more or noun + 's'}"
