import os
from contextlib import contextmanager
from pathlib import Path

import yaml
from snakemake.utils import validate

from trak_core.config.schema import (
    check_config,
    check_distortion,
    check_exact,
    check_unique_keys,
    checkpoint_table,
    ordered,
    target_ids,
)
from trak_core.errors import InputError
from trak_core.config.demands import check_evaluation
from trak_core.provenance import code_digest, ids_digest, stat_signature, study_digest
from trak_core.spec import EXACT

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
    check_config(config, yaml.safe_load(schema.read_text()))
    validate(config, schema=str(schema))  # fills in the defaults
    exact = config["projection"] == EXACT
    if exact:
        check_exact(config)
    checkpoints = checkpoint_table(config["checkpoints"], trained="training" in config)
    experiments = {
        name: target_ids(experiment["targets"])
        for name, experiment in config["experiments"].items()
    }
    study = study_digest(Path(config["study"]))
    if "evaluation" in config:
        check_evaluation(config)
    config["results"] = str(
        Path(config["results"])
    )  # Snakemake dislikes ./ and a / at the end
compute, scoring = config["compute"], config["scoring"]
diagnosed = checkpoints if "distortion" in config else []
evaluation = config.get("evaluation", {})
# Retrained models come from the pipeline, from a file of the user's, or there are none.
measured = (
    evaluation.get("experiments", list(experiments))
    if {"subsets", "ground_truth"} & set(evaluation)
    else []
)
parameter_patterns = None if config["parameters"] == "all" else config["parameters"]
shards = {"train": compute["shards"]} | {
    name: experiment["shards"] for name, experiment in config["experiments"].items()
}
any_of = lambda names: "|".join(map(re.escape, names)) or "(?!)"


pathvars:
    results=config["results"],


wildcard_constraints:
    checkpoint=any_of(checkpoints),
    experiment=any_of(experiments),
    split=any_of(shards),
    shard=r"\d+",


def job_mb(wildcards, attempt):
    # Interpreter, torch and a study's own data come on top of the arrays.
    return attempt * (compute["memory_mb"] + 1500)


def job_minutes(wildcards, attempt):
    return attempt * compute["runtime_minutes"]
