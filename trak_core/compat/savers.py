"""Keep TRAK's store: a folder of memory maps and small JSON files, safe with several processes.

    metadata.json            JL dimension, JL matrix type, train set size, and what they stand for
    experiments.json         name -> num_targets, scores_path, scores_finalized
    id_{m}.json              is_featurized, is_finalized, lambda_reg, checkpoint (a digest)
    {m}/grads.mmap           projected gradients (n, k)         {m}/out_to_loss.mmap    (n, 1)
    {m}/features.mmap        (n, k)                             {m}/_is_featurized.mmap (n, 1)
    {m}/{exp}_grads.mmap     targets (m, k), NaN where not scored yet
    scores/{exp}.mmap        (n, m)

Every map is a ``.npy`` file. A map gets its name when it is whole, a JSON file is replaced whole,
and a lock guards what processes share. So processes with different model ids never lose each
other's work, a kill leaves no half file, and nothing that is finished is ever emptied.
"""

import contextlib
import fcntl
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from trak_core.errors import InputError
from trak_core.system.files import NO_LOCKS, written_whole


class ModelIDException(InputError):
    """A model id is not in the state that a call needs."""


class AssertedError(InputError, AssertionError):
    """The original asserts this, so scripts may catch an ``AssertionError``."""


def _write_json(path: Path, content: Any) -> None:
    """Write a JSON file, which appears when it is whole."""
    with written_whole(path) as partial:
        partial.write_text(json.dumps(content), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Map:
    """One memory-mapped ``.npy`` file of the store; a new one holds ``fill`` everywhere."""

    path: Path
    shape: tuple[int, ...]
    dtype: Any
    fill: float = 0

    def write(self, values: Any) -> None:
        """Write the file, which appears when it is whole."""
        with written_whole(self.path) as partial:
            array = open_memmap(partial, mode="w+", shape=self.shape, dtype=self.dtype)
            if np.any(values):  # a file of zeros takes no room on the disk
                array[:] = values
            array.flush()

    def open(self, mode: str) -> np.memmap | None:
        """Return the array, or None if there is no file; mode ``w+`` makes a missing one first."""
        if not self.path.exists():
            if mode != "w+":
                return None
            self.write(self.fill)
        try:
            array = open_memmap(self.path, mode="r" if mode == "r" else "r+")
        except ValueError as error:
            raise InputError(
                f"{self.path} must be a whole .npy file: {error}. Delete it and make it again.",
                code="compat.damaged_map",
            ) from error
        if array.shape != self.shape or array.dtype != self.dtype:
            raise InputError(
                f"{self.path} must be {np.dtype(self.dtype)} of shape {self.shape}. Found "
                f"{array.dtype} of shape {array.shape}. Use the settings it was made with, or "
                "another save_dir.",
                code="compat.other_map",
            )
        return array


class AbstractSaver(ABC):
    """Where a TRAKer keeps its arrays and what it knows about them.

    Attributes:
        metadata: Settings; a folder that was made with others is refused.
        model_ids: Model id -> is_featurized, is_finalized; once known, lambda_reg and checkpoint.
        experiments: Name -> num_targets, scores_path, scores_finalized.
        current_model_id: Whose arrays ``current_store`` has; None before the first.
        current_store: Name -> array.
    """

    @abstractmethod
    def __init__(
        self,
        save_dir: Path | str,
        metadata: Mapping[str, Any],
        load_from_save_dir: bool,
        logging_level: int,
        use_half_precision: bool,
    ) -> None:
        """Make the folder, or read what it holds."""
        self.save_dir = Path(save_dir).resolve()
        self.metadata = dict(metadata)
        self.load_from_save_dir = load_from_save_dir
        self.use_half_precision = use_half_precision
        self.logger = logging.getLogger("STORE")
        self.logger.setLevel(logging_level)
        (self.save_dir / "scores").mkdir(parents=True, exist_ok=True)
        self.metadata_file = self.save_dir / "metadata.json"
        self.experiments_file = self.save_dir / "experiments.json"
        self._knows_locks = True  # as far as is known
        self.model_ids: dict[int, dict[str, Any]] = {}
        self.experiments: dict[str, dict[str, Any]] = {}
        self.current_model_id: int | None = None
        self.current_experiment_name: str | None = None
        self.current_store: dict[str, Any] = dict.fromkeys(("grads", "out_to_loss", "features"))
        with self.locked():
            if not self.metadata_file.exists():
                _write_json(self.metadata_file, self.metadata)
            if not self.experiments_file.exists():
                _write_json(self.experiments_file, {})
            stored = json.loads(self.metadata_file.read_text())
            for name, value in self.metadata.items():
                if stored.get(name) != value:
                    raise AssertedError(
                        f"A store keeps the settings it was made with. Found {name} "
                        f"{stored.get(name)!r} in {self.save_dir} and {value!r} here. Use the same "
                        "settings, or another save_dir.",
                        code="compat.other_settings",
                    )
            self.refresh()
        model_ids, experiments = sorted(self.model_ids), sorted(self.experiments)
        self.logger.info(f"{self.save_dir}: model IDs {model_ids}; experiments {experiments}.")

    def refresh(self) -> None:
        """Read what other processes have added, if ``load_from_save_dir`` allows it."""
        if self.load_from_save_dir:
            self._read_models("id_*.json")
            self.experiments |= json.loads(self.experiments_file.read_text())

    def is_registered(self, model_id: int) -> bool:
        """Return whether the folder holds this model id, made by this or another process."""
        if model_id not in self.model_ids:
            self._read_models(f"id_{model_id}.json")
        return model_id in self.model_ids

    def _read_models(self, pattern: str) -> None:
        for path in self.save_dir.glob(pattern):
            for model_id, state in json.loads(path.read_text()).items():
                self.model_ids[int(model_id)] = state

    def write_scores(self, exp_name: str, scores: np.ndarray) -> np.ndarray:
        """Write the scores of an experiment into ``current_store``, and return them."""
        stored = self.current_store[f"{exp_name}_scores"]
        stored[:] = scores
        self.save_scores(exp_name)
        return stored

    @contextlib.contextmanager
    def locked(self) -> Generator[None, None, None]:
        """Hold the lock of the folder's shared files, where its disk knows locks."""
        with (self.save_dir / ".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                self._tell_of_no_locks()
            yield

    def _tell_of_no_locks(self) -> None:
        if self._knows_locks:
            self._knows_locks = False
            self.logger.warning(
                "%s: the disk knows no locks. Let one process at a time write there.", self.save_dir
            )

    @abstractmethod
    def register_model_id(
        self, model_id: int, _allow_featurizing_already_registered: bool = False
    ) -> None:
        """Make the store of a new model id, or of one not finished if that is allowed."""

    @abstractmethod
    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Write the state of the current model id."""

    @abstractmethod
    def init_store(self, model_id: int) -> None:
        """Make the arrays of a model id."""

    @abstractmethod
    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """Make the arrays of an experiment for a model id."""

    @abstractmethod
    def load_current_store(
        self,
        model_id: int,
        exp_name: str | None = None,
        exp_num_targets: int = -1,
        mode: str = "r+",
    ) -> None:
        """Open the arrays of a model id, or of an experiment, in ``current_store``."""

    @abstractmethod
    def save_scores(self, exp_name: str) -> None:
        """Mark the scores of an experiment as finished."""

    @abstractmethod
    def del_grads(self, model_id: int, target: bool = False) -> None:
        """Delete the training gradients of a model id, or its targets' gradients."""


class MmapSaver(AbstractSaver):
    """The store in memory-mapped ``.npy`` files."""

    def __init__(
        self,
        save_dir: Path | str,
        metadata: Mapping[str, Any],
        train_set_size: int,
        proj_dim: int,
        load_from_save_dir: bool,
        logging_level: int,
        use_half_precision: bool,
    ) -> None:
        super().__init__(save_dir, metadata, load_from_save_dir, logging_level, use_half_precision)
        self.train_set_size = train_set_size
        self.proj_dim = proj_dim
        self._dtype = np.float16 if use_half_precision else np.float32

    def register_model_id(
        self, model_id: int, _allow_featurizing_already_registered: bool = False
    ) -> None:
        """Make the store of a new model id; with the flag, go on with one that exists."""
        if self.is_registered(model_id):
            if not _allow_featurizing_already_registered:
                raise ModelIDException(
                    f"Model id {model_id} is registered already: `load_checkpoint` goes on with "
                    "it.",
                    code="compat.registered",
                )
            self.load_current_store(model_id)
            return
        self.init_store(model_id)
        if self.is_registered(model_id):
            return  # another process did it in this moment
        if self.current_store["is_featurized"].any():
            raise ModelIDException(
                f"The folder of a new model id must hold no features. Found some in "
                f"{self.save_dir / str(model_id)}, but no id_{model_id}.json that says which "
                "checkpoint they belong to. Delete the folder, or take another model id.",
                code="compat.leftover",
            )
        self.model_ids[model_id] = {"is_featurized": 0, "is_finalized": 0}
        self.serialize_current_model_id_metadata(already_exists=False)

    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Write ``id_{m}.json`` when the model id is new or fully featurized."""
        assert self.current_model_id is not None
        state = self.model_ids[self.current_model_id]
        done = int(self.current_store["is_featurized"].sum()) == self.train_set_size
        state["is_featurized"] = int(done)
        if done or not already_exists:
            path = self.save_dir / f"id_{self.current_model_id}.json"
            _write_json(path, {self.current_model_id: state})

    def _train_maps(self, model_id: int) -> dict[str, _Map]:
        folder = self.save_dir / str(model_id)
        n, k = self.train_set_size, self.proj_dim
        return {
            "grads": _Map(folder / "grads.mmap", (n, k), self._dtype),
            "out_to_loss": _Map(folder / "out_to_loss.mmap", (n, 1), self._dtype),
            "features": _Map(folder / "features.mmap", (n, k), self._dtype),
            "is_featurized": _Map(folder / "_is_featurized.mmap", (n, 1), np.int32),
        }

    def _target_map(self, model_id: int, exp_name: str, num_targets: int) -> _Map:
        path = self.save_dir / str(model_id) / f"{exp_name}_grads.mmap"
        # NaN marks targets that were never scored; zeros would look like a result.
        return _Map(path, (num_targets, self.proj_dim), self._dtype, np.nan)

    def _scores_map(self, exp_name: str, num_targets: int) -> _Map:
        # Scores are results and stay float32.
        path = self.save_dir / "scores" / f"{exp_name}.mmap"
        return _Map(path, (self.train_set_size, num_targets), np.float32)

    def init_store(self, model_id: int) -> None:
        """Make the missing arrays of a model id, and open all of them."""
        (self.save_dir / str(model_id)).mkdir(exist_ok=True)
        # Two processes may share a model id: neither may put new arrays over the other's.
        with self.locked():
            self.load_current_store(model_id, mode="w+")

    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        self.refresh()
        if not self.is_registered(model_id):
            raise ModelIDException(
                f"A model id must be featurized before it can score. Found no model id {model_id} "
                f"in {self.save_dir}: call `load_checkpoint`, `featurize` and `finalize_features`.",
                code="compat.unknown_model_id",
            )
        with self.locked():
            experiments = json.loads(self.experiments_file.read_text())
            known = experiments.get(exp_name)
            if known is None:
                experiments[exp_name] = {
                    "num_targets": num_targets,
                    "scores_path": str(self.save_dir / f"scores/{exp_name}.mmap"),
                    "scores_finalized": 0,
                }
                _write_json(self.experiments_file, experiments)
            elif known["num_targets"] != num_targets:
                raise InputError(
                    f"An experiment has one set of targets. Found {num_targets} targets for "
                    f"{exp_name!r}, which has {known['num_targets']} in {self.save_dir}: use "
                    "another name.",
                    code="compat.other_targets",
                )
            self.experiments |= experiments
            self._target_map(model_id, exp_name, num_targets).open("w+")
        # Opened for reading, because many processes may score at once.
        self.load_current_store(model_id, mode="r")
        self.load_current_store(model_id, exp_name, num_targets)

    def load_current_store(
        self,
        model_id: int,
        exp_name: str | None = None,
        exp_num_targets: int = -1,
        mode: str = "r+",
    ) -> None:
        """Open the arrays of a model id or, with ``exp_name``, those of its experiment.

        Mode ``w+`` makes what is missing, and keeps what is there.
        """
        self.current_model_id = model_id
        if exp_name is None:
            maps = self._train_maps(model_id)
        else:
            self.current_experiment_name = exp_name
            maps = {
                f"{exp_name}_grads": self._target_map(model_id, exp_name, exp_num_targets),
                f"{exp_name}_scores": self._scores_map(exp_name, exp_num_targets),
            }
        for name, array in maps.items():
            self.current_store[name] = array.open(mode)

    def write_scores(self, exp_name: str, scores: np.ndarray) -> np.ndarray:
        """Write the scores of an experiment whole; changes of what comes back stay in memory."""
        scores_map = self._scores_map(exp_name, scores.shape[1])
        scores_map.write(scores)
        self.save_scores(exp_name)
        stored = open_memmap(scores_map.path, mode="c")
        self.current_store[f"{exp_name}_scores"] = stored
        return stored

    def save_scores(self, exp_name: str) -> None:
        with self.locked():
            experiments = json.loads(self.experiments_file.read_text())
            experiments[exp_name]["scores_finalized"] = 1
            _write_json(self.experiments_file, experiments)
            self.experiments |= experiments

    def del_grads(self, model_id: int, target: bool = False) -> None:
        """Delete the training gradients of a model id, or with ``target`` all its targets'."""
        folder = self.save_dir / str(model_id)
        names = "*_grads.mmap" if target else "grads.mmap"
        for path in folder.glob(names):
            path.unlink()
        if not target and self.current_model_id == model_id:
            self.current_store["grads"] = None
