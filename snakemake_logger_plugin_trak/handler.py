"""Show part of Snakemake's log in `trak run`: one line for each job, warnings and errors.

Snakemake's log file still contains everything.
"""

import re
import sys
from contextlib import suppress
from datetime import timedelta
from logging import INFO, LogRecord
from pathlib import Path
from typing import Any

from snakemake.logging import ColorizingTextHandler, DefaultFormatter
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

# Events and messages to hide. All other events and messages are shown.
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
    # The error of the failed job contains the same information.
    "RuleException:\nCalledProcessError in file",
    "Shutting down, this might take some time",
    "Exiting because a job execution failed",
    "WorkflowError:\nAt least one job did not complete successfully",
)
_ERROR = re.compile(r"^(?:Error: |Traceback \(most recent).*", re.M | re.S)


class _Lines(DefaultFormatter):
    """A formatter that shows the number of jobs in one line, and one line when each job starts."""

    def __init__(self, show_failed_logs: bool) -> None:
        super().__init__(set(), show_failed_logs)
        self._began: float | None = None
        self._done, self._total = 0, 0
        self._has_failed = False
        self._messages: dict[int, str] = {}

    def is_shown(self, record: LogRecord) -> bool:
        """Return whether to show a record, and update the progress from the record."""
        event = getattr(record, "event", None)
        if event == LogEvent.RUN_INFO:
            # Snakemake sends this event again at the end of a run.
            if self._began is not None:
                return False
            self._began, self._total = record.created, record.__dict__["stats"]["total"]
        if event == LogEvent.PROGRESS:
            self._done, self._total = record.__dict__["done"], record.__dict__["total"]
            return False
        if event in {LogEvent.JOB_ERROR, LogEvent.GROUP_ERROR}:
            self._has_failed = True
        if event == LogEvent.JOB_INFO:
            # Jobs without a message, such as `all`, do nothing.
            message = record.__dict__["rule_msg"]
            self._messages[record.__dict__["jobid"]] = message
            return bool(message)
        if str(record.msg or "").startswith(_HIDDEN_BEGINNINGS):
            return False
        return record.levelno > INFO or event not in _HIDDEN_EVENTS

    @property
    def kept(self) -> str:
        """A text about finished jobs if a job has failed, else an empty string."""
        kept = (
            f"The results of {self._done} of {self._total} jobs are kept. Correct the error, and "
        )
        return f"{kept}run the same command again to continue.\n" if self._has_failed else ""

    def format_run_info(self, msg: dict[str, Any]) -> str:
        counts = {rule: n for rule, n in msg["stats"].items() if rule != "total"}
        return f"{self._total} jobs: {', '.join(f'{n} {rule}' for rule, n in counts.items())}"

    def format_job_error(self, msg: dict[str, Any]) -> str:
        """Return the error in a failed job's log, or Snakemake's message if the log has none."""
        for log in map(Path, msg["log"]):
            with suppress(OSError):
                error = _ERROR.search(log.read_text(encoding="utf-8", errors="replace"))
                if error is not None:
                    job = self._messages.get(msg["jobid"]) or msg["rule_name"]
                    return f"Failed: {job}\n{error[0].rstrip()}\nLog of the job: {log}"
        return super().format_job_error(msg)

    def format_job_info(self, msg: dict[str, Any]) -> str:
        seconds = round(msg["created"] - (self._began or msg["created"]))
        how_far = f"{timedelta(seconds=seconds)}, {self._done} of {self._total} done"
        return f"[{how_far}] {msg['rule_msg']}"


class LogHandler(LogHandlerBase):
    """The logger plugin. With options such as `--quiet` or `-n`, it shows Snakemake's own log."""

    def __post_init__(self) -> None:
        options = self.common_settings
        is_plain = options.quiet or options.verbose or options.printshellcmds or options.debug_dag
        stream = sys.stdout if options.stdout else sys.stderr
        self._shown = ColorizingTextHandler(options.nocolor, stream)
        self._lines = None if is_plain or options.dryrun else _Lines(options.show_failed_logs)
        plain = DefaultFormatter(options.quiet, options.show_failed_logs)
        self._shown.setFormatter(self._lines or plain)
        if self._lines is not None:
            self._shown.addFilter(self._lines.is_shown)

    def emit(self, record: LogRecord) -> None:
        self._shown.handle(record)

    def close(self) -> None:
        """After a failed run, write how many finished jobs are kept."""
        if self._lines is not None:
            self._shown.stream.write(self._lines.kept)
            self._shown.flush()
            self._lines = None
        super().close()

    # The base class declares these as properties, but they are constants here.
    writes_to_stream = has_formatter = True  # pyright: ignore
    writes_to_file = has_filter = needs_rulegraph = False  # pyright: ignore
