"""What Snakemake puts into every script, for the type checker (pyproject.toml, stubPath)."""

from typing import Any

snakemake: Any
