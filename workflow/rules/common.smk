# Read and check the config, build the specs of all jobs, and run the preflight.
import re
import sys
from contextlib import contextmanager
from pathlib import Path

from snakemake.io import get_flag_value
from snakemake.settings.types import SharedFSUsage

from trak_core.config.cross_checks import check_given
from trak_core.config.preflight import bring_along, brought_along, run_preflight
from trak_core.config.preflight import largest_weights_mb, stored_signature
from trak_core.config.read_config import check_unique_keys, completed, with_values_read
from trak_core.config.read_config import record_config
from trak_core.config.results_owner import begin_run, differences_of_copy, result_lines
from trak_core.config.specs_from_config import specs_of
from trak_core.errors import InputError
from trak_core.dependency_digests import mentions, stage_digest
from trak_core.runtime.files import (
    CONFIG_RECORD,
    lock_tables_where_possible,
    read_record,
)
from trak_core.runtime.job import explain_interrupts, export_library_path, stage_module

# Jobs are separate processes. They import the same trak_core as this file.
export_library_path()
schema = Path(workflow.source_path("../schemas/config.schema.yaml"))
given = workflow.config_settings.config_args or []
# With a default storage provider, all inputs and outputs are in its store, even the user's files.
stored = workflow.storage_settings.default_storage_provider is not None
# A module of another workflow has a name, no `onstart`, and no `--config`.
is_module = __name__ is not None
placed = workflow.modifier.path_modifier


@contextmanager
def explained():
    """Print only an error's message, and exit. A WorkflowError would also show lines of this file."""
    try:
        yield
    except InputError as error:
        logger.error(f"Error: {error}")
        sys.exit(1)


with explained():
    files = list(map(str, workflow.overwrite_configfiles or workflow.configfiles))
    for file in set(files).difference(brought_along):
        check_unique_keys(Path(file))
    config.update(
        completed(with_values_read(config, [] if is_module else given), schema)
    )
    # If the workflow is a module, its `prefix` changes the results folder.
    results = Path(placed.replace_prefix(f"{config['results']}/_")).parent
    explain_interrupts(str(results), is_main=workflow.is_main_process)
    # With a store, outputs are first written to the working folder.
    lock_tables_where_possible(Path() if stored else results)
    specs, digests = specs_of(config, results), {}
    if workflow.is_main_process:
        digests = run_preflight(specs, results, files, is_stored=stored)
        if not stored:
            for warning in differences_of_copy(config, results):
                logger.warning(warning)
            # If there is a record, `onstart` replaces it, but a module has no `onstart`.
            if is_module or not read_record(results / CONFIG_RECORD):
                record_config(config, results, must=False)
        if SharedFSUsage.SOURCES not in workflow.storage_settings.shared_fs_usage:
            # Snakemake sends config files to jobs. Other files must be tracked by git.
            workflow.configfiles += bring_along(specs.files)
