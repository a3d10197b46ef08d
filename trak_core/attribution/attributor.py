"""Attributor: scores of training samples for targets, in process."""

import copy
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import torch
from torch import nn

from trak_core.artifacts import FEATURES, GRAMIAN, NORMAL_MATRIX, open_artifact
from trak_core.attribution.checkpoint_scorers import Compute, stored_columns
from trak_core.attribution.fitted_attributor import FittedAttributor, Setup
from trak_core.attribution.fitted_checkpoint import write_normal_matrix
from trak_core.attribution.given_settings import (
    Output,
    Weights,
    check_scoring,
    device_named,
    name_of_output,
    read_checkpoints,
    without_none,
)
from trak_core.attribution.inner_products import write_gramian
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.sample_outputs import model_output
from trak_core.attribution.write_features import write_features
from trak_core.config.checkpoint_list import checkpoint_table, come_from_along_runs, runs_of
from trak_core.config.cross_checks import check_exact, check_preconditioner
from trak_core.config.memory_needs import normal_matrix_need
from trak_core.config.scoring_settings import features_spec, fill_in_scoring, scores_spec
from trak_core.dependency_digests import content_digest
from trak_core.errors import InputError, listed
from trak_core.model_outputs.about_outputs import output_name
from trak_core.model_outputs.model_output import ModelOutput, own_output
from trak_core.spec import TRAIN
from trak_core.study.given_data import split_of_data, subset_digest
from trak_core.study.study import Study
from trak_core.system.progress import notice, progress_bar

# Keys of ``compute`` that decide how much is computed at once, and where.
_COMPUTE = ("device", "batch_size", "memory_mb", "threads")
# In place of a digest of the data, where there is no folder to resume from.
_IN_MEMORY = "in memory"


class Attributor(FittedAttributor):
    """Which training samples made a model predict that? TRAK scores, and exact ones, in process.

    Scores of checkpoint c are A_c = Phi_c (Phi_c^T W_c Phi_c + ridge_c I)^-1 T_c^T times loss
    weights Q_c, averaged over checkpoints: Phi_c are random projections of the training samples'
    gradients of the model output, T_c those of the targets. They are the scores that a run of the
    pipeline gives with the same settings and ids of checkpoints.

    Example:
        >>> import torch
        >>> from trak_core import Attributor
        >>> _ = torch.manual_seed(0)
        >>> images, labels = torch.randn(60, 1, 8, 8), torch.randint(3, (60,))
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
        >>> attributor = Attributor(model, "image_classification", proj_dim=32)
        >>> attributor.fit((images, labels))
        Attributor of 1 checkpoint, fitted to 60 training samples
        >>> scores = attributor.score((images[:2], labels[:2]))
        >>> scores.top(3)  # doctest: +SKIP
        >>> scores.frame.shape
        (60, 2)

    What is not supported: an output that compares the samples of a batch; models over several
    devices; evaluation by retraining, which the pipeline has.

    Source: Park et al., "TRAK: Attributing Model Behavior at Scale", ICML 2023, equations 16, 17.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        output: Output,
        checkpoints: Weights | Sequence[Weights] | None = None,
        *,
        projection: Literal["exact", "gauss_newton"] | None = None,
        kind: str | None = None,
        proj_dim: int = 1024,
        seed: int = 0,
        damping: float | None = None,
        weighting: str | None = None,
        combine: str | None = None,
        loss_weight_power: float | None = None,
        normalize: bool = False,
        parameters: Literal["all"] | Sequence[str] = "all",
        preconditioner: Literal["none", "adam"] = "none",
        features_dtype: str = "float32",
        device: str | torch.device = "cpu",
        batch_size: int = 128,
        memory_mb: int = 1000,
        threads: int | None = None,
        describe: Callable[[Any], str] | None = None,
    ) -> None:
        """Settings have the names, the meanings and the defaults of the config's keys.

        Args:
            model: A module, which is copied now; or a function that returns one.
            output: A name that ``model_output`` of the config takes, such as
                ``image_classification``; a ``ModelOutput``; or f itself, a function of what the
                model returned for one sample and of its label. With a function of one's own all
                training samples weigh alike, Q = 1, which is right where f = -loss; a
                ``ModelOutput`` has a ``loss_weight``.
            checkpoints: Weights: the path of a file or folder of any kind that the config takes,
                or a state dict. Or a list of such, or a dict from id to either; an entry of the
                dict may be ``{"path": ..., "run": ..., "at": ..., "state_dict": ...}``, for several
                checkpoints of one run, ``path`` a state dict or a path. A list's ids are the
                names of files without suffix where these differ, else 0, 1, 2, ... The id decides
                the projection matrix. None for the weights that the model has.
            projection: ``exact`` for inner products of whole gradients, ``gauss_newton`` for the
                Gauss-Newton matrix of the training loss; None for a random projection.
            kind: The projection's kind; None for the cheapest of full quality for the model's size.
            proj_dim: k.
            seed: Seed of the projection matrix.
            damping: lambda, relative to the mean squared norm of the training features; 2 if None,
                0.1 with ``gauss_newton``.
            weighting: ``plain`` or ``curvature``.
            combine: How checkpoints come together; see ``scoring.combine``.
            loss_weight_power: In (0, 1].
            normalize: Whether training samples' features are divided by their lengths.
            parameters: Patterns of the names of the parameters to differentiate.
            preconditioner: ``adam`` divides gradients by the root of the second moments that lie
                with a checkpoint.
            features_dtype: How features are stored: ``float32``, ``float16`` or ``int8``.
            device: ``cpu``, ``cuda``, ``cuda:1``, ...; ``auto`` is CUDA where torch finds it.
            batch_size: Samples differentiated at once, at most.
            memory_mb: MiB for arrays.
            threads: CPU threads of the projection; None for as many as torch uses.
            describe: Returns a sample as a text, for notebooks.
        """
        table, self._weights = read_checkpoints(checkpoints)
        name = name_of_output(output)
        config: dict[str, Any] = {
            "model_output": name,
            "projection": projection or without_none(kind=kind, proj_dim=proj_dim, seed=seed),
            "scoring": without_none(
                damping=damping,
                weighting=weighting,
                combine=combine,
                loss_weight_power=loss_weight_power,
                normalize=normalize,
                keep="full",
            ),
            "parameters": parameters if parameters == "all" else [*parameters],
            "preconditioner": preconditioner,
            "features_dtype": features_dtype,
            **{"compute": {"shards": 1}, "experiments": {}, "answers": {"tokens": False}},
        }
        defaults = fill_in_scoring(config, along=come_from_along_runs(table))
        check_scoring(config["scoring"])
        check_exact(config)
        check_preconditioner(config)
        parts = {id_: part for id_, c in table.items() if (part := c.state_dict)}
        spec = scores_spec(config, features_spec(config, "", parts), runs_of(table))
        place = device_named(device, is_projected=projection is None)
        compute = Compute(place, batch_size, memory_mb, threads or torch.get_num_threads())
        super().__init__()
        self._setup = Setup(spec, compute)
        self.defaults = defaults
        self._model = copy.deepcopy(model) if isinstance(model, nn.Module) else model
        self._output, self._describe = output, describe

    @classmethod
    def of_study(cls, study: Study, config: Mapping[str, Any]) -> Self:
        """Return the attributor of a study, by the keys of a config; the study has the data.

        ``checkpoints`` and ``model_output`` must be there. ``projection``, ``scoring``,
        ``parameters``, ``preconditioner``, ``features_dtype`` and ``compute`` count if they are;
        all others say what jobs do besides.
        """
        projection, compute = config.get("projection", {}), config.get("compute", {})
        scoring = {k: v for k, v in config.get("scoring", {}).items() if k not in {"keep", "top"}}
        own = ("parameters", "preconditioner", "features_dtype")
        checkpoints = config["checkpoints"]
        if isinstance(checkpoints, str):  # a table
            table = checkpoint_table(checkpoints, None)
            fields = ("path", "run", "at", "state_dict")
            checkpoints = {
                name: without_none(**{key: getattr(c, key) for key in fields})
                for name, c in table.items()
            }
        made = cls(
            study.make_model,
            output_name(config["model_output"]),
            checkpoints,
            **({"projection": projection} if isinstance(projection, str) else projection),
            **scoring,
            **{key: config[key] for key in own if key in config},
            **{key: compute[key] for key in _COMPUTE if key in compute},
        )
        made._setup = replace(made._setup, study=study)
        return made

    def fit(
        self,
        train_data: Any = None,
        folder: str | Path | None = None,
        *,
        ids: Iterable[int | str] | None = None,
    ) -> Self:
        """Compute the training samples' features and normal matrices under every checkpoint.

        With ``gauss_newton`` there are none, and ``score`` does all the work.

        Args:
            train_data: The samples that the checkpoints were trained on, without random
                augmentation: ``(inputs, labels)`` in tensors, a Dataset or a DataLoader (see
                ``split_of_data``). None for the study's, where a study made the attributor.
            folder: Keeps the files, in the layout of a run's results. A further call with the same
                data and settings takes the checkpoints that were finished, after it has compared
                the model outputs of some samples, and computes the others. None for a temporary
                folder.
            ids: An id a sample; 0, 1, 2, ... if None.

        Returns:
            The attributor itself.

        Raises:
            InputError: If the folder has features of other data, settings, or another model or
                output function.
        """
        self._held, self._holds = {}, True
        study = self._setup.study
        if study is not None and train_data is None:
            train = study.split(TRAIN, None)
        else:
            train = split_of_data(train_data, ids)
        if folder is None:
            folder, digest = tempfile.mkdtemp(prefix="trak-"), _IN_MEMORY
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        else:
            digest = content_digest(train.ids, subset_digest(train, range(len(train.ids))))
        features = replace(self._spec.features, study_digest=digest)
        spec = replace(self._spec, features=features)
        self._setup = replace(self._setup, spec=spec, train=train, folder=Path(folder))
        if self._is_newton:
            return self
        if self._is_projected:
            dim, norm_power = features.projection["proj_dim"], spec.of_normal_matrix().norm_power
            need = normal_matrix_need(dim, divides=norm_power is not None)
            need.check(self._compute.memory_mb)
        n_steps = len(self.checkpoints) * len(self._train.ids)
        same: dict[str, list[str]] = {}
        with progress_bar("fit", n_steps) as bar:
            for name in self.checkpoints:
                digest = self._fit_checkpoint(name, bar)
                same.setdefault(digest, []).append(name)
        for names in same.values():
            if len(names) > 1:
                notice(f"the checkpoints {listed(names)} have the same weights.")
        return self

    def __repr__(self) -> str:
        """Return the number of checkpoints and of training samples."""
        n, train = len(self.checkpoints), self._setup.train
        fitted = f"fitted to {len(train.ids)} training samples" if train else "not fitted"
        return f"Attributor of {n} checkpoint{'s' * (n != 1)}, {fitted}"

    def _load(self, name: str) -> LoadedModel:
        """Return the model under a checkpoint."""
        spec, output = self._spec.features.under(name), self._output
        device = self._compute.device

        def output_of(model: nn.Module) -> ModelOutput:
            if isinstance(output, str):
                return model_output(output, model, self._train, device, self._setup.study)
            if not isinstance(output, ModelOutput):
                notice(
                    f"all training samples weigh alike (Q = 1) under {spec.model_output}, which is "
                    "right where it is minus the training loss. ModelOutput(value, loss_weight) "
                    "has other weights."
                )
            return own_output(output, spec.model_output)

        made = self._model
        make = (lambda: copy.deepcopy(made)) if isinstance(made, nn.Module) else made
        return LoadedModel.load(make, self._weights[name], spec, output_of, device)

    def _refuse(self, path: Path, keys: Sequence[str]) -> NoReturn:
        names = ["training data or ids" if key == "study_digest" else key for key in keys]
        is_temporary = self._spec.features.study_digest == _IN_MEMORY
        remedy = "Call `fit` again" if is_temporary else "Name another folder, or delete this one"
        raise InputError(
            "Features that `fit` has kept must be of the same data, model and settings as now. "
            f"Found a difference in {', '.join(names)}, in {path}. {remedy}.",
            code="attribution.other_folder",
        )

    def _fit_checkpoint(self, name: str, bar: Any) -> str:
        """Make the files of a checkpoint that are not there; return the digest of its weights."""
        path, own, compute = self._features(name), self._spec.under(name), self._compute
        loaded = self._load(name)
        sizes = {"batch_size": compute.batch_size, "memory_mb": compute.memory_mb}
        is_made = path.exists() and self._is_made(path, name, loaded)
        if is_made:
            bar.advance(len(self._train.ids))
        else:
            with bar.counting():
                given = path, loaded, self._train
                if self._is_projected:
                    write_features(
                        *given,
                        own.of_train(),
                        method_of=self._chosen,
                        code="",
                        threads=compute.threads,
                        **sizes,
                    )
                else:
                    write_gramian(*given, None, own.of_train(), code="", **sizes)
        digest = loaded.checkpoint_digests["sha256"]
        if not self._is_projected:
            return digest
        with open_artifact(path, FEATURES) as train:
            matrix, spec = self._normal_matrix(name), own.of_normal_matrix()
            if not matrix.exists() or not _is_of(matrix, train.content_hash, spec.as_dict()):
                with bar.silent():
                    memory_mb = compute.memory_mb
                    write_normal_matrix(matrix, train, spec, code="", memory_mb=memory_mb)
        return digest

    def _is_made(self, path: Path, name: str, loaded: LoadedModel) -> bool:
        """Return whether a file is of this checkpoint; refuse one of other data or settings."""
        expected = self._file_spec(name, loaded)
        with open_artifact(path, FEATURES if self._is_projected else GRAMIAN) as file:
            differ = [key for key in expected if expected[key] != file.spec.get(key)]
            columns = stored_columns(file)
        if differ == ["checkpoint"]:
            return False
        if not differ and not loaded.reproduces(self._train, columns):
            differ = ["model or output function"]
        if differ:
            self._refuse(path, differ)
        return True


def _is_of(path: Path, features_hash: str, spec: Mapping[str, Any]) -> bool:
    """Return whether a normal matrix is made of these features, by this spec."""
    with open_artifact(path, NORMAL_MATRIX) as file:
        own = {key: file.spec.get(key) for key in spec if key not in {"projection", "checkpoint"}}
        expected = {key: spec[key] for key in own}
        return (own, file.spec.get("features")) == (expected, features_hash)
