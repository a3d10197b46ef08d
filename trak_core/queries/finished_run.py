"""Find the files of a finished run, and check that they belong to the current config."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from trak_core.artifacts import SCORES, open_artifact
from trak_core.config.read_config import recorded_config
from trak_core.config.specs_from_config import Specs
from trak_core.errors import InputError

# The words that error messages use for settings of a file.
_NAMES = {
    "dtype": "features_dtype",
    "parameter_patterns": "parameters",
    "parameters_digest": "model",
    "study_digest": "study or data files",
    "sample_ids": "list of training samples",
    "scoring": "scoring or features",
}

_SCORING_KEYS = ("damping", "combine", "loss_weight_power", "study_digest")


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run: settings, results folder, and the folder to which its paths are relative."""

    specs: Specs
    results: Path
    folder: Path

    @classmethod
    def of_config(cls, config: dict[str, Any], results: Path, folder: Path) -> Self:
        """Return the run of a config that has all defaults.

        Raise an error if a file that is needed to score samples is missing.
        """
        results, folder = results.resolve(), folder.resolve()
        with contextlib.chdir(folder):
            if not Path(config["study"]).is_file():
                raise _not_finished(results, config["study"])
            run = cls(Specs(config, results, writes=False), results, folder)
            files = [run.files(name) for name in run.specs.checkpoints]
            gone = [path for path, *_ in files if not path.exists()]
            if gone and run.results not in gone[0].parents:
                raise InputError(
                    f"The run's checkpoints must exist on a local disk. Found nothing at {gone[0]} "
                    f"(relative to {folder}). Restore the file, or change its path in the config "
                    "and run the config again.",
                    code="queries.no_checkpoint",
                )
            missing = [path for paths in files for path in paths if not path.exists()]
        if missing:
            raise _not_finished(results, missing[0])
        return run

    @classmethod
    def of_folder(cls, results: Path) -> Self:
        """Return the run that was last started in a results folder."""
        config, folder = recorded_config(results)
        return cls.of_config(config, results, folder)

    def checkpoint(self, name: str) -> Path:
        """Return the path of a checkpoint, which is a file or a folder."""
        path = self.specs.checkpoints[name].path
        return self.results / "checkpoints" / f"{name}.pt" if path is None else Path(path)

    def files(self, name: str) -> list[Path]:
        """Return the paths of a checkpoint and of the files that scoring with it needs."""
        made = [f"gramian/{name}/train.h5"]
        if self.specs.is_projected:
            made = [f"features/{name}/train.h5", f"normal_matrix/{name}.h5"]
        return [self.checkpoint(name), *(self.results / path for path in made)]

    def check_scores(self) -> None:
        """Raise an error if the run's scores are for settings other than those in the config."""
        for name in self.specs.experiments:
            path = self.results / "scores" / f"{name}.h5"
            if path.exists():
                today = self.specs.scores(name).as_dict()
                with open_artifact(path, SCORES) as file:
                    differ = [key for key in _SCORING_KEYS if today[key] != file.spec.get(key)]
                if differ:
                    self.refuse_changed(path, differ)

    def refuse_changed(self, path: Path, keys: Sequence[str]) -> NoReturn:
        """Raise an error for a file whose settings ``keys`` differ from the config."""
        names = ", ".join(_NAMES.get(key, key) for key in keys)
        raise InputError(
            f"{self.results}: the run must have used the current config, study, data and "
            f"checkpoints. Found that {path.relative_to(self.results)} was computed with another "
            f"{names}. Run the config again first.",
            code="queries.changed",
        )


def _not_finished(results: Path, missing: Path | str) -> InputError:
    return InputError(
        f"{results}: the run of this config must be finished. Found nothing at {missing}. First "
        "run the config with `trak run CONFIG`.",
        code="queries.not_finished",
    )
