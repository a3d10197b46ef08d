"""TRAKer: featurize, finalize, score, in the order and with the names that users of TRAK know."""

from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor

from trak_core.compat.batches import checked_batch, integer, listed, positions, taken_by_the_model
from trak_core.compat.checks import check_weights, put_weights
from trak_core.compat.featurizer import MODEL_IDS, NOTHING_LOADED, Featurizer
from trak_core.compat.finalize import average_scores, checked_ids, usable_ids
from trak_core.compat.savers import ModelIDException
from trak_core.errors import InputError


class TRAKer(Featurizer):
    """Which training samples made this model say that? TRAK, one call a step.

    For each checkpoint ``load_checkpoint`` and ``featurize``, then ``finalize_features`` once; for
    each checkpoint ``start_scoring_checkpoint`` and ``score``, then ``finalize_scores``. All that
    is computed lies in ``save_dir``: a killed process goes on where it was, and processes with
    different model ids may work side by side.

    Attributes:
        save_dir: The folder, absolute.
        saver: What reads and writes it; ``saver.current_store`` has the arrays.
        projector: From gradients to features of size ``proj_dim``.
        gradient_computer: From batches to gradients.
        score_computer: From features to scores.
        task: The model output.
        num_params: Entries of all of the model's parameters.
        num_params_for_grad: Entries of those that are differentiated, p.
        normalize_factor: sqrt(p), by which projected gradients are divided.
        dtype: How features are stored.
        device: As given.
        scores: What ``finalize_scores`` returned last.

    Source: Park et al., "TRAK: Attributing Model Behavior at Scale", ICML 2023; the conventions are
    those of the package ``trak``, version 0.3.2.
    """

    def start_scoring_checkpoint(
        self, exp_name: str, checkpoint: Mapping[str, Tensor], model_id: int, num_targets: int
    ) -> None:
        """Put a checkpoint into the model, and open the targets of an experiment for it.

        Args:
            exp_name: Of the experiment, one set of targets; a part of file names.
            checkpoint: State dict, the one that was featurized.
            model_id: Its id.
            num_targets: m.

        Raises:
            ModelIDException: If the model id is not in ``save_dir``.
            InputError: If the experiment has another number of targets, or the checkpoint is not
                the one that was featurized.
        """
        if not isinstance(exp_name, str) or not exp_name or "/" in exp_name:
            raise InputError(
                f"`exp_name` must be a text that can be part of a file name. Found {exp_name!r}."
            )
        model_id = integer(model_id, "model_id", 0, MODEL_IDS)
        num_targets = integer(num_targets, "num_targets", 1, 2**48)
        self.ckpt_loaded, self._scoring, self._looked_at = NOTHING_LOADED, None, False
        self.saver.init_experiment(exp_name, num_targets, model_id)
        check_weights(self.saver, model_id, put_weights(self.model, checkpoint, model_id))
        self.gradient_computer.load_model_params(self.model)
        self._last_ind_target = 0
        self._scoring = model_id, exp_name, num_targets

    def score(
        self,
        batch: Iterable[Tensor],
        inds: Iterable[int] | np.ndarray | Tensor | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Compute the gradients of targets.

        Args:
            batch: As for ``featurize``.
            inds: Positions of the targets in the experiment; or
            num_samples: How many there are: they follow those of the last call.

        Raises:
            InputError: As for ``featurize``.
            ModelIDException: If the features of the checkpoint are not finalized.
        """
        if self._scoring is None:
            raise InputError(
                "A checkpoint must be opened for scoring first. Found none: call "
                "`start_scoring_checkpoint`."
            )
        model_id, exp_name, num_targets = self._scoring
        if not self.saver.model_ids[model_id]["is_finalized"]:
            raise ModelIDException(
                f"The features of model id {model_id} must be finalized before it can score. Found "
                "them unfinished: call `finalize_features` first."
            )
        tensors = checked_batch(batch)
        where = (self._last_ind_target, len(tensors[0]), num_targets, "targets")
        rows = positions(inds, num_samples, *where)
        # Other calls in between may have opened another model id or experiment.
        self.saver.load_current_store(model_id, exp_name, num_targets)
        with taken_by_the_model(tensors):
            gradients, samples, _ = self._gradients(tensors, model_id, rows)
        store = self.saver.current_store
        if store.get(f"{exp_name}_samples") is not None:
            store[f"{exp_name}_samples"][rows] = samples
        store[f"{exp_name}_grads"][rows] = gradients
        if inds is None:
            self._last_ind_target += len(rows)

    def finalize_scores(
        self, exp_name: str, model_ids: Iterable[int] | None = None, allow_skip: bool = False
    ) -> np.ndarray:
        """Average the scores of an experiment over checkpoints, and store them.

        Args:
            exp_name: The experiment.
            model_ids: Checkpoints to average; all in ``save_dir`` if None, of which those whose
                features are not finalized are left out with a warning.
            allow_skip: Leave out, with a warning, every checkpoint that cannot count.

        Returns:
            Shape (n, m), float32, also in ``scores/{exp_name}.mmap`` and ``scores``. A positive
            score says that the training sample pushes the target's model output up.

        Raises:
            InputError: If there is no such experiment, or if no checkpoint is left.
            ModelIDException: If a checkpoint cannot count and is not to be left out.
        """
        self._last_ind_target = 0
        chosen = checked_ids(self.saver, model_ids)
        if exp_name not in self.saver.experiments:
            raise InputError(
                f"An experiment must be started before it ends. Found no {exp_name!r}; there are "
                f"{listed(sorted(self.saver.experiments)) or 'none'}. Call "
                "`start_scoring_checkpoint` and `score` first."
            )
        num_targets = self.saver.experiments[exp_name]["num_targets"]
        used = usable_ids(
            self.saver,
            exp_name,
            num_targets,
            chosen,
            lambda_reg=self.lambda_reg,
            allow_skip=allow_skip,
            all_of_them=model_ids is None,
        )
        scores = average_scores(
            self.saver, self.score_computer, exp_name, num_targets, used, self.device
        )
        self.scores = self.saver.write_scores(exp_name, scores)
        return self.scores
