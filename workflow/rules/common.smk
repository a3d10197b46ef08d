# Read the config and check it, say what decides each job's numbers, run the preflight.
import re
import sys
from contextlib import contextmanager
from pathlib import Path

from snakemake.io import get_flag_value
from snakemake.settings.types import SharedFSUsage

from trak_core.config.cross_checks import check_given
from trak_core.config.preflight import (
    bring_along,
    brought_along,
    largest_weights_mb,
    run_preflight,
    stored_signature,
)
from trak_core.config.read_config import (
    check_unique_keys,
    completed,
    has_record,
    record_config,
    with_values_read,
)
from trak_core.config.results_owner import (
    begin_run,
    differences_of_copy,
    what_to_read,
)
from trak_core.config.specs_from_config import specs_of
from trak_core.errors import InputError
from trak_core.dependency_digests import mentions, stage_digest
from trak_core.system.files import lock_tables_where_possible
from trak_core.system.job import explain_interrupts, name_library, stage_module

# Jobs are processes of their own. They import the trak_core that this file imports.
name_library()
schema = Path(workflow.source_path("../schemas/config.schema.yaml"))
given = workflow.config_settings.config_args or []
# With a default storage provider all files of rules are in its store, a user's too.
stored = workflow.storage_settings.default_storage_provider is not None
# A module of another workflow has no start of its own, and a name. `--config` isn't its own.
is_module = __name__ is not None
placed = workflow.modifier.path_modifier


@contextmanager
def explained():
    """End with a message alone: a WorkflowError would bring lines of this file along."""
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
    # Where a module's `prefix` puts what the rules write.
    results = Path(placed.replace_prefix(f"{config['results']}/_")).parent
    explain_interrupts(str(results), is_main=workflow.is_main_process)
    # Where outputs lie until a store has them, or the results.
    lock_tables_where_possible(Path() if stored else results)
    specs, digests = specs_of(config, results), {}
    if workflow.is_main_process:
        digests = run_preflight(specs, results, files, is_stored=stored)
        if not stored:
            for warning in differences_of_copy(config, results):
                logger.warning(warning)
            # Else a start with jobs does it, of which a module isn't told.
            if is_module or not has_record(results):
                record_config(config, results, must=False)
        if SharedFSUsage.SOURCES not in workflow.storage_settings.shared_fs_usage:
            # Snakemake brings configs along to jobs; other files only where git knows them.
            workflow.configfiles += bring_along(specs.files)
