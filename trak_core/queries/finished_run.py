"""List a finished run's files, and refuse a run whose files were made for another config."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from trak_core.artifacts import SCORES, open_artifact
from trak_core.config.read_config import recorded_config
from trak_core.config.specs_from_config import Specs, specs_of
from trak_core.errors import InputError

# Keys of a specification, in a user's words.
_WORDS = {
    "checkpoint": "checkpoint",
    "dtype": "features_dtype",
    "parameter_patterns": "parameters",
    "parameters_digest": "model",
    "study_digest": "study or data files",
    "sample_ids": "list of training samples",
    "scoring": "scoring, or of other features",
}

_OF_SCORES = ("damping", "combine", "loss_weight_power")


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What follows from today's config, the results, and the folder that its paths count from."""

    specs: Specs
    results: Path
    folder: Path

    @classmethod
    def of_config(cls, config: dict[str, Any], results: Path, folder: Path) -> Self:
        """Return the run of a config with its defaults; nothing is written."""
        results, folder = results.resolve(), folder.resolve()
        with contextlib.chdir(folder):
            if not Path(config["study"]).is_file():
                others = sorted(results.glob("*_study_*.py"))
                if others:
                    raise InputError(
                        f"{results}: a run that is asked must be that of today's study_arguments, "
                        f"and of this version of trak-core. Found {others[0].name} of others. Run "
                        "it again first: what has not changed stays as it is.",
                        code="queries.other_study",
                    )
                raise _not_finished(results, config["study"])
            run = cls(specs_of(config, results, writes=False), results, folder)
            if run.specs.is_newton:
                raise InputError(
                    "A run that is asked must have features or inner products of gradients. Found "
                    "`projection: gauss_newton`, which keeps none. Name the question in the "
                    "config, as an experiment with `data`; or run with `exact` or a projection.",
                    code="queries.gauss_newton",
                )
            stored = [c.path for c in run.specs.checkpoints.values() if "://" in (c.path or "")]
            if stored:
                raise InputError(
                    "Checkpoints must lie on this machine's disk for a run to be asked. Found "
                    f"{stored[0]}. Copy them, and name the copies in the config.",
                    code="queries.stored",
                )
            files = [run.files(name) for name in run.specs.checkpoints]
            gone = [path for path, *_ in files if not path.exists()]
            if gone and run.results not in gone[0].parents:
                raise InputError(
                    "The checkpoints of a run must be where they were for it to be asked. Found "
                    f"nothing at {gone[0]} (from {folder}). Put it back there, or run the config "
                    "again with the new place.",
                    code="queries.no_checkpoint",
                )
            missing = [path for own in files for path in own if not path.exists()]
        if missing:
            raise _not_finished(results, missing[0])
        return run

    @classmethod
    def of_folder(cls, results: Path) -> Self:
        """Return the run that was last started with a results folder."""
        config, folder = recorded_config(results)
        return cls.of_config(config, results, folder)

    def checkpoint(self, name: str) -> Path:
        """Return a checkpoint's file or folder."""
        path = self.specs.checkpoints[name].path
        return self.results / "checkpoints" / f"{name}.pt" if path is None else Path(path)

    def files(self, name: str) -> list[Path]:
        """Return a checkpoint, and what the run has made of the training samples under it."""
        made = [f"gramian/{name}/train.h5"]
        if self.specs.is_projected:
            made = [f"features/{name}/train.h5", f"normal_matrix/{name}.h5"]
        return [self.checkpoint(name), *(self.results / path for path in made)]

    def check_scores(self) -> None:
        """Refuse scores of another scoring than today's; other files don't show it."""
        for name in self.specs.experiments:
            path = self.results / "scores" / f"{name}.h5"
            if path.exists():
                today = self.specs.scores(name).as_dict()
                with open_artifact(path, SCORES) as file:
                    differ = [key for key in _OF_SCORES if today[key] != file.spec.get(key)]
                if differ:
                    self.refuse_changed(path, differ)

    def refuse_changed(self, path: Path, keys: Sequence[str]) -> NoReturn:
        """Refuse a file that was made for something else than today's config, study and data."""
        words = ", ".join(_WORDS.get(key, key) for key in keys)
        raise InputError(
            f"{self.results}: a run that is asked must be that of today's config, study, data and "
            f"checkpoints. Found {path.relative_to(self.results)} of another {words}. Run it "
            "again first: what has not changed stays as it is.",
            code="queries.changed",
        )


def _not_finished(results: Path, missing: Path | str) -> InputError:
    return InputError(
        f"{results}: a run must be finished before it is asked. Found nothing at {missing}. Run it "
        "first: `trak run` and its config.",
        code="queries.not_finished",
    )
