"""A Snakemake logger that shows one line for each job, and all errors."""

from snakemake_logger_plugin_trak.handler import LogHandler as LogHandler
