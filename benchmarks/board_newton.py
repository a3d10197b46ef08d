"""Scores of the board's questions under the Gauss-Newton matrix itself, by conjugate gradients.

    python benchmarks/board_newton.py --folder board

Scores are t^T (G + lambda I)^-1 g, where t and g are whole gradients of a question's and a piece's
log p at the end of run 0, and G the Gauss-Newton matrix of all words' cross entropies, of a part of
the pieces. Krylov spaces of all questions grow together, one product with G a step, from which
every number of steps and every damping follows: as many steps of conjugate gradients. lambda is in
units of G's trace over n. board.py reads the file.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from board_scores import loaded
from board_study import Board, Size, board, losses, save, written
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp, vmap

_CHUNK, _PROBES, _DAMPINGS = 25, 8, (2.0, 0.3, 0.1, 0.01)


class Newton:
    """The end of run 0 as a function of its parameters, one vector ``theta``."""

    def __init__(self, about: Board, folder: Path, curved: int):
        """Load it; the matrix is that of ``curved`` random pieces, scaled to all."""
        self.about = about
        self.model: Any = loaded(about, folder, "run-0", 1.0)[0]
        self.model.set_attn_implementation("eager")  # which forward mode can differentiate
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        self.theta = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        order = torch.randperm(about.size.texts, generator=torch.Generator().manual_seed(0))
        self.curved = about.train[order[:curved]]

    def _call(self, flat: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        named = {n: p.view(s) for (n, s), p in zip(self.shapes.items(), parts, strict=True)}
        return functional_call(self.model, named, kwargs={"input_ids": tokens})

    def gradients(self) -> Tensor:
        """Return gradients of log p of all pieces, then questions, shape (n + m, p)."""

        def log_p(flat: Tensor, one: Tensor) -> Tensor:
            return -losses(lambda input_ids: self._call(flat, input_ids), one[None]).sum()

        each = vmap(grad(log_p), in_dims=(None, 0))
        return torch.cat([each(self.theta, part) for part in self.about.tokens.split(_CHUNK)])

    def product(self, vectors: Tensor) -> Tensor:
        """Return G times each of the vectors, shape (m, p)."""
        total = torch.zeros_like(vectors)
        for tokens in self.curved.split(_CHUNK):

            def logits(flat: Tensor, tokens: Tensor = tokens) -> Tensor:
                return self._call(flat, tokens)["logits"][:, :-1]

            values, back = vjp(logits, self.theta)[:2]
            p = values.softmax(-1)

            def one(vector: Tensor, p: Tensor = p, back=back, logits=logits) -> Tensor:
                moved = jvp(logits, (self.theta,), (vector,))[1]
                return back(p * (moved - (p * moved).sum(-1, keepdim=True)))[0]

            with torch.no_grad():
                total += vmap(one)(vectors)
        return total * (self.about.size.texts / len(self.curved))

    def unit(self) -> float:
        """Return the trace of G over n, from random signs."""
        generator = torch.Generator().manual_seed(1)
        signs = 2 * torch.randint(2, (_PROBES, len(self.theta)), generator=generator) - 1.0
        return float((signs * self.product(signs)).sum(1).mean()) / self.about.size.texts

    def scores(self, steps: int) -> dict[str, np.ndarray]:
        """Return scores (n, m) after half the steps and all, by damping."""
        n, every, unit = self.about.size.texts, self.gradients(), self.unit()
        sizes = every[n:].norm(dim=1)
        vectors = every[n:] / sizes[:, None]
        m = len(vectors)
        basis, matrix = torch.zeros(steps, *vectors.shape), torch.zeros(m, steps, steps).double()
        for k in range(steps):
            basis[k] = vectors
            vectors = self.product(vectors)
            matrix[:, k, k] = (vectors * basis[k]).sum(1)
            for _ in range(2):  # once more, against rounding
                along = torch.einsum("kmp,mp->km", basis[: k + 1], vectors)
                vectors = vectors - torch.einsum("km,kmp->mp", along, basis[: k + 1])
            length = vectors.norm(dim=1)
            if k + 1 < steps:
                matrix[:, k, k + 1] = matrix[:, k + 1, k] = length
            vectors = vectors / length[:, None]
            print(f"step {k + 1}: {time.process_time():.0f} processor seconds", flush=True)
        pairs = torch.einsum("np,kmp->knm", every[:n], basis).double()
        found = {}
        for count in (steps // 2, steps):
            first = torch.zeros(m, count, 1).double()
            first[:, 0, 0] = sizes
            for damping in _DAMPINGS:
                damped = matrix[:, :count, :count] + damping * unit * torch.eye(count)
                weights = torch.linalg.solve(damped, first)[..., 0]
                name = f"its end, Gauss-Newton, {count} steps, damping {damping:g}"
                found[name] = torch.einsum("knm,mk->nm", pairs[:count], weights).numpy()
        return found


def main() -> None:
    """Write the scores into the board's folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--curved", type=int, default=225, help="pieces that make the matrix")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    given = yaml.safe_load((asked.folder / "about.yaml").read_text())
    text = given.pop("text")
    size = Size(**{name: value for name, value in given.items() if name != "digest"})
    scores = Newton(board(size, text), asked.folder, asked.curved).scores(asked.steps)
    written(asked.folder / "newton.npz", lambda path: save(path, scores))


if __name__ == "__main__":
    main()
