"""Write the rules of a run as JSON: ``python read_workflow.py config.yaml folder rules.json``.

Snakemake reads the workflow in this separate process, and plans the run in the folder. No job is
executed.
"""

import json
import sys
from pathlib import Path
from typing import Any

from snakemake.api import SnakemakeApi
from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, ResourceSettings

REPOSITORY = Path(__file__).parents[2]


def rules_of(config: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Return each rule of a run: its output, its params, its stage, and the rules that it reads."""
    with SnakemakeApi(OutputSettings(quiet=None)) as snakemake:
        api = snakemake.workflow(
            ResourceSettings(cores=1),
            ConfigSettings(configfiles=[config]),
            snakefile=REPOSITORY / "Snakefile",
            workdir=folder,
        )
        api.dag(DAGSettings()).summary()
        dag = api._workflow.dag
        assert dag is not None
        rules: dict[str, dict[str, Any]] = {}
        for job in dag.jobs:
            name = job.rule.name
            code = getattr(job.params, "code", None)
            rule = {
                "writes": [str(path) for path in job.rule.output],
                "params": sorted(job.rule.params.keys()),
                "stage": code.split()[0] if code else None,
                "reads": [],
            }
            rules.setdefault(name, rule)
            upstream = {above.rule.name for above in dag.dependencies[job]}
            rules[name]["reads"] = sorted(upstream.union(rules[name]["reads"]))
        return rules


if __name__ == "__main__":
    read = rules_of(Path(sys.argv[1]), Path(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(read))
