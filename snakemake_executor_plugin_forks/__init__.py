"""A Snakemake executor that forks a process with imported modules to run Python scripts."""

from snakemake.executors.local import common_settings as common_settings  # jobs are local jobs

from snakemake_executor_plugin_forks.executor import Executor as Executor
from snakemake_executor_plugin_forks.executor import ExecutorSettings as ExecutorSettings
