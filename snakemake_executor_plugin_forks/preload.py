"""Import the modules to preload in multiprocessing's forkserver, which imports this module."""

from snakemake_executor_plugin_forks.server import serve

serve()
