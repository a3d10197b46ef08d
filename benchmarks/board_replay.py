"""The exact derivative of what the board's training says, by replaying its steps backwards.

    python benchmarks/board_replay.py --folder board --questions 9

f of a question is a function of each text's weight in the loss. Its derivative at weight 1
foretells changes of this very training that are small enough, and in a training that is linear in
its data those that leave texts out (MAGIC: Ilyas and Engstrom, 2025). One training forwards keeps
the state of every step; then for each step, last to first, the derivative goes through AdamW's
update by its formula and through the gradient by forward-mode autograd: a product with the Hessian,
and each text's own share. Some questions go together. Each question's scores are a file in the
folder, so that a second start goes on; board.py reads them.
"""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from board_study import (
    ADAM,
    BATCH,
    DECAY,
    Board,
    Size,
    board,
    first_model,
    losses,
    order_of,
    rate_at,
    save,
    written,
)
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

_TOGETHER = 5
Flat = Tensor  # all parameters as one vector


class Replay:
    """One training of the board, seed 0, all texts, with the state of each step.

    Attributes:
        steps: What each step started from: parameters, Adam's moments after it, its gradient.
        end: Parameters at the end.
    """

    def __init__(self, about: Board):
        """Train."""
        self.about, self.model = about, first_model(about.size, about.size.first_seed)
        self.model.set_attn_implementation("eager")  # which forward mode can differentiate
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        self.orders = order_of(about.size, about.size.first_seed)
        theta = nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()
        first, second = torch.zeros_like(theta), torch.zeros_like(theta)
        self.steps = []
        for step, rows in enumerate(self.orders):
            gradient = grad(lambda at, rows=rows: self._losses(at, about.train[rows]).sum())(theta)
            gradient = gradient / self._divisor
            first = ADAM[0] * first + (1 - ADAM[0]) * gradient
            second = ADAM[1] * second + (1 - ADAM[1]) * gradient**2
            self.steps.append((theta, first, second, gradient))
            rate, (one, two) = rate_at(about.size, step), self._bias(step)
            update = first / one / ((second / two).sqrt() + ADAM[2])
            theta = (1 - rate * DECAY) * theta - rate * update
        self.end = theta

    @property
    def _divisor(self) -> int:
        return BATCH * (self.about.size.length - 1)

    @staticmethod
    def _bias(step: int) -> tuple[float, float]:
        return 1 - ADAM[0] ** (step + 1), 1 - ADAM[1] ** (step + 1)

    def _parameters(self, flat: Flat) -> Mapping[str, Tensor]:
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {n: p.view(s) for (n, s), p in zip(self.shapes.items(), parts, strict=True)}

    def _losses(self, flat: Flat, tokens: Tensor) -> Tensor:
        parameters = self._parameters(flat)

        def call(input_ids: Tensor) -> Any:
            return functional_call(self.model, dict(parameters), kwargs={"input_ids": input_ids})

        return losses(call, tokens)

    def outputs(self) -> np.ndarray:
        """Return log p of the questions at the end."""
        with torch.no_grad():
            return -self._losses(self.end, self.about.asked).double().numpy()

    def scores(self, questions: list[int]) -> np.ndarray:
        """Return the derivative of some questions' log p in each text's weight, (n, questions)."""
        asked, train = self.about.asked[questions], self.about.train
        found = torch.zeros(len(train), len(questions), dtype=torch.float64)
        of_end = [
            grad(lambda at, one=one: -self._losses(at, one[None]).sum())(self.end) for one in asked
        ]
        theta_bar = torch.stack(of_end)
        first_bar, second_bar = torch.zeros_like(theta_bar), torch.zeros_like(theta_bar)
        for step in range(len(self.steps) - 1, -1, -1):
            theta, first, second, gradient = self.steps[step]
            rows, rate = self.orders[step], rate_at(self.about.size, step)
            one, two = self._bias(step)
            root = (second / two).sqrt()
            below = root + ADAM[2]
            first_bar = first_bar - rate / one / below * theta_bar
            # A word that never came has moments of 0, and stays where it is.
            slope = torch.where(second > 0, first / (one * below**2 * 2 * root * two), 0)
            slope = slope.nan_to_num(0, 0, 0)
            second_bar = second_bar + rate * slope * theta_bar
            gradient_bar = (1 - ADAM[0]) * first_bar + 2 * (1 - ADAM[1]) * gradient * second_bar

            def both(at: Flat, rows: Tensor = rows) -> tuple[Tensor, Tensor]:
                each = self._losses(at, train[rows])
                return grad(lambda at: self._losses(at, train[rows]).sum())(at), each

            def along(
                direction: Flat, theta: Flat = theta, both: Any = both
            ) -> tuple[Tensor, Tensor]:
                return jvp(both, (theta,), (direction,))[1]

            curved, shares = vmap(along)(gradient_bar)
            found[rows] += shares.T.double() / self._divisor
            theta_bar = (1 - rate * DECAY) * theta_bar + curved / self._divisor
            first_bar, second_bar = ADAM[0] * first_bar, ADAM[1] * second_bar
        return found.numpy()


def replayed(folder: Path, n: int) -> tuple[list[int], np.ndarray]:
    """Return which questions were replayed, and their scores, (n, questions)."""
    paths = sorted(folder.glob("replay-*.npz"), key=lambda path: int(path.stem[7:]))
    columns = [np.load(path)["scores"] for path in paths]
    return [int(path.stem[7:]) for path in paths], np.reshape(columns, (-1, n)).T


def main() -> None:
    """Replay the first questions that have no file yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=9, help="how many, the first ones")
    parser.add_argument("--hours", type=float, default=12, help="starts none after them")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    end = time.time() + 3600 * asked.hours
    given = yaml.safe_load((asked.folder / "about.yaml").read_text())
    about = board(
        Size(**{k: v for k, v in given.items() if k not in ("text", "digest")}), given["text"]
    )
    paths = [asked.folder / f"replay-{i}.npz" for i in range(asked.questions)]
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    if not missing:
        return
    replay = Replay(about)
    kept = np.load(asked.folder / "run-0.npz")["outputs"]
    print(f"log p differ by {np.abs(replay.outputs() - kept).max():.2g} from the run's")
    for start in range(0, len(missing), _TOGETHER):
        if time.time() > end:
            break
        some, began = missing[start : start + _TOGETHER], time.process_time()
        scores = replay.scores(some)
        seconds = (time.process_time() - began) / len(some)
        print(f"questions {some}: {seconds:.0f} processor seconds each", flush=True)
        for i, column in zip(some, scores.T, strict=True):
            values = {"scores": column, "seconds": seconds}
            written(paths[i], lambda path, values=values: save(path, values))


if __name__ == "__main__":
    main()
