"""Import the preloaded modules. multiprocessing's forkserver imports this module first."""

from snakemake_executor_plugin_forks.server import serve

serve()
