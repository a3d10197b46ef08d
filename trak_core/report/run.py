"""What was run: config, versions, hashes, time and memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from trak_core.report.elements import Html, element, joined, number, paragraph, plural, table
from trak_core.report.facts import Facts, Source

_LONG = 40
_ROWS = 60


def what_was_run(facts: Facts) -> Html:
    """Return everything that another run would need to give the same numbers."""
    return joined([
        element("h3", "Config"),
        paragraph(
            "What decides the numbers; where and how jobs ran (device, memory, threads) changes "
            "none beyond rounding."
        ),
        element("pre", _config(facts.config), tabindex="0"),
        element("h3", "Versions"),
        _versions(facts.sources),
        element("h3", "Time and memory"),
        _timings(facts),
        element("h3", "Hashes"),
        paragraph(
            "Equal hashes mean equal content. A second run of the same study with the same "
            "versions, on the same kind of machine, gives the same ones."
        ),
        _checkpoints(facts),
        _files(facts.sources),
    ])


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


def _config(config: Mapping[str, Any]) -> str:
    # A flow style at the leaves keeps lists of ids on few lines.
    return yaml.safe_dump(
        _shortened(config), sort_keys=False, default_flow_style=None, width=90, allow_unicode=True
    ).rstrip()


def _made(provenance: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a file's provenance and that of all that it was made from."""
    return [provenance, *(m for one in provenance.get("made_from", ()) for m in _made(one))]


def _versions(sources: Sequence[Source]) -> Html:
    found: dict[str, set[str]] = {}
    for one in (made for source in sources for made in _made(source.provenance)):
        for key, value in one.items():
            if key not in ("made_from", "code", "join"):
                found.setdefault(key, set()).update(str(value).split(", "))
    rows = [(name, ", ".join(sorted(values))) for name, values in sorted(found.items())]
    return joined([
        paragraph(
            "As the artifacts say themselves, those of the stages before included; several where "
            "files were made by several."
        ),
        table("Software and devices that made the numbers", ("what", "version"), rows),
    ])


def _timings(facts: Facts) -> Html:
    if not facts.timings:
        return paragraph("Snakemake's measurements (folder benchmarks/) were not there.")
    rows = [
        (
            one.rule,
            f"{one.n_jobs:,}",
            number(one.seconds),
            number(one.longest_seconds),
            "too short" if one.peak_mib is None else f"{one.peak_mib:,.0f}",
        )
        for one in facts.timings
    ]
    total = sum(one.seconds for one in facts.timings)
    columns = ("stage", "#jobs", "#seconds, all", "#seconds, longest", "#peak memory of one, MiB")
    return joined([
        paragraph(
            f"Measured by Snakemake when each job last ran; {number(total)} seconds if all of them "
            "ran one after another. Memory is resident memory, the interpreter's included."
        ),
        table("Wall time and peak memory per stage", columns, rows),
    ])


def _checkpoints(facts: Facts) -> Html:
    spec = facts.experiments[0].source.spec
    rows = [
        (one["id"], element("span", one["sha256"], class_="mono"))
        for one in spec["checkpoints"][:_ROWS]
    ]
    more = len(spec["checkpoints"]) - len(rows)
    return joined([
        table("Checkpoints", ("checkpoint", "SHA-256 of its bytes"), rows),
        paragraph(f"{plural(more, 'checkpoint')} more not shown.") if more else "",
    ])


def _files(sources: Sequence[Source]) -> Html:
    rows = [
        (
            one.name,
            element("span", one.content_hash, class_="mono"),
            element("span", one.provenance.get("code", ""), class_="mono"),
        )
        for one in sources[:_ROWS]
    ]
    more = len(sources) - len(rows)
    return joined([
        table(
            "Files this report was made from, relative to the results folder",
            ("file", "hash of its content", "code that made it"),
            rows,
        ),
        paragraph(f"{plural(more, 'file')} more not shown.") if more else "",
    ])
