# The config, checked and with its defaults; what decides each job's numbers; the look beforehand.
import os
from contextlib import contextmanager
from pathlib import Path

import yaml
from snakemake.utils import validate

from trak_core.config.keys import check_unique_keys, with_values_read
from trak_core.config.look import look_over
from trak_core.config.schema import check_config
from trak_core.config.specs import specs_of
from trak_core.errors import InputError
from trak_core.provenance import code_digest, stat_signature

# Jobs are processes of their own: they import the trak_core that this file imports.
os.environ.update(
    PYTHONPATH=os.pathsep.join(
        filter(None, [workflow.basedir, os.getenv("PYTHONPATH")])
    )
)
schema = Path(workflow.basedir, "workflow/schemas/config.schema.yaml")


@contextmanager
def explained():
    try:
        yield
    except InputError as error:
        raise WorkflowError(str(error)) from None
    except SyntaxError as error:
        raise WorkflowError(
            f"The study must be Python. Found in {error.filename}, line {error.lineno}: "
            f"{error.msg}."
        ) from None


with explained():
    for file in workflow.overwrite_configfiles or workflow.configfiles:
        check_unique_keys(Path(file))
    config.update(with_values_read(config, workflow.config_settings.config_args or []))
    check_config(config, yaml.safe_load(schema.read_text()))
    validate(config, schema=str(schema))  # fills in the defaults
    # Snakemake dislikes ./ and a / at the end.
    config["results"] = str(Path(config["results"]))
    specs = specs_of(config)
    if workflow.is_main_process:
        look_over(specs, Path(workflow.basedir, "workflow/scripts/check_study.py"))
compute, scoring = config["compute"], config["scoring"]
any_of = lambda names: "|".join(map(re.escape, names)) or "(?!)"


pathvars:
    results=config["results"],


wildcard_constraints:
    checkpoint=any_of(specs.checkpoints),
    experiment=any_of(specs.experiments),
    split=any_of(specs.shards),
    shard=r"\d+",


def job_mb(wildcards, attempt):
    # Interpreter, torch and a study's own data come on top of the arrays.
    return attempt * (compute["memory_mb"] + 1500)
