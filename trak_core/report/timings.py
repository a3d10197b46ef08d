"""What jobs took, from the files that Snakemake's ``benchmark:`` leaves, and from their logs."""

import csv
import re
from collections import defaultdict
from pathlib import Path

from trak_core.report.facts import Timing
from trak_core.system.job import PEAK

# Shards and groups of subsets: 2-of-5, 0-9.
_NUMBERED = re.compile(r"\d+(-of-|-)?\d*")


def read_timings(folder: Path, logs: Path, known: set[str]) -> list[Timing]:
    """Sum up the jobs of each rule; leftovers of removed checkpoints or experiments don't count.

    Args:
        folder: One folder a rule, or one file for a rule of one job.
        logs: Likewise, of each job's log, whose last line is its peak memory. Where there is none,
            what Snakemake measured counts.
        known: Names that may stand in the files' paths: train, checkpoints, experiments.

    Returns:
        One a rule, by name; none where the folder is not there.
    """
    jobs: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for path in sorted(folder.rglob("*.tsv")):
        rule, *names = path.relative_to(folder).with_name(path.stem).parts
        if all(name in known or _NUMBERED.fullmatch(name) for name in names):
            log = (logs / path.relative_to(folder)).with_suffix(".log")
            jobs[rule] += _measured(path, log)
    return [
        Timing(
            rule,
            len(done),
            sum(seconds for seconds, _ in done),
            max(seconds for seconds, _ in done),
            max((mib for _, mib in done if mib is not None), default=None),
        )
        for rule, done in sorted(jobs.items())
        if done
    ]


def _logged_peak(log: Path) -> float | None:
    if not log.is_file():
        return None
    *_, last = ["", *log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return _number(last.removeprefix(PEAK).removesuffix(" MiB")) if PEAK in last else None


def _measured(path: Path, log: Path) -> list[tuple[float, float | None]]:
    """Return seconds and peak resident memory of a file's runs."""
    peak = _logged_peak(log)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [
        # Without processor time Snakemake's only look found the shell, before the job's process.
        (
            float(row["s"]),
            peak or (_number(row.get("max_rss")) if _number(row.get("cpu_time")) else None),
        )
        for row in rows
    ]


def _number(text: str | None) -> float | None:
    # Jobs shorter than Snakemake's first look have "NA" or a dash.
    try:
        return float(text or "") or None
    except ValueError:
        return None
