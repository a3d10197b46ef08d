# Read and check the config, build the settings of all jobs, and check the study and its files.
import re
import sys
from contextlib import contextmanager
from pathlib import Path

from snakemake.io import get_flag_value
from snakemake.settings.types import SharedFSUsage

from trak_core.config import preflight, read_config
from trak_core.config.cross_checks import check_config_entries
from trak_core.config.results_owner import begin_run, differences_of_copy, show_results
from trak_core.config.specs_from_config import Specs
from trak_core.dependency_digests import mentions, stage_digest
from trak_core.errors import InputError
from trak_core.runtime.files import lock_tables_where_possible
from trak_core.runtime.job import explain_interrupts, export_library_path, stage_module

# Jobs are separate processes, and must import the same trak_core as this file.
export_library_path()
schema = Path(workflow.source_path("../schemas/config.schema.yaml"))
# If this workflow is a module of another one, `__name__` is the module's name. A module has neither
# `onstart` nor the values of `--config`.
is_module = __name__ is not None
config_entries = [] if is_module else workflow.config_settings.config_args or []
# With a default storage provider, all files of jobs are in the provider's store, even the user's
# own files.
stored = workflow.storage_settings.default_storage_provider is not None
placed = workflow.modifier.path_modifier


@contextmanager
def explained():
    """Print the message of an InputError, and exit. Snakemake would also print a traceback."""
    try:
        yield
    except InputError as error:
        logger.error(f"Error: {error}")
        sys.exit(1)


with explained():
    files = list(map(str, workflow.overwrite_configfiles or workflow.configfiles))
    for file in set(files).difference(preflight.brought_along):
        read_config.check_unique_keys(Path(file))
    config.update(read_config.completed(config, schema, entries=config_entries))
    # If this workflow is a module of another one, the module's `prefix` changes the results folder.
    results = Path(placed.replace_prefix(f"{config['results']}/_")).parent
    explain_interrupts(str(results), is_main=workflow.is_main_process)
    # With a store, outputs are first written to the working folder, then uploaded.
    lock_tables_where_possible(Path() if stored else results)
    specs, digests = Specs(config, results), {}
    if workflow.is_main_process:
        digests = preflight.run_preflight(specs, results, files, is_stored=stored)
        if not stored:
            for warning in differences_of_copy(config, results):
                logger.warning(warning)
            # `onstart` replaces an existing record. A module has no `onstart`, so replace it here.
            read_config.record_config(config, results, replaces=is_module)
        if SharedFSUsage.SOURCES not in workflow.storage_settings.shared_fs_usage:
            # Snakemake sends all config files to jobs, but other files only if git tracks them.
            # Therefore, the files of the study are added to the config files.
            workflow.configfiles += preflight.bring_along(specs.files)
