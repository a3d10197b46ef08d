"""A wheel brings the workflow along, inside the package; in a checkout it lies beside it."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithWorkflow(build_py):
    """Copies what Snakemake reads to ``trak_core/workflow``."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "trak_core/workflow")
        shutil.rmtree(folder, ignore_errors=True)
        unused = shutil.ignore_patterns("__pycache__", "*.pyi")
        shutil.copytree(ROOT / "workflow", folder, ignore=unused)
        for profile in ("local", "slurm", "slurm-gpu"):
            shutil.copytree(ROOT / profile, folder / "profiles" / profile)


setup(cmdclass={"build_py": BuildWithWorkflow})
