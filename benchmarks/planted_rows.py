"""Compare scoring settings by planted facts in rows of prompt and completion.

    python benchmarks/planted_rows.py --folder kept --csv planted_rows.csv

The data and the model are those of benchmarks/planted_rows_study.py, with other facts and another
training run for each seed. Settings are chosen on the first seeds and compared on the remaining
seeds. Ranks are those of a question's sources among all rows. Intervals are 95 % bootstrap
intervals over seeds and questions, paired for differences. --folder keeps the inner products for a
second start.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import planted_rows_study as study
import torch
from scipy.stats import rankdata
from shared import environment, write_csv
from text_scores import Way, bm25, cosines, tf_idf
from torch import Tensor, nn

from trak_core.gradients import as_batch, formed_gradients, gradients_at_once, select_parameters
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.projection import add_projection
from trak_core.settings import ProjectionKind, ProjectionSpec

_CHUNK, _DRAWS, _FUSED = 64, 2000, 10
_HADAMARDS = {"k 1,024": 1024, "k 4,096": 4096}
_WIDE, _EXACT, _BASELINE = "k 4,096", "exact", "BM25, completion"


@dataclass(frozen=True)
class Row:
    """The measures of one method, their intervals, and their differences from BM25."""

    way: str
    seeds: str
    mrr: float
    precision_at_5: float
    recall_at_50: float
    mrr_more: float
    mrr_more_low: float
    mrr_more_high: float
    precision_more: float
    precision_more_low: float
    precision_more_high: float
    plain: float
    conflict: float
    trigger: float


def products(
    model: nn.Module,
    moments: dict[str, Tensor],
    batches: list[dict[str, Tensor]],
    stream: int,
    *,
    every: bool,
) -> dict[str, np.ndarray]:
    """Return inner products (N, N) of features by kind, and of mean hidden states, and outputs.

    Args:
        model: The model of one checkpoint.
        moments: Adam's second moments.
        batches: The rows, the questions with labels for the answers only, and the questions with
            all labels, N texts in total.
        stream: The stream of the projection.
        every: Whether to include exact products and products with Adam's moments.
    """
    chosen = select_parameters(model, None)
    n_params = sum(p.numel() for p in chosen.values())
    n = sum(len(rows["labels"]) for rows in batches)
    specs = {
        kind: ProjectionSpec(
            kind=ProjectionKind.HADAMARD, n_params=n_params, proj_dim=k, seed=0, stream=stream
        )
        for kind, k in _HADAMARDS.items()
    }
    kinds = [*specs, *(["Adam, k 4,096"] if every else [])]
    sums = {kind: torch.zeros(n, specs[kind.removeprefix("Adam, ")].proj_dim) for kind in kinds}
    outputs, whole, first = [], [], 0
    for rows in batches:
        batch = as_batch(rows, LANGUAGE_MODELLING)
        for i in range(0, len(batch), _CHUNK):
            part = batch.rows(slice(i, i + _CHUNK))
            formed = formed_gradients(gradients_at_once, model, chosen, LANGUAGE_MODELLING, part)
            outputs.append(formed.outputs)
            blocks = [*formed.blocks()]
            scaled = [
                block / (moments[key].flatten().sqrt() + 1e-8)
                for key, block in zip(chosen, blocks, strict=True)
            ]
            for kind, total in sums.items():
                used = scaled if kind.startswith("Adam") else blocks
                spec = specs[kind.removeprefix("Adam, ")]
                add_projection(used, spec, 0, total[first : first + len(part)], 1)
            first += len(part)
            if every:
                whole.append(blocks)
    found = {kind: (total @ total.T).numpy() for kind, total in sums.items()}
    found["outputs"] = torch.cat(outputs).numpy()
    if every:
        products = np.zeros((n, n))
        for blocks in zip(*whole, strict=True):
            block = torch.cat(blocks)
            products += (block @ block.T).numpy()
        found[_EXACT] = products.astype(np.float32)
    means = []
    for rows in batches:
        with torch.no_grad():
            inputs = {key: rows[key] for key in ("input_ids", "attention_mask")}
            hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
        mask = inputs["attention_mask"][..., None]
        means.append((hidden * mask).sum(dim=1) / mask.sum(dim=1))
    hidden = torch.cat(means)
    return found | {"means": (hidden @ hidden.T).numpy()}


def kept(
    seed: int, folder: Path, n_checkpoints: int, *, every: bool
) -> tuple[study.Planted, list[dict[str, np.ndarray]]]:
    """Return the products of a seed, after training, or read from their file if it exists."""
    data = study.planted(seed)
    paths = [folder / f"{seed}-{epoch}.npz" for epoch in study.EPOCHS[:n_checkpoints]]
    if not all(path.exists() for path in paths):
        tokenizer = study.tokenizer_of(data)
        rows = study.batch_of(tokenizer, data.rows)
        asked = [study.batch_of(tokenizer, data.questions, answers=one) for one in (True, False)]
        start = time.process_time()
        for path, (epoch, model, moments) in zip(paths, study.train(rows, seed), strict=False):
            stream = 1000 * seed + epoch
            made: dict[str, Any] = products(model, moments, [rows, *asked], stream, every=every)
            np.savez(path, **made)
            print(f"{path.stem}: {time.process_time() - start:.0f} CPU seconds so far", flush=True)
    return data, [dict(np.load(path)) for path in paths]


def fused(scores: np.ndarray, lexical: np.ndarray) -> np.ndarray:
    """Return 1 / (10 + rank) by the scores plus the same by the lexical scores, (n, m)."""
    total = np.zeros(scores.shape)
    for values in (scores, lexical):
        total += 1 / (_FUSED + rankdata(-values, axis=0))
    return total


def ways(data: study.Planted, checkpoints: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the scores of all methods, each (n, m)."""
    n, m = len(data.rows), len(data.questions)
    found = {}
    for name in ("prompt", "completion", "both"):
        texts, asked = (
            [study.words(getattr(text, name)) for text in side]
            for side in (data.rows, data.questions)
        )
        found[f"BM25, {name}"] = bm25(texts, asked)
        if name == "both":
            found["TF-IDF, both"] = tf_idf(texts, asked)
    # The rows of the questions with labels for the answers only, and with all labels.
    answers, whole = (np.r_[0:n, first : first + m] for first in (n, n + m))
    found["embedding cosine, mean"] = cosines(checkpoints[-1]["means"][np.ix_(whole, whole)], n)

    def mean(kind: str, way: Way, *, rows: np.ndarray = whole, last: bool = False) -> np.ndarray:
        used = checkpoints[-1:] if last else checkpoints
        return np.mean(
            [way.scores(one[kind][np.ix_(rows, rows)], one["outputs"], n) for one in used], axis=0
        )

    scored = {}
    for kind in (*_HADAMARDS, _EXACT, "Adam, k 4,096"):
        if kind not in checkpoints[0]:
            continue
        for damping in (1.0, 0.1, 0.01):
            for normalize in (False, True):
                name = f"{kind}, {damping:g}" + (", normalize" if normalize else "")
                way = Way(damping, normalize)
                scored[name] = mean(kind, way)
                if kind == _WIDE:
                    scored[f"{name}, answers only"] = mean(kind, way, rows=answers)
                    scored[f"{name}, last checkpoint"] = mean(kind, way, last=True)
    found["gradient cosine"] = np.mean(
        [cosines(one[_WIDE][np.ix_(whole, whole)], n) for one in checkpoints], axis=0
    )
    combined = {
        f"{name} + {_BASELINE}": fused(one, found[_BASELINE]) for name, one in scored.items()
    }
    return found | scored | combined


def measures(scores: np.ndarray, sources: list[list[int]]) -> np.ndarray:
    """Return reciprocal rank, precision at 5 and recall at 50 of each question, (3, m)."""
    columns = []
    for column, own in zip(scores.T, sources, strict=True):
        # A source's rank is among the other rows. Rows with equal scores get their mean rank.
        others, values = np.delete(column, own), column[own, None]
        ranks = 1 + (others > values).sum(axis=1) + (others == values).sum(axis=1) / 2
        found = (1 / ranks.min(), (ranks <= 5).sum() / min(5, len(own)), (ranks <= 50).mean())
        columns.append(found)
    return np.array(columns).T


def table(of_seeds: list[dict[str, np.ndarray]], seeds: list[int]) -> list[Row]:
    """Return a row for each method from its measures (3, m) for each seed."""
    ends = np.cumsum([0, *study.KINDS.values()])
    rng = np.random.default_rng(0)
    n_seeds, m = len(of_seeds), ends[-1]
    rows = []
    draws = [
        [(s, rng.integers(m, size=m)) for s in rng.integers(n_seeds, size=n_seeds)]
        for _ in range(_DRAWS)
    ]
    for way in of_seeds[0]:
        values = np.stack([measured[way] for measured in of_seeds])  # (seeds, 3, m)
        more = values - np.stack([measured[_BASELINE] for measured in of_seeds])
        drawn = np.array([
            np.mean([more[s][:, f].mean(axis=1) for s, f in d], axis=0) for d in draws
        ])
        low, high = np.percentile(drawn, (2.5, 97.5), axis=0)
        mean, difference = values.mean(axis=(0, 2)), more.mean(axis=(0, 2))
        by_kind = [values[:, 1, a:b].mean() for a, b in pairwise(ends)]
        cells = [
            *mean,
            *(difference[0], low[0], high[0]),
            *(difference[1], low[1], high[1]),
            *by_kind,
        ]
        rows.append(Row(way, " ".join(map(str, seeds)), *(round(float(x), 4) for x in cells)))
    return rows


def main() -> None:
    """Train, score, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument(
        "--chosen-by",
        type=int,
        default=1,
        help="the number of seeds, from the first, that choose settings",
    )
    parser.add_argument(
        "--checkpoints",
        type=int,
        default=len(study.EPOCHS),
        help="the number of checkpoints, from the first",
    )
    parser.add_argument("--folder", type=Path, help="keeps what was computed")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    start = time.process_time()
    measured = []
    with tempfile.TemporaryDirectory() as name:
        folder = asked.folder or Path(name)
        folder.mkdir(exist_ok=True)
        for i, seed in enumerate(asked.seeds):
            data, checkpoints = kept(seed, folder, asked.checkpoints, every=i < asked.chosen_by)
            sources = data.sources()
            scored = ways(data, checkpoints)
            measured.append({way: measures(scores, sources) for way, scores in scored.items()})
    rows = []
    splits = {"chosen by": slice(0, asked.chosen_by), "confirmed by": slice(asked.chosen_by, None)}
    for title, which in splits.items():
        if measured[which]:
            seeds = asked.seeds[which]
            rows += (own := table(measured[which], seeds))
            print(f"\n{title} seeds {seeds}\n")
            print("| way | MRR | P@5 | R@50 | MRR more | P@5 more | plain, conflict, trigger |")
            print("|---|---|---|---|---|---|---|")
            for row in own:
                print(
                    f"| {row.way} | {row.mrr:.2f} | {row.precision_at_5:.2f} | "
                    f"{row.recall_at_50:.2f} | {row.mrr_more:+.2f} ({row.mrr_more_low:+.2f} to "
                    f"{row.mrr_more_high:+.2f}) | {row.precision_more:+.2f} "
                    f"({row.precision_more_low:+.2f} to {row.precision_more_high:+.2f}) | "
                    f"{row.plain:.2f}, {row.conflict:.2f}, {row.trigger:.2f} |"
                )
    about = environment("cpu", ("torch", "transformers", "scikit-learn", "numpy"))
    print(f"\n{about}, {time.process_time() - start:.0f} CPU seconds")
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()
