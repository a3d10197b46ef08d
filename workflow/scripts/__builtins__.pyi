"""Declare the variable that Snakemake adds to every script, for the type checker (`stubPath`)."""

from typing import Any

snakemake: Any
