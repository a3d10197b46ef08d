"""What `trak run` shows of Snakemake's log: a line for each job, what else matters, every error.

A logger plugin of Snakemake's. Its log file has everything all the same.
"""

import sys
from datetime import timedelta
from logging import INFO, LogRecord
from typing import Any

from snakemake.logging import ColorizingTextHandler, DefaultFormatter
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

# What Snakemake says of itself; whatever is not listed is shown.
_HIDDEN_EVENTS = {
    LogEvent.WORKFLOW_STARTED,
    LogEvent.RESOURCES_INFO,
    LogEvent.JOB_STARTED,
    LogEvent.JOB_FINISHED,
    LogEvent.GROUP_INFO,
}
_HIDDEN_BEGINNINGS = (
    "Assuming unrestricted shared filesystem usage",
    "Building DAG of jobs",
    "Using shell:",
    "Conda environments: ignored",
    "Select jobs to execute",
)


class _Lines(DefaultFormatter):
    """Snakemake's formatter, with a line for a job that begins and one for how many there are."""

    def __init__(self, show_failed_logs: bool) -> None:
        super().__init__(set(), show_failed_logs)
        self._began: float | None = None
        self._done, self._total = 0, 0
        self._has_failed = False

    def is_shown(self, record: LogRecord) -> bool:
        """Return whether a record matters to a person, and learn from it how far the run is."""
        event = getattr(record, "event", None)
        if event == LogEvent.RUN_INFO:
            # Once more at the end, of a run that was no dry one.
            if self._began is not None:
                return False
            self._began, self._total = record.created, record.__dict__["stats"]["total"]
        if event == LogEvent.PROGRESS:
            self._done, self._total = record.__dict__["done"], record.__dict__["total"]
            return False
        if event in {LogEvent.JOB_ERROR, LogEvent.GROUP_ERROR}:
            self._has_failed = True
        if record.levelno > INFO:
            return True
        if event == LogEvent.JOB_INFO:
            # Jobs without a message only gather files, such as `all`.
            return bool(record.__dict__["rule_msg"])
        said = str(record.msg or "")
        return event not in _HIDDEN_EVENTS and not said.startswith(_HIDDEN_BEGINNINGS)

    @property
    def kept(self) -> str:
        """What to know of a run in which a job failed; "" of any other, also of a stopped one."""
        if not self._has_failed:
            return ""
        return (
            f"Finished jobs are kept, {self._done} of {self._total}. Mend what failed, then run "
            "the same command again: it goes on from there.\n"
        )

    def format_run_info(self, msg: dict[str, Any]) -> str:
        counts = {rule: n for rule, n in msg["stats"].items() if rule != "total"}
        return f"{self._total} jobs: {', '.join(f'{n} {rule}' for rule, n in counts.items())}"

    def format_job_info(self, msg: dict[str, Any]) -> str:
        seconds = round(msg["created"] - (self._began or msg["created"]))
        how_far = f"{timedelta(seconds=seconds)}, {self._done} of {self._total} done"
        return f"[{how_far}] {msg['rule_msg']}"


class LogHandler(LogHandlerBase):
    """The plugin; where a call says what to show (`--quiet`, `-n`), all is as without it."""

    def __post_init__(self) -> None:
        said = self.common_settings
        is_said = said.quiet or said.verbose or said.printshellcmds or said.debug_dag
        stream = sys.stdout if said.stdout else sys.stderr
        self._shown = ColorizingTextHandler(said.nocolor, stream)
        self._shown.setFormatter(DefaultFormatter(said.quiet, said.show_failed_logs))
        self._lines = None if is_said or said.dryrun else _Lines(said.show_failed_logs)
        if self._lines is not None:
            self._shown.setFormatter(self._lines)
            self._shown.addFilter(self._lines.is_shown)

    def emit(self, record: LogRecord) -> None:
        """Show a record, after Snakemake's own filter."""
        self._shown.handle(record)

    def close(self) -> None:
        """Say last what is kept of a run that failed."""
        if self._lines is not None:
            self._shown.stream.write(self._lines.kept)
            self._shown.flush()
            self._lines = None
        super().close()

    @property
    def writes_to_stream(self) -> bool:
        return True

    @property
    def writes_to_file(self) -> bool:
        return False

    @property
    def has_filter(self) -> bool:
        return False

    @property
    def has_formatter(self) -> bool:
        return True

    @property
    def needs_rulegraph(self) -> bool:
        return False
