"""Do log-odds of tokens, added up, find planted texts as the log-odds of whole texts do?

    python benchmarks/planted_tokens.py --csv planted_tokens.csv

The study is that of benchmarks/planted_facts.py, with its trainings, ranks, halves and intervals.
Scores by `model_output: token_log_odds` stand beside those by `language_modelling`, at the same
damping: f, its gradients and the loss weight Q are each output's own. An answer is one word, for
which both outputs are the same f, so that they differ in the training texts alone; with all words
of a question they differ there too. --folder keeps what was trained, and takes what
planted_facts.py kept of halves.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from machine import environment, write_csv
from planted_facts import asked_and_folder, retrained, table
from planted_products import all_rows
from planted_ways import Scored, Way
from torch import Tensor, nn

from trak_core.gradients import as_batch, formed_gradients, gradients_at_once, select_parameters
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING, TOKEN_LOG_ODDS
from trak_core.study.study import Study

_STUDY = Path(__file__).parents[1] / "config/facts.py"
_TIMES, _RUNS, _CHUNK = (10, 15, 20, 25), 3, 64
_OUTPUTS = {"whole texts": LANGUAGE_MODELLING, "tokens": TOKEN_LOG_ODDS}
_DAMPINGS = (2.0, 0.1, 0.01)


@dataclass(frozen=True)
class Kernel:
    """What one checkpoint makes of all rows by one output.

    Attributes:
        products: Inner products of gradients, shape (N, N), float32.
        log_odds: log((1 - Q) / Q), Q the loss weight, shape (N,): f itself for whole texts.
    """

    products: np.ndarray
    log_odds: np.ndarray


def kernel(model: nn.Module, rows: dict[str, Tensor], name: str) -> Kernel:
    """Compute it by the gradients of all parameters."""
    output = _OUTPUTS[name]
    chosen, batch = select_parameters(model, None), as_batch(rows, output)
    parts = [batch.rows(slice(i, i + _CHUNK)) for i in range(0, len(batch), _CHUNK)]
    formed = [formed_gradients(gradients_at_once, model, chosen, output, part) for part in parts]
    products = np.zeros((len(batch), len(batch)), np.float32)
    for blocks in zip(*(one.blocks() for one in formed), strict=True):
        block = torch.cat(blocks)
        products += (block @ block.T).numpy()
    weights = torch.cat([one.loss_weights for one in formed]).double().clamp(1e-30, 1 - 1e-15)
    return Kernel(products, torch.log((1 - weights) / weights).numpy())


def kernels(study: Study, seed: int, folder: Path) -> list[dict[str, Kernel]]:
    """Train once, or read what was kept; return both outputs' kernels at all times."""
    paths = [{name: folder / f"{name}-{seed}-{at}.npz" for name in _OUTPUTS} for at in _TIMES]
    if not all(path.exists() for at in paths for path in at.values()):
        rows = all_rows(study)[0]
        for at, model in study.module.train(seed=seed, epochs=_TIMES[-1]):
            if at in _TIMES:
                for name, path in paths[_TIMES.index(at)].items():
                    np.savez(path, **vars(kernel(model, rows, name)))
    return [{name: Kernel(**np.load(path)) for name, path in at.items()} for at in paths]


def ways(study: Study, made: list[dict[str, Kernel]]) -> list[Scored]:
    """Return scores by either output, those by tokens beside those by whole texts."""
    _, n, m = all_rows(study)
    scored = []
    for all_words in (False, True):
        for damping in _DAMPINGS:
            way = Way(damping, all_words=all_words)
            about = f"{'all words' if all_words else 'answers'}, {damping}"
            for name in _OUTPUTS:
                shares = [way.scores(one[name].products, one[name].log_odds, n, m) for one in made]
                beside = f"whole texts, {about}"
                scored.append(Scored(f"{name}, {about}", np.mean(shares, axis=0), beside))
    return scored


def main() -> None:
    """Train, score, print."""
    with asked_and_folder(__doc__, halves=20) as (asked, folder):
        study = Study.load(_STUDY)
        made = [one for seed in range(_RUNS) for one in kernels(study, seed, folder)]
        truth = retrained(study, asked.halves, folder)
    rows, ceiling = table(study, ways(study, made), truth)
    about = environment("cpu", ("torch", "transformers", "scikit-learn", "numpy"))
    print(about)
    print("| scores by | copy | reworded | renamed | all three | more by | LDS | more by |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        copy, reworded, renamed = (
            f"{getattr(row, kind):.2f}, {getattr(row, f'median_{kind}'):.0f}"
            for kind in ("copy", "reworded", "renamed")
        )
        more = lds_more = ""
        if row.beside != row.way:
            more = f"{row.mrr_more:+.2f} ({row.mrr_more_low:+.2f} to {row.mrr_more_high:+.2f})"
            lds_more = f"{row.lds_more:+.2f} ({row.lds_more_low:+.2f} to {row.lds_more_high:+.2f})"
        print(
            f"| {row.way} | {copy} | {reworded} | {renamed} | "
            f"{row.mrr:.2f} ({row.mrr_low:.2f} to {row.mrr_high:.2f}) | {more} | "
            f"{row.lds:.2f} ({row.lds_low:.2f} to {row.lds_high:.2f}) | {lds_more} |"
        )
    print(f"noise ceiling: {ceiling[0]:.2f} to {ceiling[1]:.2f}")
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()
