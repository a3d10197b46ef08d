"""A Snakemake logger that shows a line for each job, what else matters, and every error."""

from snakemake_logger_plugin_trak.handler import LogHandler as LogHandler
