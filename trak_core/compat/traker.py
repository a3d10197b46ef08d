"""Compute TRAK scores with ``TRAKer``, the main class of the package ``trak``."""

import logging
import math
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.attribution.score_formulas import combined
from trak_core.compat.gradient_computers import (
    AbstractGradientComputer,
    FunctionalGradientComputer,
    chosen_parameters,
)
from trak_core.compat.modelout_functions import (
    TASK_TO_MODELOUT,
    AbstractModelOutput,
    classification_batch,
    is_unmodified,
)
from trak_core.compat.projectors import AbstractProjector, BasicProjector, CudaProjector
from trak_core.compat.savers import AbstractSaver, AssertedError, MmapSaver, ModelIDException
from trak_core.compat.score_computers import AbstractScoreComputer, BasicScoreComputer
from trak_core.errors import InputError, listed
from trak_core.gradients import check_labels, check_samples_apart, count_classes, in_chunks
from trak_core.model_outputs.supervised import CLASSIFICATION
from trak_core.settings import Combine, ProjectionSpec
from trak_core.study.load_checkpoint import load_state_dict, state_dict_sha256

Positions = Iterable[int] | np.ndarray | Tensor | None
# The largest number of samples in a backward pass on a CPU. With more, most networks are slower.
_SAMPLES_AT_ONCE = 128


def _positions(inds: Positions, num_samples: int | None, start: int, n: int, end: int) -> list[int]:
    """Return the positions, in the training set or the targets, of a batch's ``n`` samples.

    They are ``inds`` or, if ``num_samples`` is given, consecutive numbers from ``start`` on.
    """
    if (inds is None) == (num_samples is None):
        count = "both" if num_samples else "neither"
        message = f"Give exactly one of `num_samples` and `inds`. Found {count}."
        raise AssertedError(message, code="compat.inds_or_num_samples")
    chosen = range(start, start + (num_samples or 0)) if inds is None else inds
    rows = [operator.index(i) for i in chosen]
    if not len(rows) == len({*rows}) == n or any(not 0 <= i < end for i in rows):
        raise InputError(
            f"A batch of {n} samples needs {n} different positions from 0 to {end - 1}. Found "
            f"{len(rows)}: {listed(rows)}.",
            code="compat.positions",
        )
    return rows


def _cast(values: Tensor, dtype: torch.dtype, ids: Sequence[int], name: str) -> np.ndarray:
    """Return values, a row for each sample, in ``dtype``. Raise an error if any is not finite."""
    narrow = values.detach().cpu().to(dtype)
    lost = ~narrow.isfinite().all(dim=1)
    if lost.any():
        raise InputError(
            f"The {name} must be finite, and in float16 below 65504. Found up to "
            f"{values[lost].abs().max():.2g} for samples {listed(np.array(ids)[lost].tolist())}. "
            "Check these samples and the checkpoint, or set use_half_precision=False.",
            code="compat.not_stored",
        )
    return narrow.numpy()


def _check_not_zero(gradients: np.ndarray) -> None:
    """Raise an error if the projected gradients (B, k) of several samples are all 0."""
    if len(gradients) > 1 and not gradients.any():
        raise InputError(
            f"Gradients must not be 0 for all samples. Found only zeros for {len(gradients)} "
            f"samples, in {gradients.dtype}. `get_output` gets one sample at a time. A contrastive "
            "output must compare it with fixed samples, as CLIPModelOutput does.",
            code="compat.all_zero",
        )


class TRAKer:
    """Compute TRAK scores: how much each training sample raises the model output of a target.

    1. For each checkpoint, call ``load_checkpoint`` and ``featurize``. 2. Call
    ``finalize_features``. 3. For each checkpoint, call ``start_scoring_checkpoint`` and ``score``.
    4. Call ``finalize_scores``. Results are stored in ``save_dir``, and ``saver.current_store``
    contains the open arrays. If a process is stopped and started again, results that are stored are
    not computed again. Several processes may work on different model ids at the same time.

    Source: Park et al., "TRAK: Attributing Model Behavior at Scale", ICML 2023, with the
    conventions of the package ``trak``, version 0.3.2.
    """

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput | str,
        train_set_size: int,
        save_dir: str | Path = "./trak_results",
        load_from_save_dir: bool = True,
        device: str | torch.device = "cuda",
        gradient_computer: type[AbstractGradientComputer] = FunctionalGradientComputer,
        projector: AbstractProjector | None = None,
        saver: type[AbstractSaver] | None = None,
        score_computer: type[AbstractScoreComputer] | None = None,
        proj_dim: int | None = 2048,
        logging_level: int = logging.INFO,
        use_half_precision: bool = True,
        proj_max_batch_size: int = 32,
        projector_seed: int = 0,
        grad_wrt: Iterable[str] | None = None,
        lambda_reg: float = 0.0,
    ) -> None:
        """Create ``save_dir``, or open one that was created with the same settings.

        ``task`` is a key of ``TASK_TO_MODELOUT`` or a model output. The model and the batches must
        be on ``device``. ``gradient_computer``, ``saver`` and ``score_computer`` are classes.
        ``projector`` is an instance, whose ``proj_dim`` is used. None selects a rademacher
        projection to ``proj_dim`` dimensions, a number that should be well below ``train_set_size``
        and the number of parameters. ``grad_wrt`` contains the names of the parameters for which
        gradients are computed. None selects all. With ``load_from_save_dir``, model ids and
        experiments that other processes have stored are used, too. With ``use_half_precision``,
        arrays are stored as float16. ``proj_max_batch_size`` is ignored.
        """
        if not 0 <= lambda_reg < math.inf:
            message = f"`lambda_reg` must be a finite number >= 0. Found {lambda_reg!r}."
            raise InputError(message, code="compat.lambda_reg")
        self.model, self.device, self.lambda_reg = model, device, float(lambda_reg)
        self.task = TASK_TO_MODELOUT[task]() if isinstance(task, str) else task
        self.train_set_size, self.proj_seed = train_set_size, projector_seed
        self.dtype = torch.float16 if use_half_precision else torch.float32
        self.grad_wrt = None if grad_wrt is None else list(grad_wrt)
        parameters = chosen_parameters(model, self.grad_wrt)
        self.num_params = sum(parameter.numel() for parameter in model.parameters())
        self.num_params_for_grad = sum(parameter.numel() for parameter in parameters.values())
        self.normalize_factor = torch.tensor(float(self.num_params_for_grad)).sqrt()
        self.init_projector(projector, proj_dim, proj_max_batch_size)
        given: dict[str, Any] = {"dtype": self.dtype, "device": device}
        n_params = self.num_params_for_grad
        computer: Any = gradient_computer
        self.gradient_computer: Any = computer(
            model=model, task=self.task, grad_dim=n_params, grad_wrt=self.grad_wrt, **given
        )
        given |= {"logging_level": logging_level, "lambda_reg": self.lambda_reg}
        self.score_computer = (score_computer or BasicScoreComputer)(**given)
        self.score_computer.max_rank = min(train_set_size, n_params)
        self.save_dir, self.load_from_save_dir = Path(save_dir).resolve(), load_from_save_dir
        spec = self._projection(0)
        matrix = spec.as_dict() if spec else {}
        store: Any = saver or MmapSaver
        self.saver: AbstractSaver = store(
            save_dir=self.save_dir,
            metadata={
                "JL dimension": self.proj_dim,
                "JL matrix type": str(getattr(self.projector, "proj_type", "custom")),
                "train set size": train_set_size,
                # A folder that trak wrote does not have this key. It is refused, because trak's
                # projection matrices cannot be computed here.
                "matrix": {key: value for key, value in matrix.items() if key != "stream"},
                "parameters": list(parameters),
                "dtype": str(self.dtype),
            },
            train_set_size=train_set_size,
            proj_dim=self.proj_dim,
            load_from_save_dir=load_from_save_dir,
            logging_level=logging_level,
            use_half_precision=use_half_precision,
        )
        self._last_ind = self._last_ind_target = 0
        self.ckpt_loaded: int | str = "no ckpt loaded"
        self._scoring: tuple[int, str, int] | None = None
        self._n_classes: int | None = None

    def init_projector(
        self, projector: AbstractProjector | None, proj_dim: int | None, proj_max_batch_size: int
    ) -> None:
        """Set ``self.projector``, by default a rademacher projection, and ``self.proj_dim``."""
        self.projector: Any = projector
        if projector is None:
            device = torch.empty(0, device=self.device).device  # Fails if the device is missing.
            kind: Any = CudaProjector if device.type == "cuda" else BasicProjector
            sizes = self.num_params_for_grad, proj_dim, self.proj_seed
            self.projector = kind(*sizes, "rademacher", device, max_batch_size=proj_max_batch_size)
        # A proj_dim of 0 means that gradients are not projected.
        self.proj_dim: int = self.projector.proj_dim or self.num_params_for_grad

    def _projection(self, model_id: int) -> ProjectionSpec | None:
        """Return the definition of a model id's projection. None for a user-defined projector."""
        is_known, n_params = is_unmodified(self.projector), self.num_params_for_grad
        return self.projector.spec(model_id, n_params) if is_known else None

    def _load_weights(self, checkpoint: Mapping[str, Tensor], model_id: int) -> str:
        """Load a state dict into the model, and return the SHA-256 of the model's weights."""
        self.ckpt_loaded, self._scoring, self._n_classes = "no ckpt loaded", None, None
        self._projection(model_id)  # Raises an error if the model id is out of range.
        load_state_dict(self.model, checkpoint, f"model id {model_id}")
        self.gradient_computer.load_model_params(self.model)
        return state_dict_sha256(self.model.state_dict())

    def _check_weights(self, model_id: int, digest: str) -> None:
        if self.saver.model_ids[model_id].get("checkpoint", digest) != digest:
            raise InputError(
                "A model id must always have the same weights. Found weights that differ from "
                f"those featurized as {model_id} in {self.save_dir}. Use another model id.",
                code="compat.other_weights",
            )

    def load_checkpoint(
        self,
        checkpoint: Mapping[str, Tensor],
        model_id: int,
        _allow_featurizing_already_registered: bool = False,
    ) -> None:
        """Load a state dict into the model, and create or open the arrays of ``model_id``.

        ``model_id`` is a number from 0 to 2^32 - 1. It determines the projection matrix, and must
        always have the same weights. Features that are already stored are kept.
        ``_allow_featurizing_already_registered`` is ignored.
        """
        model_id, saver = operator.index(model_id), self.saver
        digest = self._load_weights(checkpoint, model_id)
        if saver.is_registered(model_id):
            saver.load_current_store(model_id)
        else:
            saver.register_model_id(model_id, _allow_featurizing_already_registered)
        if saver.current_store["is_featurized"].any():
            self._check_weights(model_id, digest)
        saver.model_ids[model_id]["checkpoint"] = digest
        # A process may have been killed after storing the last samples, but before storing the
        # state.
        saver.serialize_current_model_id_metadata(already_exists=False)
        self._last_ind, self.ckpt_loaded = 0, model_id

    def _gradients(
        self, batch: Sequence[Tensor], model_id: int, ids: Sequence[int]
    ) -> tuple[np.ndarray, Tensor | None]:
        """Return a batch's projected gradients, and its loss weights if they are known, else None.

        The gradients, shape (B, k), are divided by the square root of the number of parameters.
        """
        # The user's code may have put the model into training mode since load_checkpoint.
        self.model.eval()
        samples = classification_batch(self.task, batch)
        if samples is not None:
            labels, given = samples.labels, (self.model, CLASSIFICATION)
            if self._n_classes is None:
                # These checks use the label 0, because the labels have not been checked yet.
                check_samples_apart(*given, replace(samples, labels=torch.zeros_like(labels)))
                self._n_classes = count_classes(*given, samples, labels.device)
            check_labels(labels, CLASSIFICATION, self._n_classes, ids)
        computer = self.gradient_computer
        projection = self._projection(model_id) if is_unmodified(computer) else None

        def compute(start: int, stop: int) -> tuple[Tensor, Tensor | None]:
            part = [t[start:stop] for t in batch]
            if projection is not None:
                return computer.features(part, projection, ids[start:stop])
            gradients = computer.compute_per_sample_grad(batch=part)
            return self.projector.project(gradients, model_id=model_id), None

        # If memory is exhausted, in_chunks halves the number of samples and tries again.
        is_small = projection is not None and batch[0].device.type == "cpu"
        most = min(len(ids), _SAMPLES_AT_ONCE) if is_small else len(ids)
        parts = [part for *_, part in in_chunks(compute, len(ids), most)]
        features = torch.cat([rows for rows, _ in parts]).cpu().float() / self.normalize_factor
        weights = [q for _, q in parts if q is not None]
        rows = _cast(features, self.dtype, ids, "projected gradients")
        _check_not_zero(rows)
        return rows, torch.cat(weights) if weights else None

    def featurize(
        self, batch: Iterable[Tensor], inds: Positions = None, num_samples: int | None = None
    ) -> None:
        """Compute the gradients and loss weights of training samples, unless they are stored.

        ``batch`` contains the tensors that the task takes, stacked along the first dimension.
        ``inds`` are the positions of the samples in the training set. Alternatively,
        ``num_samples`` is their number, and their positions follow those of the last call.
        """
        if not isinstance(self.ckpt_loaded, int):
            message = "Load a checkpoint using traker.load_checkpoint before featurizing."
            raise AssertedError(message, code="compat.no_checkpoint")
        batch, model_id, last = list(batch), self.ckpt_loaded, self._last_ind
        ids = _positions(inds, num_samples, last, len(batch[0]), self.train_set_size)
        # Other calls may have opened another model id, or opened this one as read-only.
        self.saver.load_current_store(model_id)
        store = self.saver.current_store
        missing = np.asarray(store["is_featurized"])[ids].ravel() == 0
        if missing.any():
            kept, written = torch.from_numpy(missing), np.array(ids)[missing].tolist()
            part = [t[kept.to(t.device)] for t in batch]
            gradients, weights = self._gradients(part, model_id, written)
            if weights is None:
                weights = self.gradient_computer.compute_loss_grad(part)
            weights = weights.reshape(len(written), 1)
            store["out_to_loss"][written] = _cast(weights, self.dtype, written, "loss weights")
            store["grads"][written] = gradients
            # This is written last, so that the samples are computed again if the process is killed.
            store["is_featurized"][written] = 1
            self.saver.serialize_current_model_id_metadata()
        self._last_ind += len(ids) if inds is None else 0

    def _registered(self, model_ids: Iterable[int] | None) -> list[int]:
        """Return ``model_ids``, or all model ids in the store for None. Refuse unknown ids."""
        self.saver.refresh()
        chosen = sorted(self.saver.model_ids) if model_ids is None else [int(m) for m in model_ids]
        unknown = [m for m in chosen if not self.saver.is_registered(m)]
        if unknown or not chosen:
            missing = f"no {listed(unknown)}" if unknown else "none"
            raise ModelIDException(
                f"Model ids must be in {self.save_dir}. Found {missing} among the stored ids "
                f"({listed(sorted(self.saver.model_ids)) or 'none'}). Call `load_checkpoint`.",
                code="compat.model_ids",
            )
        return chosen

    def finalize_features(
        self, model_ids: Iterable[int] | None = None, del_grads: bool = False
    ) -> None:
        """Compute the features of model ids from their stored gradients, with ``lambda_reg``.

        If ``model_ids`` is None, all model ids in ``save_dir`` are used. With ``del_grads``, the
        gradients are deleted afterwards, so the features can no longer be computed with another
        ``lambda_reg``.
        """
        self.projector.free_memory()
        self._last_ind, saver = 0, self.saver
        for model_id in self._registered(model_ids):
            saver.load_current_store(model_id)
            # As in ``load_checkpoint``, the stored state may not be up to date.
            saver.serialize_current_model_id_metadata()
            state, store = saver.model_ids[model_id], saver.current_store
            missing = np.flatnonzero(np.asarray(store["is_featurized"]) == 0).tolist()
            if missing:
                raise ModelIDException(
                    f"All training samples must be featurized. Found {len(missing)} samples that "
                    f"are not, for model id {model_id}: {listed(missing)}. Call `featurize` with "
                    "them.",
                    code="compat.not_featurized",
                )
            if not state["is_finalized"] or state.get("lambda_reg") != self.lambda_reg:
                if store["grads"] is None:
                    raise InputError(
                        f"The new lambda_reg {self.lambda_reg} requires the gradients of model id "
                        f"{model_id}, but they were deleted. Use lambda_reg "
                        f"{state.get('lambda_reg')} again.",
                        code="compat.no_gradients",
                    )
                # If the process is killed while it writes features, they are computed again.
                state["is_finalized"] = 0
                saver.serialize_current_model_id_metadata()
                _check_not_zero(np.asarray(store["grads"]))
                gradients = torch.tensor(np.asarray(store["grads"]), device=self.device)
                xtx = self.score_computer.get_xtx(gradients)
                features = self.score_computer.get_x_xtx_inv(gradients, xtx)
                ids = range(len(features))
                store["features"][:] = _cast(features, self.dtype, ids, "finalized features")
                state |= {"is_finalized": 1, "lambda_reg": self.lambda_reg}
                saver.serialize_current_model_id_metadata()
            if del_grads and store["grads"] is not None:
                saver.del_grads(model_id)

    def start_scoring_checkpoint(
        self, exp_name: str, checkpoint: Mapping[str, Tensor], model_id: int, num_targets: int
    ) -> None:
        """Load a featurized checkpoint, and create or open an experiment for it.

        An experiment is a set of ``num_targets`` targets, a number that must not change. Its name
        ``exp_name`` is part of file names. The weights must be those that were featurized as
        ``model_id``.
        """
        (model_id,) = self._registered([model_id])
        digest = self._load_weights(checkpoint, model_id)
        self._check_weights(model_id, digest)
        self.saver.init_experiment(exp_name, num_targets, model_id)
        self._last_ind_target, self._scoring = 0, (model_id, exp_name, num_targets)

    def score(
        self, batch: Iterable[Tensor], inds: Positions = None, num_samples: int | None = None
    ) -> None:
        """Compute the gradients of targets. The arguments are those of ``featurize``."""
        if self._scoring is None:
            message = "Load a checkpoint using traker.start_scoring_checkpoint first."
            raise AssertedError(message, code="compat.no_scoring")
        model_id, exp_name, num_targets = self._scoring
        if not self.saver.model_ids[model_id]["is_finalized"]:
            message = f"The features of model id {model_id} must exist. Call `finalize_features`."
            raise ModelIDException(message, code="compat.not_finalized")
        batch, last = list(batch), self._last_ind_target
        ids = _positions(inds, num_samples, last, len(batch[0]), num_targets)
        # Other calls may have opened another model id or experiment.
        self.saver.load_current_store(model_id, exp_name, num_targets)
        gradients, _ = self._gradients(batch, model_id, ids)
        self.saver.current_store[f"{exp_name}_grads"][ids] = gradients
        self._last_ind_target += len(ids) if inds is None else 0

    def _open(self, model_id: int, exp_name: str) -> dict[str, Any]:
        """Open the arrays of a model id and of an experiment as read-only."""
        self.saver.load_current_store(model_id, mode="r")
        num_targets = self.saver.experiments[exp_name]["num_targets"]
        self.saver.load_current_store(model_id, exp_name, num_targets, mode="r")
        return self.saver.current_store

    def _why_unusable(self, model_id: int, exp_name: str) -> str | None:
        """Return the reason why a model id has no scores to average, or None if it has scores."""
        state = self.saver.model_ids[model_id]
        if not state["is_finalized"]:
            return "its features are not finalized: call `finalize_features`"
        if state.get("lambda_reg") != self.lambda_reg:
            known = f"lambda_reg {state.get('lambda_reg')}, not {self.lambda_reg}"
            return f"its features are finalized with {known}: call `finalize_features`"
        targets = self._open(model_id, exp_name)[f"{exp_name}_grads"]
        if targets is None:
            return "its targets are not scored: call `start_scoring_checkpoint` and `score`"
        unscored = np.flatnonzero(np.isnan(targets).any(axis=1)).tolist()
        return f"its targets {listed(unscored)} are not scored: call `score`" if unscored else None

    def _parts(self, exp_name: str, used: list[int]) -> Iterator[tuple[Any, np.ndarray, float]]:
        """Yield the scores (n, m), the loss weights (n,) and the norm 1.0 of each model id."""
        for model_id in used:
            store = self._open(model_id, exp_name)
            # torch.tensor copies the read-only arrays, because torch has no read-only tensors.
            arrays = (np.asarray(store[name]) for name in ("features", f"{exp_name}_grads"))
            features, targets = (torch.tensor(array, device=self.device) for array in arrays)
            scores = torch.zeros(len(features), len(targets))
            self.score_computer.get_scores(features, targets, accumulator=scores)
            yield scores.numpy(), np.asarray(store["out_to_loss"], dtype=np.float64).ravel(), 1.0

    def finalize_scores(
        self, exp_name: str, model_ids: Iterable[int] | None = None, allow_skip: bool = False
    ) -> np.ndarray:
        """Average the scores of an experiment over checkpoints, and store the result.

        If ``model_ids`` is None, all model ids with finalized features are used, and a warning
        lists the others. If a model id that is used has no scores, an error is raised. With
        ``allow_skip``, the model id is left out with a warning instead.

        Returns:
            Scores, shape (n, m), float32, also stored as ``scores/{exp_name}.mmap`` and in the
            attribute ``scores``. A positive score means that the training sample raised the model
            output of the target.
        """
        chosen = self._registered(model_ids)
        reasons = {m: why for m in chosen if (why := self._why_unusable(m, exp_name))}
        used = [m for m in chosen if m not in reasons]
        text = "; ".join(f"model id {m}: {why}" for m, why in reasons.items())
        are_unfinished = not any(self.saver.model_ids[m]["is_finalized"] for m in reasons)
        may_skip = allow_skip or (model_ids is None and are_unfinished)
        if not used or (reasons and not may_skip):
            raise ModelIDException(
                f"Checkpoints must be finalized and scored. Found {text}."
                f"{' Set allow_skip=True to skip them.' if used else ''}",
                code="compat.unusable",
            )
        if reasons:
            warnings.warn(f"The scores of {exp_name!r} leave out {text}.", stacklevel=2)
        scores = combined(self._parts(exp_name, used), Combine.PRODUCT_OF_AVERAGES)
        self._last_ind_target, self.scores = 0, self.saver.write_scores(exp_name, scores)
        return self.scores
