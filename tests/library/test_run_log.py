"""What `trak run` shows of a run: Snakemake's records, and its own words for what went wrong."""

import logging
from pathlib import Path

import pytest
from snakemake.logging import LoggerManager
from snakemake.settings.types import OutputSettings
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry
from snakemake_interface_logger_plugins.settings import LogHandlerSettingsBase

import snakemake_logger_plugin_trak as run_log

JOB = {
    **{key: [] for key in ("input", "log")},
    **{key: {} for key in ("wildcards", "resources")},
    **dict.fromkeys(("local", "is_checkpoint", "indent", "benchmark"), False),
    "rule_name": "compute_scores",
    "reason": "Missing output files: scores.h5",
    "output": ["scores.h5"],
    "priority": 0,
    "threads": 1,
}


def say(logger, seconds, message, level=logging.INFO, **fields):
    record = logger.makeRecord(logger.name, level, "", 0, message, (), None, extra=fields)
    record.created = 1000.0 + seconds
    logger.handle(record)


def run_of(logger, log):
    """Say what Snakemake says of a run in which a job fails."""
    say(logger, 0, "Building DAG of jobs...")
    say(logger, 0, "Provided cores: 2", event=LogEvent.RESOURCES_INFO, cores=2)
    stats = {"compute_scores": 2, "all": 1, "total": 3}
    say(logger, 1, "Job stats:\njob count", event=LogEvent.RUN_INFO, stats=stats)
    say(logger, 1, "Execute 1 jobs...", event=LogEvent.JOB_STARTED, jobs=[1])
    job = {**JOB, "event": LogEvent.JOB_INFO}
    say(logger, 1, None, **job, jobid=1, rule_msg="Scoring mine under a")
    say(logger, 62, "Finished jobid: 1", event=LogEvent.JOB_FINISHED, job_id=1)
    say(logger, 62, None, event=LogEvent.PROGRESS, done=1, total=3)
    say(logger, 62, None, **job, jobid=2, rule_msg="Scoring mine under b")
    say(logger, 63, "Memory is short.", logging.WARNING)
    fork = 'RuleException:\nCalledProcessError in file "scores.smk", line 3:\nstatus 1.'
    say(logger, 70, fork, logging.ERROR, event=LogEvent.ERROR)
    failed = {**JOB, "event": LogEvent.JOB_ERROR, "log": [str(log)], "jobid": 2}
    failed |= {"rule_msg": None, "conda_env": None, "shellcmd": None, "aux": {}}
    say(logger, 70, None, logging.ERROR, **failed)
    say(logger, 70, None, **job, jobid=0, rule_msg=None)
    say(logger, 70, "Exiting because a job execution failed.", logging.ERROR)
    say(logger, 71, "What nobody has foreseen.")


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Return a function that gives the lines of such a run, on standard error and in the log."""
    monkeypatch.setattr("snakemake.logging.timestamp", lambda: "[now]")
    path = tmp_path / "job.log"
    failed = "64 samples at once\nError: labels must be classes.\nFound 7.\n"

    def of(*, log=failed, plugin=True):
        path.write_text(log)
        registry = LoggerPluginRegistry()
        registry.register_plugin("snakemake_logger_plugin_trak", run_log)
        logger = logging.Logger("of a run")
        shown = {"trak": LogHandlerSettingsBase()} if plugin else {}
        output = OutputSettings(show_failed_logs=True, log_handler_settings=shown)
        manager = LoggerManager(logger, output)
        manager.setup_logfile(tmp_path)
        run_of(logger, path)
        files = manager.get_logfile()
        handlers = [h for h in manager.plugin_handlers if isinstance(h, run_log.LogHandler)]
        manager.stop()
        for handler in handlers:  # as Python does when it ends, and some Snakemakes before
            handler.close()
        in_log = "".join(Path(file).read_text() for file in files)
        captured = capsys.readouterr()
        return captured.out + captured.err, in_log

    return of


def test_a_line_for_each_job_that_begins_and_the_error_of_one_that_failed(said, tmp_path):
    shown, in_log = said()
    assert shown.split("\n") == [
        "3 jobs: 2 compute_scores, 1 all",
        "",
        "[0:00:00, 0 of 3 done] Scoring mine under a",
        "[0:01:01, 1 of 3 done] Scoring mine under b",
        "Memory is short.",
        "Failed: Scoring mine under b",
        "Error: labels must be classes.",
        "Found 7.",
        f"Log of the job: {tmp_path}/job.log",
        "What nobody has foreseen.",
        "The results of 1 of 3 jobs are kept. Correct the error, and run the same command again to "
        "continue.",
        "",
    ]
    # The log has what Snakemake would have said.
    usual, usual_log = said(plugin=False)
    assert in_log == usual_log
    assert [line for line in usual.splitlines() if line] == in_log.splitlines()


def test_a_job_without_an_error_of_its_own_is_told_of_as_snakemake_does(said, tmp_path):
    shown = said(log="64 samples at once\n")[0]
    assert "Error in rule compute_scores:\n" in shown
    assert "64 samples at once" in shown
    assert "Failed: " not in shown
