"""Describe every rule of the workflow: its input, its output, and the causes of reruns."""

import json
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from generate.rule_graph import drawn
from trak_core.runtime.job import stage_module, stage_of

REPOSITORY = Path(__file__).parents[2]
# Causes of reruns besides files and code. Each new param needs a description here.
PARAMS = {
    "arguments": "the arguments of `train()`",
    "baselines": "`evaluation.baselines`",
    "columns": "the names of labels and predictions",
    "config": "any key of the config except `answers` and `compute`",
    "defaults": "the keys that the config leaves out of `scoring`",
    "digest": "the study: its file, the modules that it imports, and `data_files`",
    "experiment": "`lists.{list}.experiment`",
    "embeddings_spec": "the settings that determine the embeddings",
    "fraction": "`lists.select.fraction`",
    "group_by": "`groups`",
    "keep": "`scoring.keep`",
    "naming": "the samples to remove: targets, scores, or `evaluation.removals.{list}.fractions`",
    "output_words": "the descriptions of your own `model_output`",
    "pool": "`lists.select.pool`",
    "question": "the experiment's `data`",
    "retrained_spec": "`evaluation.subsets`",
    "signature": "the content of your own file, or its size and time in a store",
    "spec": "the settings that determine the numbers, which are the attribute `spec` of the file",
    "study_file": "the path of the study",
    "sweep": "`evaluation.sweep`",
    "targets": "the experiment's `targets`",
    "targets_digest": "the experiment's `where`",
    "times": "`at`",
    "top": "`scoring.top`",
    "where": "the experiment's `where`",
}


def _configs() -> dict[str, dict[str, Any]]:
    """Return two configs that together use all rules."""
    smoke = yaml.safe_load((REPOSITORY / "config/smoke.yaml").read_text())
    smoke |= {"study": str(REPOSITORY / smoke["study"]), "results": "results"}
    exact = {key: value for key, value in smoke.items() if key != "evaluation"}
    smoke["evaluation"]["removals"] |= {"baselines": ["embedding_cosine"], "suspects": {}}
    select = {"select": {"experiment": "mix", "pool": "pool.py"}}
    described = {"errors": {"where": "prediction != label"}}
    return {
        "projected": smoke
        | {"experiments": smoke["experiments"] | described}
        | {"groups": ["label"], "compute": {"shards": 2}}
        | {"answers": {"tokens": True}}
        | {"lists": {kind: {"experiment": "mix"} for kind in ("suspects", "duplicates")} | select},
        "exact": exact | {"projection": "exact"},
    }


@cache
def all_rules() -> dict[str, dict[str, Any]]:
    """Return every rule that writes a file, in the format of ``read_workflow``."""
    script = Path(__file__).with_name("read_workflow.py")
    rules: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in _configs().items():
            place = Path(folder, name)
            place.mkdir()
            (place / "pool.py").write_text("from digits import target_data, target_ids\n")
            (place / "config.yaml").write_text(yaml.safe_dump(config))
            command = [sys.executable, script, place / "config.yaml", place, place / "rules.json"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"Snakemake could not read the workflow: {done.stderr}")
            planned: dict[str, dict[str, Any]] = json.loads((place / "rules.json").read_text())
            for rule, read in planned.items():
                reads = {*read["reads"], *rules.get(rule, read)["reads"]}
                rules[rule] = read | {"reads": sorted(reads)}
    return {name: rule for name, rule in rules.items() if rule["writes"]}


def _pattern(path: str) -> str:
    """Return a path's pattern without the constraints of its wildcards."""
    return re.sub(r"\{(\w+),[^}]*\}", r"{\1}", path)


def rule_sections() -> str:
    """Return a section for every rule."""
    rules = all_rules()
    parts = []
    for name in sorted(rules):
        rule = rules[name]
        summary = (stage_of(rule["stage"]).__doc__ or "").partition("\n\n")[0]
        reads = [f"[`{other}`](#{other})" for other in rule["reads"]]
        again = [PARAMS[param] for param in rule["params"] if param != "code"]
        again += ["the files that it reads", "the code of `trak_core`"]
        lines = [
            f"## `{name}`\n\n{' '.join(summary.split())}\n",
            f"- writes {', '.join(f'`{_pattern(path)}`' for path in rule['writes'])}",
            f"- reads files of {', '.join(reads)}" if reads else "- reads no other rule's files",
            f"- stage: `{rule['stage']}` of `{stage_module(rule['stage'])}`",
            f"- runs again if one of these changes: {'; '.join(again)}",
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def rule_graph() -> str:
    """Return a drawing of which rule reads which rule's files, as part of a page."""
    graph = {name: rule["reads"] for name, rule in all_rules().items()}
    return f"```{{raw}} html\n{drawn(graph)}\n```\n"
