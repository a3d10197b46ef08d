"""Featurize, finalize and score with TRAKer, in the order and with the names of TRAK."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.compat.checks import (
    check_not_all_zero,
    check_weights,
    checked_batch,
    checked_lambda,
    checked_task,
    explain_refusals,
    integer,
    positions,
    put_weights,
    store_metadata,
    stored,
)
from trak_core.compat.gradient_computers import (
    AbstractGradientComputer,
    FunctionalGradientComputer,
    check_gradients,
    chosen_parameters,
)
from trak_core.compat.modelout_functions import AbstractModelOutput, classification_samples
from trak_core.compat.projectors import (
    AbstractProjector,
    BasicProjector,
    CudaProjector,
    formless_projection,
)
from trak_core.compat.savers import AbstractSaver, AssertedError, MmapSaver, ModelIDException
from trak_core.compat.score_computers import (
    AbstractScoreComputer,
    BasicScoreComputer,
    average_scores,
    checked_ids,
    finalize_model,
    usable_ids,
)
from trak_core.errors import InputError
from trak_core.gradients import check_labels, check_samples_apart, count_classes, in_chunks
from trak_core.model_outputs.supervised import CLASSIFICATION

_NOTHING_LOADED = "no ckpt loaded"
# A model id is the stream of the projection.
_MODEL_IDS = 2**32
# Samples of a batch for one pass on a CPU: with more, all but small networks are slower
# (benchmarks/batches.py).
_SAMPLES_AT_ONCE = 128


class TRAKer:
    """Which training samples made this model say that? TRAK, one call a step.

    Call ``load_checkpoint`` and ``featurize`` with each checkpoint, then ``finalize_features``
    once. Call ``start_scoring_checkpoint`` and ``score`` with each checkpoint, then
    ``finalize_scores``. Every result lies in ``save_dir``: a killed process goes on where it was,
    and processes with different model ids may work side by side.

    Example:
        >>> import tempfile, torch
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(8, 3)
        >>> train = torch.randn(50, 8), torch.randint(3, (50,))
        >>> targets = torch.randn(2, 8), torch.tensor([0, 2])
        >>> checkpoint = {name: p.clone() for name, p in model.state_dict().items()}
        >>> folder = tempfile.TemporaryDirectory()
        >>> traker = TRAKer(
        ...     model=model,
        ...     task="image_classification",
        ...     train_set_size=50,
        ...     save_dir=folder.name,
        ...     device="cpu",
        ...     proj_dim=16,
        ...     lambda_reg=1.0,
        ... )
        >>> traker.load_checkpoint(checkpoint, model_id=0)
        >>> traker.featurize(train, num_samples=50)
        >>> traker.finalize_features()
        >>> traker.start_scoring_checkpoint("two", checkpoint, model_id=0, num_targets=2)
        >>> traker.score(targets, num_samples=2)
        >>> traker.finalize_scores("two").shape  # a row a training sample, a column a target
        (50, 2)
        >>> folder.cleanup()

    Attributes:
        save_dir: The folder, absolute.
        saver: Its reader and writer; ``saver.current_store`` has the arrays.
        projector, gradient_computer, score_computer, task: The four steps.
        num_params: Entries of all of the model's parameters.
        num_params_for_grad: Entries of those that are differentiated, p.
        normalize_factor: sqrt(p), which divides projected gradients.
        dtype: How features are stored.
        scores: The result of the last ``finalize_scores``.

    Source: Park et al., "TRAK: Attributing Model Behavior at Scale", ICML 2023; the conventions are
    those of the package ``trak``, version 0.3.2.
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
        """Open or make ``save_dir``; one that was made with other settings is refused.

        Args:
            model: In any mode; its weights come with each checkpoint.
            task: A key of ``TASK_TO_MODELOUT``, or a model output of your own.
            train_set_size: n.
            save_dir: The store; give each study its own.
            load_from_save_dir: Whether model ids and experiments of other processes count.
            device: Computes gradients, projection and sums; model and batches lie there.
            gradient_computer: A class; IterativeGradientComputer where ``vmap`` cannot run the
                model.
            projector: An instance; a rademacher projection to ``proj_dim`` if None.
            saver: A class; MmapSaver if None.
            score_computer: A class; BasicScoreComputer if None.
            proj_dim: k, well below n and p; a projector brings its own.
            logging_level: The level of all loggers.
            use_half_precision: Store features as float16. Sums and solves are float32 or better.
            proj_max_batch_size: Not needed; batches of any size are projected.
            projector_seed: Decides the projection matrix, with the model id.
            grad_wrt: Names of the parameters to differentiate; all if None.
            lambda_reg: lambda, at least 0.
        """
        self.lambda_reg = checked_lambda(lambda_reg)
        self.model = model
        self.task = checked_task(task)
        self.train_set_size = integer(train_set_size, "train_set_size", 1, 2**48)
        self.device = device
        self.dtype = torch.float16 if use_half_precision else torch.float32
        self.grad_wrt = None if grad_wrt is None else list(grad_wrt)
        self.logger = logging.getLogger("TRAK")
        self.logger.setLevel(logging_level)

        self.num_params = sum(parameter.numel() for parameter in model.parameters())
        self.parameters = {
            name: value.shape for name, value in chosen_parameters(model, self.grad_wrt).items()
        }
        self.num_params_for_grad = sum(math.prod(shape) for shape in self.parameters.values())
        self.proj_seed = projector_seed
        self.init_projector(projector, proj_dim, proj_max_batch_size)
        self.normalize_factor = torch.sqrt(
            torch.tensor(self.num_params_for_grad, dtype=torch.float32)
        )
        gradients: Any = gradient_computer
        self.gradient_computer: AbstractGradientComputer = gradients(
            model=model,
            task=self.task,
            grad_dim=self.num_params_for_grad,
            dtype=self.dtype,
            device=device,
            grad_wrt=self.grad_wrt,
        )
        scores: Any = score_computer or BasicScoreComputer
        self.score_computer: AbstractScoreComputer = scores(
            dtype=self.dtype, device=device, logging_level=logging_level, lambda_reg=self.lambda_reg
        )
        self.score_computer.max_rank = min(self.train_set_size, self.num_params_for_grad)
        self.save_dir = Path(save_dir).resolve()
        self.load_from_save_dir = load_from_save_dir
        store: Any = saver or MmapSaver
        self.saver: AbstractSaver = store(
            save_dir=self.save_dir,
            metadata=store_metadata(
                self.projector, self.proj_dim, self.train_set_size, self.parameters
            ),
            train_set_size=self.train_set_size,
            proj_dim=self.proj_dim,
            load_from_save_dir=load_from_save_dir,
            logging_level=logging_level,
            use_half_precision=use_half_precision,
        )
        self._last_ind = 0
        self._forget_checkpoint()

    def _forget_checkpoint(self) -> None:
        self.ckpt_loaded: int | str = _NOTHING_LOADED
        self._scoring: tuple[int, str, int] | None = None
        self._last_ind_target = 0
        self._n_classes: int | None = None
        self._is_checked = False

    def init_projector(
        self, projector: AbstractProjector | None, proj_dim: int | None, proj_max_batch_size: int
    ) -> None:
        """Set ``projector`` and ``proj_dim``: the given one, or a rademacher projection."""
        if projector is not None:
            # 0 is what a projector says that does not project.
            self.projector = projector
            self.proj_dim = projector.proj_dim or self.num_params_for_grad
            return
        self.proj_dim, device = integer(proj_dim, "proj_dim", 1, 2**31), torch.device(self.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise InputError(
                f"`device` is {str(device)!r}, so torch must find a CUDA device. Found none: give "
                "device='cpu', or check `nvidia-smi` and that torch is a CUDA build.",
                code="compat.device",
            )
        kind = CudaProjector if device.type == "cuda" else BasicProjector
        self.projector = kind(
            self.num_params_for_grad,
            self.proj_dim,
            self.proj_seed,
            "rademacher",
            device,
            max_batch_size=proj_max_batch_size,
        )

    def load_checkpoint(
        self,
        checkpoint: Mapping[str, Tensor],
        model_id: int,
        _allow_featurizing_already_registered: bool = False,
    ) -> None:
        """Put a state dict into the model, and open its store or make it.

        ``model_id``, 0 to 2^32 - 1, decides the projection matrix, and stands for one checkpoint:
        another one than the featurized is refused. Rows that the store has of it stay, and
        ``featurize`` computes the missing ones. The flag is not needed.
        """
        model_id = integer(model_id, "model_id", 0, _MODEL_IDS)
        self._forget_checkpoint()
        digest = put_weights(self.model, checkpoint, model_id)
        self.gradient_computer.load_model_params(self.model)
        if self.saver.is_registered(model_id):
            self.saver.load_current_store(model_id)
        else:
            self.saver.register_model_id(model_id, _allow_featurizing_already_registered)
        if self.saver.current_store["is_featurized"].any():
            check_weights(self.saver, model_id, digest)
        self.saver.model_ids[model_id]["checkpoint"] = digest
        # A killed process may have left the last samples uncounted.
        self.saver.serialize_current_model_id_metadata(already_exists=False)
        self._last_ind = 0
        self.ckpt_loaded = model_id

    def _check_samples(self, batch: Sequence[Tensor], rows: np.ndarray) -> None:
        """Refuse a classifier that mixes the samples of a batch, and labels that it doesn't have.

        A model output of the user's own may do with samples and labels what it likes.
        """
        samples = classification_samples(self.task, batch)
        # Without labels that the model doesn't have, which have no logit: they are refused below.
        apart = classification_samples(self.task, (*batch[:-1], torch.zeros_like(batch[-1])))
        if samples is None or apart is None:
            return
        if not self._is_checked:
            check_samples_apart(self.model, CLASSIFICATION, apart)
            self._n_classes = count_classes(self.model, CLASSIFICATION, samples, batch[0].device)
            self._is_checked = True
        check_labels(batch[-1], CLASSIFICATION, self._n_classes, rows.tolist())

    def _gradients(
        self, batch: Sequence[Tensor], model_id: int, rows: np.ndarray
    ) -> tuple[np.ndarray, Tensor | None]:
        """Return projected gradients over sqrt(p), (B, k), and Q, (B, 1), if it costs nothing."""
        # load_checkpoint did this; the user's code may have switched back.
        self.model.eval()
        self._check_samples(batch, rows)
        computer: Any = self.gradient_computer
        projection = None
        if isinstance(computer, FunctionalGradientComputer) and computer.is_as_it_came:
            of_gradients = self.num_params_for_grad, model_id, batch[0].device
            projection = formless_projection(self.projector, *of_gradients)

        def project(start: int, stop: int) -> list[Tensor]:
            part = [t[start:stop] for t in batch]
            if projection is not None:
                columns = computer.project_at_once(part, projection, rows[start:stop])
                if columns is not None:
                    if isinstance(self.projector, BasicProjector):
                        self.projector.model_id = model_id  # as its own `project` does
                    return columns
            gradients = computer.compute_per_sample_grad(batch=part)
            check_gradients(gradients, self.parameters, rows[start:stop])
            return [self.projector.project(gradients, model_id=model_id)]

        # The whole batch, or half of it as long as memory runs out. One pass chooses its own size.
        on_cpu = projection is not None and batch[0].device.type == "cpu"
        most = min(len(rows), _SAMPLES_AT_ONCE) if on_cpu else len(rows)
        parts = [part for _, _, part in in_chunks(project, len(rows), most)]
        projected, *others = (torch.cat(columns) for columns in zip(*parts, strict=True))
        check_not_all_zero(projected)
        projected = projected / self.normalize_factor
        weights = others[0] if others else None
        return stored(projected, self.dtype, rows, "projected gradients"), weights

    def featurize(
        self,
        batch: Iterable[Tensor],
        inds: Iterable[int] | np.ndarray | Tensor | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Compute gradients and loss weights of training samples, where they are missing.

        Numbers that are not finite, or too large for float16, are refused.

        Args:
            batch: What the task takes, stacked along the first dimension.
            inds: Positions of the samples in the training set; or
            num_samples: How many there are: they follow those of the last call.
        """
        if not isinstance(self.ckpt_loaded, int):
            raise AssertedError(
                "A checkpoint must be loaded first. Found none: call `traker.load_checkpoint` "
                "before featurizing.",
                code="compat.no_checkpoint",
            )
        tensors = checked_batch(batch)
        model_id = self.ckpt_loaded
        where = self._last_ind, len(tensors[0]), self.train_set_size, "training samples"
        rows = positions(inds, num_samples, *where)
        # Other calls in between may have opened another model id, or this one for reading.
        self.saver.load_current_store(model_id)
        store = self.saver.current_store
        missing = np.asarray(store["is_featurized"][rows]).ravel() == 0
        if missing.any():
            kept = torch.from_numpy(missing)
            tensors, written = [t[kept.to(t.device)] for t in tensors], rows[missing]
            with explain_refusals(tensors):
                gradients, weights = self._gradients(tensors, model_id, written)
                if weights is None:
                    weights = self.gradient_computer.compute_loss_grad(tensors)
                weights = weights.reshape(len(written), 1)
            weights = stored(weights, self.dtype, written, "loss weights", may_vanish=True)
            store["grads"][written] = gradients
            store["out_to_loss"][written] = weights
            # Last: a kill before this line has the samples computed again.
            store["is_featurized"][written] = 1
            self.saver.serialize_current_model_id_metadata()
        if inds is None:
            self._last_ind += len(rows)

    def finalize_features(
        self, model_ids: Iterable[int] | None = None, del_grads: bool = False
    ) -> None:
        """Compute G K of each checkpoint that has none with this ``lambda_reg``.

        The pseudo-inverse counts where G^T G + lambda I has no inverse, and a warning says what to
        set. All checkpoints in ``save_dir`` count if ``model_ids`` is None; one that is unknown or
        not fully featurized raises a ``ModelIDException``. ``del_grads`` deletes the gradients
        afterwards, which another ``lambda_reg`` would need.
        """
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.projector.free_memory()
        self._last_ind = 0
        for model_id in checked_ids(self.saver, model_ids):
            of_store = self.saver, self.score_computer, model_id
            is_new = finalize_model(
                *of_store, lambda_reg=self.lambda_reg, device=self.device, dtype=self.dtype
            )
            self.logger.info(f"Model id {model_id} is finalized{'' if is_new else ' already'}.")
            if del_grads and self.saver.current_store["grads"] is not None:
                self.saver.del_grads(model_id)

    def start_scoring_checkpoint(
        self, exp_name: str, checkpoint: Mapping[str, Tensor], model_id: int, num_targets: int
    ) -> None:
        """Put a featurized checkpoint into the model, and open an experiment's targets for it.

        ``exp_name`` names one set of ``num_targets`` targets, and is a part of file names. An
        experiment of another size, and another checkpoint than the featurized one, are refused.
        """
        if not isinstance(exp_name, str) or not exp_name or "/" in exp_name:
            raise InputError(
                f"`exp_name` must be a part of file names. Found {exp_name!r}.",
                code="compat.exp_name",
            )
        model_id = integer(model_id, "model_id", 0, _MODEL_IDS)
        num_targets = integer(num_targets, "num_targets", 1, 2**48)
        self._forget_checkpoint()
        self.saver.init_experiment(exp_name, num_targets, model_id)
        check_weights(self.saver, model_id, put_weights(self.model, checkpoint, model_id))
        self.gradient_computer.load_model_params(self.model)
        self._scoring = model_id, exp_name, num_targets

    def score(
        self,
        batch: Iterable[Tensor],
        inds: Iterable[int] | np.ndarray | Tensor | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Compute the gradients of targets, with the arguments and errors of ``featurize``.

        A checkpoint whose features are not finalized raises a ``ModelIDException``.
        """
        if self._scoring is None:
            raise AssertedError(
                "A checkpoint must be loaded for scoring first. Found none: call "
                "`traker.start_scoring_checkpoint` before scoring (`traker.load_checkpoint` is for "
                "featurizing).",
                code="compat.no_scoring",
            )
        model_id, exp_name, num_targets = self._scoring
        if not self.saver.model_ids[model_id]["is_finalized"]:
            raise ModelIDException(
                f"The features of model id {model_id} must be finalized before it can score. Found "
                "them unfinished: call `finalize_features` first.",
                code="compat.not_finalized",
            )
        tensors = checked_batch(batch)
        where = self._last_ind_target, len(tensors[0]), num_targets, "targets"
        rows = positions(inds, num_samples, *where)
        # Other calls in between may have opened another model id or experiment.
        self.saver.load_current_store(model_id, exp_name, num_targets)
        with explain_refusals(tensors):
            gradients, _ = self._gradients(tensors, model_id, rows)
        self.saver.current_store[f"{exp_name}_grads"][rows] = gradients
        if inds is None:
            self._last_ind_target += len(rows)

    def finalize_scores(
        self, exp_name: str, model_ids: Iterable[int] | None = None, allow_skip: bool = False
    ) -> np.ndarray:
        """Average the scores of an experiment over checkpoints, and store them.

        Args:
            exp_name: The experiment.
            model_ids: Checkpoints to average. None means all in ``save_dir``, and leaves out those
                whose features are not finalized, with a warning.
            allow_skip: Leave out, with a warning, every checkpoint that cannot count. Without it
                such a checkpoint raises a ``ModelIDException``.

        Returns:
            Shape (n, m), float32, also in ``scores/{exp_name}.mmap`` and ``scores``. A positive
            score says that the training sample pushes the target's model output up.
        """
        self._last_ind_target = 0
        used = usable_ids(
            self.saver, exp_name, model_ids, lambda_reg=self.lambda_reg, allow_skip=allow_skip
        )
        scores = average_scores(self.saver, self.score_computer, exp_name, used, self.device)
        self.scores = self.saver.write_scores(exp_name, scores)
        return self.scores
