"""What every Snakemake and its jobs do at their start; the server of `forked_python` imports it."""

import importlib
from pathlib import Path

import snakemake.benchmark
import snakemake.dag
import snakemake.parser
import snakemake.report
import snakemake.scheduling.job_scheduler
import snakemake.script
import snakemake.storage
import snakemake.workflow  # ruff: ignore[unused-import]
from snakemake.cli import get_argument_parser

import trak_core.config.preflight

get_argument_parser()  # looks for plugins
for _file in Path(trak_core.__file__).parent.glob("stages/[a-z]*.py"):
    importlib.import_module(f"trak_core.stages.{_file.stem}")
