"""Draw labels from the distribution that a model predicts."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trak_core.attribution.loaded_model import LoadedModel
from trak_core.errors import InputError
from trak_core.gradients import Batch, in_evaluation_mode
from trak_core.model_outputs.model_output import ModelOutput, rows_in


@dataclass(frozen=True, slots=True)
class LabelDraws:
    """Random labels for samples, drawn from the distribution that a checkpoint's model predicts.

    The random numbers depend on the seed, the stream, the sample's id and the number of draws, but
    not on batches. Rounding can still change a label if the random number is close to the boundary
    between two labels. The model must return logits, so it must not be a ``MarginsOfTokens``.

    ``n_draws`` is at least 1. ``stream`` is the checkpoint's result of ``stream_of``, which gives
    each checkpoint its own random numbers.
    """

    n_draws: int
    stream: int
    seed: int = 0

    def bytes_of_sample(self, loaded: LoadedModel, few: Batch) -> int:
        """Return the number of bytes that are needed to draw a sample's labels.

        Raise an error if the model output does not define how to draw labels.
        """
        with torch.no_grad(), in_evaluation_mode(loaded.model):
            read = loaded.output.read(few.given_to(loaded.model))
        if loaded.output.loss_noise is None or not isinstance(read, Tensor):
            raise InputError(
                "label_draws needs a ModelOutput that defines `loss_noise` and whose `read` "
                "returns one tensor. This model output does not. Remove label_draws, or choose "
                "another model output.",
                code="model.no_loss_noise",
            )
        rows_in(read, len(few))
        return 4 * 4 * read[0].numel()

    def drawn(
        self, loaded: LoadedModel, batch: Batch, ids: Sequence[object]
    ) -> Iterator[tuple[ModelOutput, Batch]]:
        """Yield a model output and a batch for each draw, to compute gradients for drawn labels.

        Instead of labels, the batch contains random vectors z, drawn by ``ModelOutput.loss_noise``.
        The model output is <logits, z>. Its gradient is B^T z, where B is the Jacobian of a
        sample's logits.
        """
        noise = loaded.output.loss_noise
        output = ModelOutput(value=lambda read, z: (read * z).sum(), read=loaded.output.read)
        with torch.no_grad(), in_evaluation_mode(loaded.model):
            read = loaded.output.read(batch.given_to(loaded.model))
        assert noise is not None
        labels = batch.labels
        uniform = np.stack([self._uniform(sample_id, labels.shape[1:]) for sample_id in ids])
        if batch.gives_labels:
            padded = batch.token_inputs | (set() if batch.lengths is None else {"labels"})
            kwargs = {**batch.kwargs, "labels": labels}
            batch = replace(batch, kwargs=kwargs, token_inputs=padded, gives_labels=False)
        for draw in range(self.n_draws):
            numbers = torch.from_numpy(np.ascontiguousarray(uniform[..., draw])).to(read.device)
            with torch.no_grad():
                z = torch.vmap(noise)(read, labels, numbers)
            if z.shape != read.shape:
                raise InputError(
                    "`loss_noise` must return a tensor of the same shape as its first argument, "
                    f"{tuple(read.shape[1:])}. Found shape {tuple(z.shape[1:])}.",
                    code="model.no_loss_noise",
                )
            yield output, replace(batch, labels=z)

    def _uniform(self, sample_id: object, shape: Sequence[int]) -> np.ndarray:
        """Return random numbers in [0, 1) for a sample, shape (*shape, n_draws), float32.

        The numbers for a text's tokens are the same if the text is padded.
        """
        text = f"{self.seed} {self.stream} {sample_id}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16])
        return np.random.default_rng(seed).random((*shape, self.n_draws), dtype=np.float32)
