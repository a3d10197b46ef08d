"""TRAK's store: a folder of memory maps and small JSON files, safe with several processes.

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
    with written_whole(path) as partial:
        partial.write_text(json.dumps(content), encoding="utf-8")


def _write_map(path: Path, shape: tuple[int, ...], dtype: Any, values: Any) -> None:
    with written_whole(path) as partial:
        array = open_memmap(partial, mode="w+", shape=shape, dtype=dtype)
        if np.any(values):  # a file of zeros takes no room on the disk
            array[:] = values
        array.flush()


def _open_map(
    path: Path, shape: tuple[int, ...], dtype: Any, mode: str, fill: float = 0
) -> np.memmap | None:
    """Return a ``.npy`` file as an array; where there is none, make it in mode ``w+``, or None."""
    if not path.exists():
        if mode != "w+":
            return None
        _write_map(path, shape, dtype, fill)
    return open_memmap(path, mode="r" if mode == "r" else "r+")


class AbstractSaver(ABC):
    """Where a TRAKer keeps its arrays and what it knows about them.

    Attributes:
        model_ids: Model id -> is_featurized, is_finalized; once known, lambda_reg and checkpoint.
        experiments: Name -> num_targets, scores_path, scores_finalized.
        current_model_id: Whose arrays ``current_store`` has, by their names; None at first.
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
        """Make the folder, or read what it holds; one made with other ``metadata`` is refused."""
        self.save_dir = Path(save_dir).resolve()
        self.metadata, self.load_from_save_dir = dict(metadata), load_from_save_dir
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
        self.current_store: dict[str, Any] = dict.fromkeys(("grads", "out_to_loss", "features"))
        with self.locked():
            for path, first in ((self.metadata_file, self.metadata), (self.experiments_file, {})):
                if not path.exists():
                    _write_json(path, first)
        # Earlier stores don't say their dtype.
        stored = {"dtype": self.metadata.get("dtype"), **json.loads(self.metadata_file.read_text())}
        for name, value in self.metadata.items():
            if stored.get(name) != value:
                raise AssertedError(
                    f"A store keeps its settings. Found {name} {stored.get(name)!r} in "
                    f"{self.save_dir} and {value!r} here. Use the same, or another save_dir.",
                    code="compat.other_settings",
                )
        self.refresh()

    def refresh(self) -> None:
        """Read what other processes have added, if ``load_from_save_dir`` allows it."""
        if self.load_from_save_dir:
            for path in self.save_dir.glob("id_*.json"):
                self._read_id(path)
            self.experiments |= json.loads(self.experiments_file.read_text())

    def _read_id(self, path: Path) -> None:
        self.model_ids |= {int(m): state for m, state in json.loads(path.read_text()).items()}

    def is_registered(self, model_id: int) -> bool:
        """Return whether the folder holds this model id, made by this or another process."""
        path = self.save_dir / f"id_{model_id}.json"
        if model_id not in self.model_ids and path.exists():
            self._read_id(path)
        return model_id in self.model_ids

    def write_scores(self, exp_name: str, scores: np.ndarray) -> np.ndarray:
        """Write the scores of an experiment into ``current_store``, and return them."""
        self.current_store[f"{exp_name}_scores"][:] = scores
        self.save_scores(exp_name)
        return self.current_store[f"{exp_name}_scores"]

    @contextlib.contextmanager
    def locked(self) -> Generator[None, None, None]:
        """Hold the lock of the folder's shared files, where its disk knows locks."""
        with (self.save_dir / ".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                if self._knows_locks:
                    self.logger.warning(
                        "%s: the disk knows no locks. Let one process at a time write there.",
                        self.save_dir,
                    )
                self._knows_locks = False
            yield

    @abstractmethod
    def register_model_id(
        self, model_id: int, _allow_featurizing_already_registered: bool = False
    ) -> None:
        """Make the store of a new model id; with the flag, go on with one that exists."""

    @abstractmethod
    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Write the state of the current model id, when it is new or fully featurized."""

    @abstractmethod
    def init_store(self, model_id: int) -> None:
        """Make the missing arrays of a model id, and open all of them."""

    @abstractmethod
    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """Make the missing arrays of an experiment for a model id, and open them."""

    @abstractmethod
    def load_current_store(
        self,
        model_id: int,
        exp_name: str | None = None,
        exp_num_targets: int = -1,
        mode: str = "r+",
    ) -> None:
        """Open the arrays of a model id, or of its experiment; mode ``w+`` makes missing ones."""

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
        self.train_set_size, self.proj_dim = train_set_size, proj_dim

    def register_model_id(
        self, model_id: int, _allow_featurizing_already_registered: bool = False
    ) -> None:
        is_new = not self.is_registered(model_id)
        if not is_new and not _allow_featurizing_already_registered:
            words = f"Model id {model_id} is registered: `load_checkpoint` goes on with it."
            raise ModelIDException(words, code="compat.registered")
        self.init_store(model_id)
        if not is_new or self.is_registered(model_id):
            return  # another process may have done it in this moment
        if self.current_store["is_featurized"].any():
            raise ModelIDException(
                "The folder of a new model id must hold no features. Found some in "
                f"{self.save_dir / str(model_id)}, and no id_{model_id}.json: delete the folder.",
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
        # Two processes may share a model id: neither may put new arrays over the other's.
        with self.locked():
            self.load_current_store(model_id, mode="w+")

    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        first = {"num_targets": num_targets, "scores_path": str(self._scores_path(exp_name))}
        with self.locked():
            known = self._experiment(exp_name, first | {"scores_finalized": 0})["num_targets"]
            if known != num_targets:
                raise InputError(
                    f"An experiment has one set of targets. Found {num_targets} targets for "
                    f"{exp_name!r}, which has {known} in {self.save_dir}: use another name.",
                    code="compat.other_targets",
                )
            self.load_current_store(model_id, exp_name, num_targets, mode="w+")
        # Opened for reading, because many processes may score at once.
        self.load_current_store(model_id, mode="r")

    def _experiment(self, exp_name: str, first: Any, **changes: Any) -> dict[str, Any]:
        """Return what is known of an experiment, with changes written down; hold the lock."""
        experiments = json.loads(self.experiments_file.read_text())
        experiments[exp_name] = experiments.get(exp_name, first) | changes
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
            # NaN marks targets that were never scored; zeros would look like a result.
            store[path.stem] = _open_map(path, (exp_num_targets, k), dtype, mode, np.nan)
            # Scores are results: float32, and replaced as a whole.
            shape, path = (n, exp_num_targets), self._scores_path(exp_name)
            store[f"{exp_name}_scores"] = _open_map(path, shape, np.float32, "r")

    def write_scores(self, exp_name: str, scores: np.ndarray) -> np.ndarray:
        """Write the scores of an experiment whole; changes of what comes back stay in memory."""
        path = self._scores_path(exp_name)
        _write_map(path, scores.shape, np.float32, scores)
        self.save_scores(exp_name)
        stored = open_memmap(path, mode="c")
        self.current_store[f"{exp_name}_scores"] = stored
        return stored

    def save_scores(self, exp_name: str) -> None:
        with self.locked():
            self._experiment(exp_name, {}, scores_finalized=1)

    def del_grads(self, model_id: int, target: bool = False) -> None:
        folder = self.save_dir / str(model_id)
        for path in folder.glob("*_grads.mmap" if target else "grads.mmap"):
            path.unlink()
        if not target and self.current_model_id == model_id:
            self.current_store["grads"] = None
