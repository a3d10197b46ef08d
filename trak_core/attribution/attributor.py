"""The class ``Attributor``, which computes scores in Python without a run of the pipeline."""

import copy
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import pandas as pd
import torch
from torch import Tensor, nn

from trak_core.attribution.device import PRECISIONS, Compute, float32_precision, usable_device
from trak_core.attribution.fitted_attributor import FittedAttributor, Setup, stored_columns
from trak_core.attribution.fitted_checkpoint import (
    is_normal_matrix_of,
    training_table,
    write_normal_matrix,
)
from trak_core.attribution.inner_products import write_gramian
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.model_fit import fit_of
from trak_core.attribution.write_features import write_features
from trak_core.config.checkpoint_list import (
    Checkpoint,
    checkpoint_table,
    have_several_times,
    mixed_runs,
    runs_of,
    seeming_runs,
)
from trak_core.config.cross_checks import check_exact, check_label_draws, check_preconditioner
from trak_core.config.memory_needs import normal_matrix_need
from trak_core.config.scoring_defaults import features_spec, fill_in_scoring, scores_spec
from trak_core.errors import InputError, listed
from trak_core.model_outputs.about_outputs import (
    TABLE,
    about_output,
    function_location,
    output_name,
)
from trak_core.model_outputs.model_output import ModelOutput, own_output
from trak_core.runtime.progress import notice, progress_bar
from trak_core.settings import TRAIN, Combine, FeaturesSpec, Weighting
from trak_core.study.given_data import split_digest, split_of_data
from trak_core.study.study import Study

# Stored instead of a digest of the training data if the files are in a temporary folder. The data
# need not be hashed, because no later call can use these files.
_IN_MEMORY = "in memory"

Weights = str | Path | Mapping[str, Any]
Output = str | ModelOutput | Callable[..., Tensor]


class Attributor(FittedAttributor):
    """Attribute a model's predictions to its training samples with TRAK.

    The score of training sample i for target j estimates how much training on sample i raised the
    model output f for target j. The features of a sample are the gradient of f, projected to k
    dimensions. Each checkpoint c yields a matrix

        A_c = Phi_c (Phi_c^T W_c Phi_c + ridge_c I)^-1 T_c^T,

    where the rows of Phi_c (n, k) are the features of training samples, the rows of T_c (m, k) are
    the features of targets, and W_c is a diagonal matrix of weights. The scores are computed from
    the matrices A_c and the loss weights Q_c = -dl/df of the training samples, where l is the
    training loss. ``combine`` says how these are multiplied and averaged over checkpoints. The
    batch size, memory limit and device affect scores only through rounding. A run of the pipeline
    with the same settings and checkpoint ids computes the same scores.

    Args:
        model: A ``torch.nn.Module``, which is copied, or a function that returns a module. The
            model is used in evaluation mode.
        output: The model output f to explain: a name such as ``"image_classification"``, a
            ``ModelOutput``, or a function of the model's return value for one sample and of the
            sample's label. With a function, all loss weights are 1, which is only correct if f is
            minus the training loss.
        checkpoints: The weights of trained models: a path, a state dict, a list of paths or state
            dicts, or a dict that maps ids to paths or state dicts. None uses the weights of
            ``model``. A path is a file or folder in any format that a config accepts. If several
            checkpoints come from one training run, pass a dict that maps ids to dicts ``{"path":
            ..., "run": ..., "at": ...}`` with the name of the run and the time, such as the epoch.
            In a list, the ids of checkpoints are the file names without suffix, with ``_`` for
            characters such as ``=``. If two names are equal, the ids are 0, 1, 2, ... The
            projection matrix of a checkpoint depends on its id.
        projection: None for a random projection. ``"exact"`` computes inner products of gradients
            without a projection, and stores n^2 numbers.
        kind: The kind of the projection matrix, such as ``"rademacher"``. None for the cheapest
            kind that is as accurate as a dense matrix.
        proj_dim: The number of dimensions k. Accuracy grows with k, and memory with n k + k^2.
        seed: The seed of the projection matrix.
        damping: The ratio of ridge_c to the mean of w_i |phi_i|^2 over training samples i, where
            w_i is a diagonal entry of W_c and phi_i a row of Phi_c. None stands for 2.
        weighting: ``"plain"`` sets the diagonal of W_c to 1, and ``"curvature"`` sets it to a power
            of the curvature d2l/df2 of the training loss. For ``weighting``, ``combine`` and
            ``loss_weight_power``, None stands for a default that depends on the output and the
            checkpoints.
        combine: How to average scores over checkpoints: ``"product_of_averages"``,
            ``"average_of_products"`` or ``"unit_average"``.
        loss_weight_power: The exponent of the loss weights, above 0 and at most 1.
        normalize: Whether to divide the features of each training sample by their norm.
        parameters: A pattern such as ``"head.*"``, or several. Gradients are computed with respect
            to the parameters whose names match a pattern.
        preconditioner: ``"adam"`` divides gradients by the square root of Adam's second moments,
            which must be stored with the checkpoints.
        label_draws: The number of labels to draw for each training sample from the distribution
            that the model predicts. If it is above 0, Phi_c^T W_c Phi_c is replaced by a matrix
            that is computed from these labels, and whose expectation is the projected Gauss-Newton
            matrix of the training loss.
        features_dtype: The dtype in which features are stored: ``"float32"``, ``"float16"`` or
            ``"int8"``.
        device: A device such as ``"cpu"`` or ``"cuda:1"``, or ``"auto"``, which uses CUDA if it is
            available.
        precision: ``"highest"`` computes matrix products and convolutions in float32. ``"high"``
            uses TF32, which has about three decimal digits, on devices that support it.
        batch_size: The largest number of samples in a batch.
        memory_mb: The memory limit for arrays, in MiB.
        threads: The number of CPU threads for the projection. None for the number that torch uses.
        describe: A function that takes a sample and returns the text that notebooks show for it.

    Example:
        >>> import torch
        >>> from trak_core import Attributor
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
        >>> images = torch.randn(60, 1, 8, 8)
        >>> labels = model(images).argmax(1)  # in practice, the labels used for training
        >>> attributor = Attributor(model, "image_classification", proj_dim=32)
        >>> attributor.fit((images, labels))
        Attributor of 1 checkpoint, fitted to 60 training samples
        >>> scores = attributor.score((images[:2], labels[:2]))
        >>> scores.frame.shape
        (60, 2)
        >>> scores.top(1)["train"].tolist()  # the targets are the first two training samples
        [0, 1]

    Outputs that depend on other samples of the batch are not supported, nor are models on several
    devices.

    Source: Park et al., "TRAK: Attributing Model Behavior at Scale", ICML 2023, equations 16, 17.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        output: Output,
        checkpoints: Weights | Sequence[Weights] | None = None,
        *,
        projection: Literal["exact"] | None = None,
        kind: str | None = None,
        proj_dim: int = 1024,
        seed: int = 0,
        damping: float | None = None,
        weighting: str | None = None,
        combine: str | None = None,
        loss_weight_power: float | None = None,
        normalize: bool = False,
        parameters: str | Sequence[str] = "all",
        preconditioner: Literal["none", "adam"] = "none",
        label_draws: int = 0,
        features_dtype: str = "float32",
        device: str | torch.device = "cpu",
        precision: Literal["highest", "high"] = "highest",
        batch_size: int = 128,
        memory_mb: int = 1000,
        threads: int | None = None,
        describe: Callable[[Any], str] | None = None,
    ) -> None:
        table, self._weights = _read_checkpoints(checkpoints)
        if parameters != "all":
            parameters = [parameters] if isinstance(parameters, str) else [*parameters]
        name = _name_of_output(output)
        config: dict[str, Any] = {
            "model_output": name,
            "projection": projection or _without_none(kind=kind, proj_dim=proj_dim, seed=seed),
            "scoring": _without_none(
                damping=damping,
                weighting=weighting,
                combine=combine,
                loss_weight_power=loss_weight_power,
                normalize=normalize,
                keep="full",
            ),
            "parameters": parameters,
            "preconditioner": preconditioner,
            "label_draws": label_draws,
            "features_dtype": features_dtype,
            "compute": {"shards": 1, "precision": precision},
            "experiments": {},
            "answers": {"tokens": False},
        }
        fill_in_scoring(config, several_times=have_several_times(table))
        own = {"projection": projection or "exact", "proj_dim": proj_dim, "seed": seed}
        own |= {"features_dtype": features_dtype, "precision": precision}
        _check_settings(config["scoring"] | own)
        check_exact(config)
        check_preconditioner(config)
        check_label_draws(config)
        state_dicts = {id_: c.state_dict for id_, c in table.items() if c.state_dict}
        spec = scores_spec(config, features_spec(config, "", state_dicts), runs_of(table))
        torch_device = usable_device(device, projects=projection is None)
        compute = Compute(torch_device, batch_size, memory_mb, threads or torch.get_num_threads())
        super().__init__()
        self._setup = Setup(spec, compute)
        self._model = copy.deepcopy(model) if isinstance(model, nn.Module) else model
        self._output, self._describe = output, describe

    @classmethod
    def of_study(cls, study: Study, config: Mapping[str, Any]) -> Self:
        """Return an attributor for the model of a study, with the settings of a config.

        ``fit()`` without data uses the study's training samples. The config must have the keys
        ``checkpoints`` and ``model_output``. Keys that do not affect scores are ignored.
        """
        projection, compute = config.get("projection", {}), config.get("compute", {})
        scoring = {k: v for k, v in config.get("scoring", {}).items() if k not in {"keep", "top"}}
        others = ("parameters", "preconditioner", "label_draws", "features_dtype")
        limits = ("device", "precision", "batch_size", "memory_mb", "threads")
        checkpoints = config["checkpoints"]
        if isinstance(checkpoints, str):  # the path of a table of checkpoints
            checkpoints = {
                name: _without_none(path=c.path, run=c.run, at=c.at, state_dict=c.state_dict)
                for name, c in checkpoint_table(checkpoints, None).items()
            }
        attributor = cls(
            study.make_model,
            output_name(config["model_output"]),
            checkpoints,
            **({"projection": projection} if isinstance(projection, str) else projection),
            **scoring,
            **{key: config[key] for key in others if key in config},
            **{key: compute[key] for key in limits if key in compute},
        )
        attributor._setup = replace(attributor._setup, study=study)
        return attributor

    def fit(
        self,
        train_data: Any = None,
        folder: str | Path | None = None,
        *,
        ids: Iterable[int | str] | None = None,
    ) -> Self:
        """Compute the features and the normal matrix of the training samples for every checkpoint.

        Args:
            train_data: The samples on which the checkpoints were trained, without random
                augmentation: ``(inputs, labels)`` in tensors, a Dataset or a DataLoader (see
                ``split_of_data``). None for the training samples of the study given to
                ``of_study``.
            folder: The folder in which features and normal matrices are stored, with the same
                layout as the results of a run. None for a temporary folder. A later call with the
                same data and settings reuses the files of finished checkpoints, after checking that
                eight samples still have the stored model outputs.
            ids: An id for each sample. None for 0, 1, 2, ...

        Returns:
            The attributor itself.

        Raises:
            InputError: If the folder contains features that were computed from different data,
                settings, model or output function.
        """
        self._held, self._holds = {}, True
        study = self._setup.study
        if study is not None and train_data is None:
            train = study.split(TRAIN, None)
        else:
            train = split_of_data(train_data, ids)
        is_kept, is_exact = folder is not None, not self._is_projected
        train_digest = split_digest(train) if is_kept or is_exact else _IN_MEMORY
        if folder is None:
            folder = tempfile.mkdtemp(prefix="trak-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        digest = train_digest if is_kept else _IN_MEMORY
        features = replace(self.settings.features, study_digest=digest)
        spec = replace(self.settings, features=features)
        self._setup = replace(
            self._setup,
            spec=spec,
            train=train,
            folder=Path(folder).absolute(),
            train_digest=train_digest if is_exact else None,
        )
        try:
            self._fit_checkpoints(features)
        except BaseException:
            self._setup = replace(self._setup, train=None)
            raise
        return self

    def _fit_checkpoints(self, features: FeaturesSpec) -> None:
        if self._is_projected:
            dim, divides = features.projection["proj_dim"], self.settings.norm_power is not None
            normal_matrix_need(dim, divides=divides).check(self._compute.memory_mb)
        n_steps = len(self.checkpoints) * len(self._train.ids)
        by_digest: dict[str, list[str]] = {}
        with float32_precision(features.precision), progress_bar("fit", n_steps) as bar:
            for name in self.checkpoints:
                digest = self._fit_checkpoint(name, bar)
                by_digest.setdefault(digest, []).append(name)
        for names in by_digest.values():
            if len(names) > 1:
                notice(
                    f"the checkpoints {listed(names)} have the same weights. Check that each path "
                    "or state dict was passed only once."
                )
        self._notice_bad_fit()

    def __repr__(self) -> str:
        n, train = len(self.checkpoints), self._setup.train
        fitted = f"fitted to {len(train.ids)} training samples" if train else "not fitted"
        return f"Attributor of {n} checkpoint{'s' * (n != 1)}, {fitted}"

    def _load(self, name: str) -> LoadedModel:
        spec, output, model = self.settings.features.under(name), self._output, self._model
        own = None if isinstance(output, str) else own_output(output, spec.model_output)
        if not isinstance(output, str | ModelOutput):
            notice(
                f"all loss weights are 1, because {spec.model_output} is a function without loss "
                "weights. This is correct only if the function returns minus the training loss. "
                "Otherwise, pass ModelOutput(value, loss_weight)."
            )
        return LoadedModel.load(
            (lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else model,
            self._weights[name],
            spec,
            self._compute.device,
            output=own,
            pairs=self._train,
            study=self._setup.study,
        )

    def _refuse(self, path: Path, keys: Sequence[str]) -> NoReturn:
        names = ["training data or ids" if key == "study_digest" else key for key in keys]
        is_temporary = self.settings.features.study_digest == _IN_MEMORY
        remedy = "Call `fit` again" if is_temporary else "Pass another folder, or delete this one"
        raise InputError(
            "Stored features must have been computed from the same data, model and settings. The "
            f"file {path} differs in: {', '.join(names)}. {remedy}.",
            code="attribution.other_folder",
        )

    def _fit_checkpoint(self, name: str, bar: Any) -> str:
        """Compute a checkpoint's features and normal matrix if they are not stored yet.

        Returns:
            The digest of the checkpoint's weights.
        """
        path, own, compute = self._features(name), self.settings.under(name), self._compute
        loaded = replace(self._load(name), method_of=self._method_for)
        if path.exists() and self._is_current(name, loaded):
            bar.advance(len(self._train.ids))
        else:
            with bar.counting():
                write = write_features if self._is_projected else write_gramian
                write(path, loaded, self._train, own.of_train(), compute, code="")
        if self._is_projected:
            with self._open_features(name) as train, bar.silent():
                given = self._normal_matrix(name), train, own.of_normal_matrix()
                if not is_normal_matrix_of(*given):
                    write_normal_matrix(*given, code="", memory_mb=compute.memory_mb)
        return loaded.checkpoint_digests["sha256"]

    def _notice_bad_fit(self) -> None:
        with ExitStack() as stack:
            files = [stack.enter_context(self._open_features(name)) for name in self.settings.ends]
            columns = pd.DataFrame(training_table(files))
        fit = fit_of(columns, about_output(self.settings.features.model_output), self._train)
        if fit and fit.is_doubtful:
            notice(
                f"the models predict their training samples badly. {fit.measure} Check that inputs "
                "and labels are the same as in training, and that the checkpoints were saved after "
                "training."
            )

    def _is_current(self, name: str, loaded: LoadedModel) -> bool:
        """Return whether the stored features were computed from the same weights.

        If anything else differs, such as the training data or a setting, raise an error.
        """
        with self._open_features(name) as file:
            differ, columns = self._differing_keys(name, loaded, file), stored_columns(file)
        if differ == ["checkpoint"]:
            return False
        if not differ and not loaded.reproduces(self._train, columns):
            differ = ["model or output function"]
        if differ:
            self._refuse(file.path, differ)
        return True


def _without_none(**settings: Any) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def _read_checkpoints(given: Any) -> tuple[dict[str, Checkpoint], dict[str, Any]]:
    """Return the checkpoints by id, and the weights of each: a path, a state dict or None."""
    if given is None:
        return {"model": Checkpoint("model", path="")}, {"model": None}
    if isinstance(given, str | Path) or _is_state_dict(given):
        given = [given]
    if not isinstance(given, Mapping):
        given = [*given]  # a list, or an iterator such as Path.glob returns
        stems = [_id_of(w) if isinstance(w, str | Path) else "" for w in given]
        are_names = all(stems) and len({*stems}) == len(stems)
        given = {stems[i] if are_names else str(i): weights for i, weights in enumerate(given)}
    if not given:
        message = "`checkpoints` must contain at least one checkpoint. Found none."
        raise InputError(message, code="attribution.no_checkpoint")
    entries: dict[str, Any] = {}
    in_memory: dict[str, Any] = {}
    for name, weights in given.items():
        is_entry = isinstance(weights, Mapping) and not _is_state_dict(weights)
        entry = dict(weights) if is_entry else {"path": weights}
        path = entry.get("path", ".")  # a missing path is refused below
        if path == "" or not isinstance(path, str | PathLike | Mapping):
            raise InputError(
                "A checkpoint must be a path or a state dict, such as `model.state_dict()`. Found "
                f"{path!r:.80} for checkpoint {name}.",
                code="attribution.no_checkpoint",
            )
        if isinstance(entry.get("path"), Mapping):
            # The tensors are copied, because further training would change them in place.
            in_memory[str(name)] = {k: v.detach().clone() for k, v in entry["path"].items()}
            entry["path"] = ""  # A state dict has no path that could contain a training step.
        entries[str(name)] = {k: str(v) if k == "path" else v for k, v in entry.items()}
    table = checkpoint_table(entries, None)
    paths = {name: Path(c.path) for name, c in table.items() if c.path}
    missing = [path for path in paths.values() if not path.exists()]
    if missing:
        raise InputError(
            f"A checkpoint must be an existing file or folder. Found nothing at {missing[0]}. "
            "Check the path.",
            code="attribution.no_checkpoint",
        )
    for told in filter(None, (seeming_runs(table), mixed_runs(table))):
        notice(told)
    return table, paths | in_memory


def _id_of(path: str | Path) -> str:
    """Return a checkpoint's id, such as ``epoch_1-step_60`` for ``epoch=1-step=60.ckpt``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", Path(path).stem).lstrip(".-")


def _is_state_dict(given: Any) -> bool:
    is_filled = isinstance(given, Mapping) and bool(given)
    return is_filled and all(isinstance(value, Tensor) for value in given.values())


def _name_of_output(output: Output) -> str:
    """Return the name by which files refer to a model output."""
    if isinstance(output, str):
        if output not in TABLE and function_location(output) is None:
            raise InputError(
                "`output` must be a function, a ModelOutput, a text like `file.py:function`, or "
                f"one of the names {', '.join(TABLE)}. Found {output!r}.",
                code="attribution.output",
            )
        return output
    function = output.value if isinstance(output, ModelOutput) else output
    return str(getattr(function, "__qualname__", type(function).__name__))


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raise an error for settings with values that the schema of the config does not allow."""
    kinds = {"proj_dim": Integral, "seed": Integral, "damping": Real, "loss_weight_power": Real}
    for key, kind in kinds.items():
        if not isinstance(value := settings[key], kind):
            needed = "an integer" if kind is Integral else "a number"
            message = f"`{key}` must be {needed}. Found {value!r}."
            raise InputError(message, code="attribution.scoring")
    power, damping = settings["loss_weight_power"], settings["damping"]
    if not 0 < power <= 1 or not 0 <= damping < float("inf"):
        raise InputError(
            "`loss_weight_power` must be above 0 and at most 1, and `damping` must be finite and "
            f"at least 0. Found `loss_weight_power` {power!r} and `damping` {damping!r}.",
            code="attribution.scoring",
        )
    allowed = {"combine": Combine, "weighting": Weighting, "precision": PRECISIONS}
    allowed |= {"projection": ["exact"], "features_dtype": ["float32", "float16", "int8"]}
    for key, values in allowed.items():
        if settings[key] not in [*values]:
            raise InputError(
                f"`{key}` must be one of {', '.join(values)}. Found {settings[key]!r}.",
                code="attribution.scoring",
            )
