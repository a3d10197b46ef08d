"""The first half of a TRAKer: checkpoints and the features of training samples."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.compat._vectors import get_num_params
from trak_core.compat.batches import checked_batch, integer, positions, stored, taken_by_the_model
from trak_core.compat.checks import (
    Projector,
    check_weights,
    checked_class,
    checked_projector,
    checked_task,
    put_weights,
    store_metadata,
)
from trak_core.compat.finalize import checked_ids, finalize_model
from trak_core.compat.gradient_computers import (
    AbstractGradientComputer,
    FunctionalGradientComputer,
    check_gradients,
    chosen_parameters,
)
from trak_core.compat.modelout_functions import AbstractModelOutput
from trak_core.compat.projectors import BasicProjector, formless_projection, known_projection
from trak_core.compat.samples import check_task, describe
from trak_core.compat.savers import AbstractSaver, MmapSaver
from trak_core.compat.score_computers import AbstractScoreComputer, BasicScoreComputer
from trak_core.errors import InputError
from trak_core.gradients import in_chunks
from trak_core.projection import NotFiniteError

NOTHING_LOADED = "no ckpt loaded"
# A model id is the stream of the projection.
MODEL_IDS = 2**32
# Samples of a batch for one pass on a CPU: with more, all but small networks are slower
# (benchmarks/batches.py).
_AT_ONCE = 128


class Featurizer:
    """A TRAKer's first half: everything about training samples; see ``TRAKer``."""

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput | str,
        train_set_size: int,
        save_dir: str | Path = "./trak_results",
        load_from_save_dir: bool = True,
        device: str | torch.device = "cuda",
        gradient_computer: type[AbstractGradientComputer] = FunctionalGradientComputer,
        projector: Projector | None = None,
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
        """Open or make ``save_dir``.

        Args:
            model: In any mode; its weights come with each checkpoint.
            task: ``image_classification``, ``text_classification``, ``clip``,
                ``iterative_image_classification``, or a model output of your own.
            train_set_size: n.
            save_dir: Where everything is kept.
            load_from_save_dir: Whether model ids and experiments of other processes count.
            device: Where gradients, projection and sums are made; model and batches are there.
            gradient_computer: Its class.
            projector: An instance; a rademacher projection to ``proj_dim`` if None.
            saver: Its class; MmapSaver if None.
            score_computer: Its class; BasicScoreComputer if None.
            proj_dim: k; taken from the projector if there is one.
            logging_level: Of this and its parts.
            use_half_precision: Store features as float16. Sums and solves are float32 or better.
            proj_max_batch_size: Taken as the original does; batches of any size are projected.
            projector_seed: Of the projection matrix.
            grad_wrt: Names of the parameters to differentiate; all if None.
            lambda_reg: lambda, at least 0.

        Raises:
            InputError: If an argument cannot be used, or if ``save_dir`` was made with others.
        """
        if not isinstance(model, nn.Module):
            raise InputError(f"`model` must be a torch module. Found {type(model).__name__}.")
        if not (isinstance(lambda_reg, int | float) and 0 <= lambda_reg < math.inf):
            raise InputError(f"`lambda_reg` must be a number, at least 0. Found {lambda_reg!r}.")
        self.model = model
        self.task = checked_task(task)
        self.train_set_size = integer(train_set_size, "train_set_size", 1, 2**48)
        self.device = device
        self.dtype = torch.float16 if use_half_precision else torch.float32
        self.grad_wrt = None if grad_wrt is None else list(grad_wrt)
        self.lambda_reg = float(lambda_reg)
        self.logger = logging.getLogger("TRAK")
        self.logger.setLevel(logging_level)

        self.num_params = get_num_params(model)
        self.parameters = {
            name: value.shape for name, value in chosen_parameters(model, self.grad_wrt).items()
        }
        self.num_params_for_grad = sum(math.prod(shape) for shape in self.parameters.values())
        self.proj_seed = projector_seed
        self.init_projector(projector, proj_dim, proj_max_batch_size)
        self.normalize_factor = torch.sqrt(
            torch.tensor(self.num_params_for_grad, dtype=torch.float32)
        )
        gradients = checked_class(
            gradient_computer, FunctionalGradientComputer, "gradient_computer"
        )
        self.gradient_computer = gradients(
            model=model,
            task=self.task,
            grad_dim=self.num_params_for_grad,
            dtype=self.dtype,
            device=device,
            grad_wrt=self.grad_wrt,
        )
        scores = checked_class(score_computer, BasicScoreComputer, "score_computer")
        self.score_computer = scores(
            dtype=self.dtype, device=device, logging_level=logging_level, lambda_reg=self.lambda_reg
        )
        self.score_computer.max_rank = min(self.train_set_size, self.num_params_for_grad)
        self.save_dir = Path(save_dir).resolve()
        self.load_from_save_dir = load_from_save_dir
        self.saver = checked_class(saver, MmapSaver, "saver")(
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
        self.ckpt_loaded: int | str = NOTHING_LOADED
        self._scoring: tuple[int, str, int] | None = None
        self._last_ind = self._last_ind_target = 0
        self._looked_at = False

    def init_projector(
        self, projector: Projector | None, proj_dim: int | None, proj_max_batch_size: int
    ) -> None:
        """Set ``projector`` and ``proj_dim``: the one given, or a rademacher projection.

        Raises:
            InputError: See ``checked_projector``.
        """
        self.projector, self.proj_dim = checked_projector(
            projector,
            n_params=self.num_params_for_grad,
            proj_dim=proj_dim,
            seed=self.proj_seed,
            max_batch_size=proj_max_batch_size,
            device=self.device,
        )

    def load_checkpoint(
        self,
        checkpoint: Mapping[str, Tensor],
        model_id: int,
        _allow_featurizing_already_registered: bool = False,
    ) -> None:
        """Put a checkpoint into the model, and open its store or make it.

        Args:
            checkpoint: State dict.
            model_id: 0 to 2^32 - 1; decides the projection matrix. What is stored of it already
                stays: ``featurize`` computes what is missing.
            _allow_featurizing_already_registered: Kept for scripts that give it.

        Raises:
            InputError: If the checkpoint doesn't fit the model, or is not the one that was
                featurized under this model id.
        """
        model_id = integer(model_id, "model_id", 0, MODEL_IDS)
        self.ckpt_loaded, self._scoring, self._looked_at = NOTHING_LOADED, None, False
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

    def _gradients(
        self, batch: Sequence[Tensor], model_id: int, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Tensor | None]:
        """Return what is stored of samples, and their loss weights where these come for nothing.

        Returns:
            Projected gradients over sqrt(p), shape (B, k); what ``describe`` does; and Q, shape
            (B, 1), or None.
        """
        # load_checkpoint did this; the user's code may have switched back.
        self.model.eval()
        if not self._looked_at:
            check_task(self.task, self.model, batch)
            self._looked_at = True
        computer = self.gradient_computer
        of_matrix = self.projector, self.num_params_for_grad, model_id
        projection = formless_projection(*of_matrix, batch[0].device)

        own = isinstance(computer, FunctionalGradientComputer) and computer.is_as_it_came

        def project(start: int, stop: int) -> list[Tensor]:
            part = [t[start:stop] for t in batch]
            found = None
            if own and projection:
                found = computer.project_at_once(part, projection, rows[start:stop])
            if found is not None:
                if isinstance(self.projector, BasicProjector):
                    self.projector.model_id = model_id  # as it does itself
                return found
            gradients = computer.compute_per_sample_grad(batch=part)
            where = gradients, self.parameters, rows[start:stop]
            # Through a matrix of ours what is not finite stays so: a look at the result will do.
            if known_projection(*of_matrix) is None:
                check_gradients(*where)
            try:
                projected = self.projector.project(gradients, model_id=model_id)
            except NotFiniteError:
                check_gradients(*where)
                raise
            if not torch.isfinite(projected).all():
                check_gradients(*where)
            return [projected]

        # The whole batch, or half of it as long as memory runs out; what our own pass takes at
        # once is ours to choose.
        ours = own and projection is not None and batch[0].device.type == "cpu"
        most = min(len(rows), _AT_ONCE) if ours else len(rows)
        parts = [part for _, _, part in in_chunks(project, len(rows), most)]
        projected, *others = (torch.cat(columns) for columns in zip(*parts, strict=True))
        projected = stored(
            projected / self.normalize_factor, self.dtype, rows, "projected gradients"
        )
        if others:
            weights, samples = others
            return projected, samples.cpu().numpy(), weights
        return projected, describe(self.task, self.model, batch), None

    def featurize(
        self,
        batch: Iterable[Tensor],
        inds: Iterable[int] | np.ndarray | Tensor | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Compute gradients and loss weights of training samples, where they are missing.

        Args:
            batch: What the task takes, stacked along the first dimension.
            inds: Positions of the samples in the training set; or
            num_samples: How many there are: they follow those of the last call.

        Raises:
            InputError: If no checkpoint is loaded, if the arguments don't go together, or if the
                numbers are not finite or too large for float16.
        """
        if not isinstance(self.ckpt_loaded, int):
            raise InputError("A checkpoint must be loaded first. Found none: `load_checkpoint`.")
        tensors = checked_batch(batch)
        model_id, n = self.ckpt_loaded, self.train_set_size
        where = (self._last_ind, len(tensors[0]), n, "training samples")
        rows = positions(inds, num_samples, *where)
        # Other calls in between may have opened another model id, or this one for reading.
        self.saver.load_current_store(model_id)
        store = self.saver.current_store
        missing = np.asarray(store["is_featurized"][rows]).ravel() == 0
        if missing.any():
            kept = torch.from_numpy(missing)
            tensors, written = [t[kept.to(t.device)] for t in tensors], rows[missing]
            with taken_by_the_model(tensors):
                gradients, samples, weights = self._gradients(tensors, model_id, written)
                if weights is None:
                    weights = self.gradient_computer.compute_loss_grad(tensors)
                weights = weights.reshape(len(written), 1)
            weights = stored(weights, self.dtype, written, "loss weights", may_vanish=True)
            store["grads"][written] = gradients
            store["out_to_loss"][written] = weights
            if store.get("samples") is not None:
                store["samples"][written] = samples
            # Last: a kill before this line has the samples computed again.
            store["is_featurized"][written] = 1
            self.saver.serialize_current_model_id_metadata()
        if inds is None:
            self._last_ind += len(rows)

    def finalize_features(
        self, model_ids: Iterable[int] | None = None, del_grads: bool = False
    ) -> None:
        """Compute G K of each checkpoint.

        Checkpoints that are finalized with this ``lambda_reg`` are left alone. Where
        G^T G + lambda I has no inverse, its pseudo-inverse counts, with a warning that says what
        to set.

        Args:
            model_ids: Which; all in ``save_dir`` if None.
            del_grads: Delete the gradients afterwards; another ``lambda_reg`` needs them.

        Raises:
            ModelIDException: If a model id is unknown or not fully featurized.
            InputError: If float16 cannot hold the features.
        """
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.projector.free_memory()
        self._last_ind = 0
        for model_id in checked_ids(self.saver, model_ids):
            made = finalize_model(
                self.saver,
                self.score_computer,
                model_id,
                lambda_reg=self.lambda_reg,
                device=self.device,
                dtype=self.dtype,
            )
            self.logger.info(f"Model id {model_id} is finalized{'' if made else ' already'}.")
            if del_grads and self.saver.current_store["grads"] is not None:
                self.saver.del_grads(model_id)
