"""Insert generated text into pages, where a comment requests it."""

import re
from collections.abc import Callable

from generate.config_keys import config_keys
from generate.rules import rule_graph, rule_sections

GENERATED: dict[str, Callable[[], str]] = {
    "config keys": config_keys,
    "rule graph": rule_graph,
    "rules": rule_sections,
}
_MARK = re.compile(r"^<!-- generated: (.+) -->$", flags=re.M)


def filled_in(page: str, name: str) -> str:
    """Return a page with each ``<!-- generated: ... -->`` replaced by the text that it names."""

    def text(mark: re.Match[str]) -> str:
        if mark[1] not in GENERATED:
            raise ValueError(f"{name}: a part must be one of {list(GENERATED)}. Found {mark[1]!r}.")
        return GENERATED[mark[1]]()

    return _MARK.sub(text, page)
