"""Import modules in advance in multiprocessing's forkserver, which imports this module first."""

from snakemake_executor_plugin_forks.server import serve

serve()
