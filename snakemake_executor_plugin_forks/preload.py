"""What multiprocessing's forkserver imports first; importing it does the server's own imports."""

from snakemake_executor_plugin_forks.server import serve

serve()
