"""Store the arrays of a TRAKer in memory maps and JSON files, which several processes can share.

    metadata.json            JL dimension, JL matrix type, train set size; matrix, parameters, dtype
    experiments.json         name -> num_targets, scores_path, scores_finalized
    id_{m}.json              is_featurized, is_finalized, lambda_reg, checkpoint (SHA-256)
    {m}/grads.mmap           projected gradients (n, k)         {m}/out_to_loss.mmap    (n, 1)
    {m}/features.mmap        (n, k)                             {m}/_is_featurized.mmap (n, 1)
    {m}/{exp}_grads.mmap     targets (m, k), NaN if not scored yet
    scores/{exp}.mmap        (n, m)

Here, n is the number of training samples, k is the projection dimension, {m} is a model id, and
{exp} is an experiment with m targets. Each ``.mmap`` file has the format ``.npy``. All files are
created atomically, and JSON files are replaced atomically. Processes lock the files they share.
"""

import contextlib
import fcntl
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from trak_core.errors import InputError
from trak_core.runtime.files import atomic_write, supports_locks


class ModelIDException(InputError):
    """Raised if a method cannot be called for a model id in its current state."""


class AssertedError(InputError, AssertionError):
    """An InputError that is also an AssertionError, which code written for ``trak`` may catch."""


def _write_json(path: Path, content: Any) -> None:
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(content), encoding="utf-8")


def _write_map(path: Path, shape: tuple[int, ...], dtype: Any, values: Any) -> None:
    with atomic_write(path) as partial:
        array = open_memmap(partial, mode="w+", shape=shape, dtype=dtype)
        if np.any(values):  # Zeros are not written, because a sparse file takes no disk space.
            array[:] = values
        array.flush()


def _open_map(
    path: Path, shape: tuple[int, ...], dtype: Any, mode: str, fill: float = 0
) -> np.memmap | None:
    """Return an open ``.npy`` file, or None. Create a missing file only in mode ``w+``."""
    if not path.exists():
        if mode != "w+":
            return None
        _write_map(path, shape, dtype, fill)
    return open_memmap(path, mode="r" if mode == "r" else "r+")


class AbstractSaver(ABC):
    """The base class of stores, which contain a TRAKer's arrays and the state of their computation.

    ``model_ids`` and ``experiments`` contain the state, which is also in the JSON files.
    ``current_store`` contains the open arrays of the model id ``current_model_id``.
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
        """Create the folder ``save_dir``, or open an existing one with the same ``metadata``."""
        self.save_dir = Path(save_dir).resolve()
        self.metadata, self.load_from_save_dir = dict(metadata), load_from_save_dir
        self.use_half_precision = use_half_precision
        self.logger = logging.getLogger("STORE")
        self.logger.setLevel(logging_level)
        (self.save_dir / "scores").mkdir(parents=True, exist_ok=True)
        self.metadata_file = self.save_dir / "metadata.json"
        self.experiments_file = self.save_dir / "experiments.json"
        self._warned_of_locks = False
        self.model_ids: dict[int, dict[str, Any]] = {}
        self.experiments: dict[str, dict[str, Any]] = {}
        self.current_model_id: int | None = None
        self.current_store: dict[str, Any] = dict.fromkeys(("grads", "out_to_loss", "features"))
        with self.locked():
            for path, content in ((self.metadata_file, self.metadata), (self.experiments_file, {})):
                if not path.exists():
                    _write_json(path, content)
        # Earlier versions did not store the dtype, so folders without it are accepted.
        stored = {"dtype": self.metadata.get("dtype"), **json.loads(self.metadata_file.read_text())}
        for name, value in self.metadata.items():
            if stored.get(name) != value:
                raise AssertedError(
                    "All calls with one save_dir must use the same settings. Found the value "
                    f"{stored.get(name)!r} of {name} in {self.save_dir}, and {value!r} in this "
                    "call. Use the same value, or another save_dir.",
                    code="compat.other_settings",
                )
        self.refresh()

    def refresh(self) -> None:
        """If ``load_from_save_dir``, read what other processes have written to the JSON files."""
        if self.load_from_save_dir:
            for path in self.save_dir.glob("id_*.json"):
                self._read_id(path)
            self.experiments |= json.loads(self.experiments_file.read_text())

    def _read_id(self, path: Path) -> None:
        self.model_ids |= {int(m): state for m, state in json.loads(path.read_text()).items()}

    def is_registered(self, model_id: int) -> bool:
        """Return whether this or another process has registered the model id."""
        path = self.save_dir / f"id_{model_id}.json"
        if model_id not in self.model_ids and path.exists():
            self._read_id(path)
        return model_id in self.model_ids

    def write_scores(self, exp_name: str, scores: np.ndarray) -> np.ndarray:
        """Write the scores of an experiment to the store, and return the stored array."""
        self.current_store[f"{exp_name}_scores"][:] = scores
        self.save_scores(exp_name)
        return self.current_store[f"{exp_name}_scores"]

    @contextlib.contextmanager
    def locked(self) -> Generator[None, None, None]:
        """Lock the folder within the context. Warn once if the disk does not support locks."""
        with (self.save_dir / ".lock").open("a") as file:
            if supports_locks(file.fileno()):
                fcntl.flock(file, fcntl.LOCK_EX)
            elif not self._warned_of_locks:
                message = "%s: the disk does not support file locks. Run one process at a time."
                self.logger.warning(message, self.save_dir)
                self._warned_of_locks = True
            yield

    @abstractmethod
    def register_model_id(
        self, model_id: int, _allow_featurizing_already_registered: bool = False
    ) -> None:
        """Create the arrays of a new model id.

        For a model id that is already registered, open the arrays if the flag is set, or else raise
        an error.
        """

    @abstractmethod
    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Write the JSON file of the current model id if all samples have features.

        ``already_exists=False`` stands for a new model id, whose file is always written.
        """

    @abstractmethod
    def init_store(self, model_id: int) -> None:
        """Open the arrays of a model id. Create those that are missing."""

    @abstractmethod
    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """Open the arrays of an experiment for a model id. Create those that are missing."""

    @abstractmethod
    def load_current_store(
        self,
        model_id: int,
        exp_name: str | None = None,
        exp_num_targets: int = -1,
        mode: str = "r+",
    ) -> None:
        """Open the arrays of a model id or experiment. In mode ``w+``, create missing arrays."""

    @abstractmethod
    def save_scores(self, exp_name: str) -> None:
        """Mark the scores of an experiment as finished."""

    @abstractmethod
    def del_grads(self, model_id: int, target: bool = False) -> None:
        """Delete the training gradients of a model id, or the target gradients if ``target``."""


class MmapSaver(AbstractSaver):
    """A store of memory-mapped ``.npy`` files."""

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
        self.train_set_size, self.proj_dim = train_set_size, proj_dim

    def register_model_id(
        self, model_id: int, _allow_featurizing_already_registered: bool = False
    ) -> None:
        is_new = not self.is_registered(model_id)
        if not is_new and not _allow_featurizing_already_registered:
            message = f"Model id {model_id} is registered already. Call `load_checkpoint`."
            raise ModelIDException(message, code="compat.registered")
        self.init_store(model_id)
        if not is_new or self.is_registered(model_id):
            return  # It was registered before, or by another process in the meantime.
        if self.current_store["is_featurized"].any():
            folder = self.save_dir / str(model_id)
            raise ModelIDException(
                f"A new model id must have no features. Found features in {folder}, but no "
                f"id_{model_id}.json in {self.save_dir}. Delete the folder of features.",
                code="compat.leftover",
            )
        self.model_ids[model_id] = {"is_featurized": 0, "is_finalized": 0}
        self.serialize_current_model_id_metadata(already_exists=False)

    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        assert self.current_model_id is not None
        state = self.model_ids[self.current_model_id]
        done = int(self.current_store["is_featurized"].sum()) == self.train_set_size
        state["is_featurized"] = int(done)
        if done or not already_exists:
            path = self.save_dir / f"id_{self.current_model_id}.json"
            _write_json(path, {self.current_model_id: state})

    def init_store(self, model_id: int) -> None:
        (self.save_dir / str(model_id)).mkdir(exist_ok=True)
        # Without the lock, two processes could create the same arrays.
        with self.locked():
            self.load_current_store(model_id, mode="w+")

    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        new = {"num_targets": num_targets, "scores_path": str(self._scores_path(exp_name))}
        with self.locked():
            state = self._update_experiment(exp_name, new | {"scores_finalized": 0})
            if (known := state["num_targets"]) != num_targets:
                raise InputError(
                    "An experiment must always have the same number of targets. Found "
                    f"{num_targets} for {exp_name!r}, which has {known} in {self.save_dir}. Use "
                    "another name.",
                    code="compat.other_targets",
                )
            self.load_current_store(model_id, exp_name, num_targets, mode="w+")
            if state["scores_finalized"]:  # Other targets must not be mixed with finished ones.
                self.current_store[f"{exp_name}_grads"][:] = np.nan
        # These arrays are opened as read-only, because several processes may score at the same
        # time.
        self.load_current_store(model_id, mode="r")

    def _update_experiment(self, exp_name: str, new: Any, **changes: Any) -> dict[str, Any]:
        """Return an experiment's state, by default ``new``, after storing ``changes`` to it."""
        experiments = json.loads(self.experiments_file.read_text())
        experiments[exp_name] = experiments.get(exp_name, new) | changes
        _write_json(self.experiments_file, experiments)
        self.experiments |= experiments
        return experiments[exp_name]

    def _scores_path(self, exp_name: str) -> Path:
        return self.save_dir / "scores" / f"{exp_name}.mmap"

    def load_current_store(
        self,
        model_id: int,
        exp_name: str | None = None,
        exp_num_targets: int = -1,
        mode: str = "r+",
    ) -> None:
        self.current_model_id, folder = model_id, self.save_dir / str(model_id)
        n, k, store = self.train_set_size, self.proj_dim, self.current_store
        dtype = np.float16 if self.use_half_precision else np.float32
        if exp_name is None:
            for name, width in (("grads", k), ("features", k), ("out_to_loss", 1)):
                store[name] = _open_map(folder / f"{name}.mmap", (n, width), dtype, mode)
            path = folder / "_is_featurized.mmap"
            store["is_featurized"] = _open_map(path, (n, 1), np.int32, mode)
        else:
            self.current_experiment_name, path = exp_name, folder / f"{exp_name}_grads.mmap"
            # NaN marks targets that are not scored yet. Zeros could be the gradient of a target.
            store[path.stem] = _open_map(path, (exp_num_targets, k), dtype, mode, np.nan)
            # Scores are opened as read-only, because write_scores replaces the whole file.
            shape, path = (n, exp_num_targets), self._scores_path(exp_name)
            store[f"{exp_name}_scores"] = _open_map(path, shape, np.float32, "r")

    def write_scores(self, exp_name: str, scores: np.ndarray) -> np.ndarray:
        """Write the scores, and return them. Changes to the returned array are not saved."""
        path = self._scores_path(exp_name)
        _write_map(path, scores.shape, np.float32, scores)
        self.save_scores(exp_name)
        stored = open_memmap(path, mode="c")
        self.current_store[f"{exp_name}_scores"] = stored
        return stored

    def save_scores(self, exp_name: str) -> None:
        with self.locked():
            self._update_experiment(exp_name, {}, scores_finalized=1)

    def del_grads(self, model_id: int, target: bool = False) -> None:
        folder = self.save_dir / str(model_id)
        for path in folder.glob("*_grads.mmap" if target else "grads.mmap"):
            path.unlink()
        if not target and self.current_model_id == model_id:
            self.current_store["grads"] = None
