# Check the config, fill in its defaults, say what decides each job's numbers, run the preflight.
import atexit
import gc
import re
import sys
from contextlib import contextmanager
from functools import cache
from html import unescape
from pathlib import Path

from snakemake.io import get_flag_value
from snakemake.settings.types import SharedFSUsage

from trak_core.config.cross_checks import check_given, check_paths, check_python_path
from trak_core.config.memory_needs import weights_mb
from trak_core.config.preflight import (
    check_sources,
    model_bytes,
    refuse_future,
    renamed_checkpoints,
    run_preflight,
)
from trak_core.config.read_config import has_record, record_config
from trak_core.config.results_owner import changed_in_copy, earlier_configs
from trak_core.config.bind_study_arguments import with_ready_study
from trak_core.config.read_config import (
    check_config,
    check_unique_keys,
    read_schema,
    with_defaults,
    with_values_read,
)
from trak_core.config.specs_from_config import specs_of
from trak_core.errors import InputError
from trak_core.dependency_digests import mentions, stat_signature
from trak_core.system.checkpoint_signatures import checkpoint_signatures
from trak_core.system.files import (
    check_results,
    code_digests,
    hold_results,
    lock_tables_where_possible,
)
from trak_core.system.job import explain_interrupts, name_library, stage_module

# Jobs are processes of their own. They import the trak_core that this file imports.
name_library()
schema = workflow.source_path("../schemas/config.schema.yaml")
# What is in Snakemake's list of configs without being one (see below), from all such modules.
brought_along = vars(workflow).setdefault("trak_core_brought_along", [])
# With a default storage provider all files of rules are in its store, a user's too.
stored = workflow.storage_settings.default_storage_provider is not None


def refuse(message):
    """End with a message alone: a WorkflowError would bring lines of this file along."""
    logger.error(f"Error: {message}")
    sys.exit(1)


@contextmanager
def explained():
    try:
        yield
    except InputError as error:
        refuse(error)
    except SyntaxError as error:
        refuse(
            f"The study must be Python. Found in {error.filename}, line {error.lineno}: "
            f"{error.msg}."
        )


# A module of another workflow has no start of its own.
is_module = config is not workflow.modifier_stack[0].globals["config"]
if workflow.is_main_process:
    # Python's end would look for cycles among all that Snakemake has imported.
    atexit.register(gc.freeze)
    # Jobs stay: to look among them for garbage as often as usual takes an eighth of planning.
    gc.set_threshold(100_000, 50, 100)

with explained():
    for file in workflow.overwrite_configfiles or workflow.configfiles:
        if file not in brought_along:
            check_unique_keys(Path(file))
    # `--config` is the outermost workflow's, whose config a module may have as its own.
    if not is_module:
        given = workflow.config_settings.config_args or []
        config.update(with_values_read(config, given))
    config.update(with_ready_study(config))
    keys = read_schema(Path(schema))
    check_config(config, keys)
    config.update(with_defaults(config, keys))
    # Snakemake dislikes ./ and a / at the end.
    config["results"] = str(Path(config["results"]))
    # Where a module's `prefix` puts what the rules write.
    moved = workflow.modifier.path_modifier.replace_prefix(f"{config['results']}/_")
    results = Path(moved).parent
    explain_interrupts(
        str(results),
        lambda: workflow.scheduler is not None and bool(workflow.scheduler.running),
        is_main=workflow.is_main_process,
    )
    # Where outputs lie until a store has them, or the results.
    lock_tables_where_possible(Path() if stored else results)
    specs = specs_of(config, results)
    shared = workflow.storage_settings.shared_fs_usage
    if workflow.is_main_process:
        listed = (checkpoint.path for checkpoint in specs.checkpoints.values())
        check_paths(config, [*map(str, workflow.configfiles), *filter(None, listed)])
        run_preflight(specs, results, is_stored=stored)
        changed = [] if stored else changed_in_copy(config, results)
        if changed:
            logger.warning(
                f"{results} is a copy of a folder that was made with another {', '.join(changed)}. "
                "Files in it count as finished, whatever made them: run once with --forceall."
            )
        # Else onstart does it, which a module of another workflow hasn't, nor who has nothing to do.
        if not stored and (is_module or not has_record(results)):
            record_config(config, results, must=False)
        if SharedFSUsage.SOURCES not in shared:
            check_sources(specs.files)
            # Snakemake brings configs along to jobs; other files only where git knows them.
            brought_along += map(str, specs.files)
            workflow.configfiles += map(str, specs.files)
compute, scoring = config["compute"], config["scoring"]
# On Kubernetes 0 would be a request too.
gpu = 1 if compute["device"] == "cuda" else None
# A path of a conda environment's file would count from this folder, a name is one of an environment.
environment = compute.get("conda", "../envs/trak.yaml")
if "conda" in compute and environment.endswith((".yaml", ".yml")):
    environment = str(Path(environment).absolute())
any_of = lambda names: "|".join(map(re.escape, names)) or "(?!)"


pathvars:
    results=config["results"],


wildcard_constraints:
    checkpoint=any_of(specs.checkpoints),
    experiment=any_of(specs.scored),
    split=any_of(specs.shards),
    shard=r"\d+",


def code_of(stage):
    """The stage, by which its job is run, and a hash of the code that it reaches."""
    return f"{stage} {code_digests(results).of(stage_module(stage))}"


def job_mb(wildcards, attempt):
    # Interpreter, torch and a study's own data come on top of the arrays.
    return attempt * (compute["memory_mb"] + 1500)


def model_job_mb(wildcards, attempt):
    # And the weights of a large model: a job of several checkpoints has one at a time.
    asked = getattr(wildcards, "checkpoint", None)
    names = list(specs.checkpoints) if asked is None else [asked]
    size, adam = model_bytes(results), specs.all_features.preconditioner is not None
    renamed = renamed_checkpoints(results) if size else []
    paths = [specs.checkpoints[name].path for name in names]
    weights = [
        weights_mb(size, path, reads_optimizer=adam, is_renamed=path in renamed)
        for path in paths
    ]
    return job_mb(wildcards, attempt) + attempt * max(weights)


# The priority of rules that make scores and figures: they run before trainings that only measure.
scores_first = 10
