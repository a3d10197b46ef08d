"""What was run: the config and the versions, as text."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from trak_core.report.facts import Source

_LONG = 40


def _shortened(value: Any) -> Any:
    """Cut long lists and mappings, saying how long they are."""
    if isinstance(value, Mapping):
        items = [(str(k), _shortened(v)) for k, v in value.items()]
        rest = {"...": f"{len(items) - _LONG:,} more"} if len(items) > _LONG else {}
        return dict(items[:_LONG]) | rest
    if isinstance(value, list | tuple):
        rest = [f"... {len(value) - _LONG:,} more"] if len(value) > _LONG else []
        return [_shortened(v) for v in value[:_LONG]] + rest
    return value


def config_text(config: Mapping[str, Any]) -> str:
    """Return a config as YAML, long lists cut."""
    # A flow style at the leaves keeps lists of ids on few lines.
    return yaml.safe_dump(
        _shortened(config), sort_keys=False, default_flow_style=None, width=90, allow_unicode=True
    ).rstrip()


def _made(provenance: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a file's provenance and that of all that it was made from."""
    return [provenance, *(m for one in provenance.get("made_from", ()) for m in _made(one))]


def versions(sources: Sequence[Source]) -> list[tuple[str, str]]:
    """Return what the artifacts say of the software and devices that made them, by name.

    Several versions of one stand in one text, where files were made by several.
    """
    found: dict[str, set[str]] = {}
    for one in (made for source in sources for made in _made(source.provenance)):
        for key, value in one.items():
            if key not in ("made_from", "code", "join"):
                found.setdefault(key, set()).update(str(value).split(", "))
    return [(name, ", ".join(sorted(values))) for name, values in sorted(found.items())]
