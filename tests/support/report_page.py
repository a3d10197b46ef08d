"""Parse a page into elements, attributes and text, with the standard library."""

import re
from html.parser import HTMLParser

VOID = {"img", "meta", "link", "br", "input", "hr"}


class Page(HTMLParser):
    """The elements as (name, attributes), text and data, and whether tags are closed in order."""

    def __init__(self, markup):
        super().__init__(convert_charrefs=True)
        self.markup = markup
        self.elements, self.open, self.closed_in_order = [], [], True
        self.pieces, self.headings, self.cells = [], [], []
        self.styles, self.scripts, self.data = [], [], []
        self.feed(markup)
        self.close()
        self.closed_in_order &= not self.open

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)
        if name in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, name):
        self.closed_in_order &= bool(self.open) and self.open.pop() == name

    def handle_data(self, text):
        if self.open and self.open[-1] in ("style", "script"):
            # A browser does not run a script of this type.
            is_data = self.elements[-1][1].get("type") == "application/json"
            scripts = self.data if is_data else self.scripts
            (self.styles if self.open[-1] == "style" else scripts).append(text)
            return
        self.pieces.append(text)
        if self.open and re.fullmatch(r"h[1-6]", self.open[-1]):
            self.headings.append(" ".join(text.split()))
        if self.cells and {"td", "th"} & set(self.open):
            self.cells[-1] += " ".join(text.split())

    @property
    def text(self):
        return " ".join(" ".join(self.pieces).split())

    def all(self, name):
        return [attributes for found, attributes in self.elements if found == name]

    def row(self, first):
        """Return the cells of the first table row with this heading."""
        kinds = [name for name, _ in self.elements if name in ("td", "th")]
        heads = [i for i, name in enumerate(kinds) if name == "th"]
        where = next(i for i in heads if self.cells[i] == first)
        stop = next((i for i in heads if i > where), len(self.cells))
        return self.cells[where + 1 : stop]
