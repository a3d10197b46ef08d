"""How large a page to explore is, and how long a browser takes to open it.

1,000 of scikit-learn's digits are targets, the other 797 training samples, with two columns of
their own. A score is the inner product of two centred scans, positive where their labels are alike:
what is measured doesn't depend on where scores come from. Needs Chromium.

    python benchmarks/answer_page.py [targets]
"""

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from machine import environment
from matplotlib.axes import Axes
from sklearn.datasets import load_digits

from trak_core.report.explore_data import explore
from trak_core.report.read_results import File
from trak_core.report.render import answer
from trak_core.study.show_samples import Picture, drawn

N_TRAIN, TOP, REPEATS = 797, 10, 5
# Says in the page how long it took until all was laid out.
PROBE = """addEventListener("load", () => {
  document.body.offsetHeight;
  document.body.dataset.opened = performance.now();
});"""


def draw(axes: Axes, scan: np.ndarray) -> None:
    """Draw a scan."""
    axes.imshow(scan, cmap="gray_r", vmin=0, vmax=16)


def scores_of(pixels: np.ndarray, labels: np.ndarray, n_targets: int) -> File:
    """Return scores as ``read_experiment`` does."""
    centred = pixels - pixels.mean(axis=0)
    train = np.arange(N_TRAIN)
    targets = np.resize(np.arange(N_TRAIN, len(pixels)), n_targets)
    alike = np.where(labels[train, None] == labels[targets], 1, -1)
    scores = alike * np.abs(centred[train] @ centred[targets].T)
    order = np.argsort(scores, axis=0)
    rows = []
    for column in range(n_targets):
        for sign, ranked in ((1, order[::-1, column]), (-1, order[:, column])):
            for rank, i in enumerate(ranked[:TOP], 1):
                rows.append((column, rank, sign, int(i), int(labels[i]), scores[i, column]))
    names = ["target_id", "rank", "sign", "train_id", "train_label", "score"]
    n_all = n_targets + N_TRAIN
    table = pd.DataFrame({
        "id": np.arange(n_all),
        "label": labels[np.concatenate([targets, train])],
        "prediction": np.resize(labels, n_all),
        "output": np.linspace(-5, 5, n_all),
        "output_sd": 0.1,
        "writer": np.arange(n_all) % 13,
        "scanner": [("flat", "drum", "phone")[i % 3] for i in range(n_all)],
    })
    of_train = table[n_targets:].assign(id=train, harm=-np.minimum(scores, 0).mean(axis=1))
    spec = {
        "experiment": "digits",
        "model_output": "image_classification",
        "checkpoints": [{}, {}],
        "runs": {"a": ["a"], "b": ["b"]},
        "projection": {"kind": "exact"},
        "damping": 0.0,
        "combine": "average",
        "weighting": "plain",
        "normalize": False,
        "preconditioner": None,
    }
    tables = {
        "targets": table[:n_targets],
        "train": of_train,
        "top_influences": pd.DataFrame(rows, columns=names),
    }
    attributes = {"unit": "relative", "n_train": N_TRAIN, "n_harmful": 0, "most_harmful": [0, 1]}
    return File("scores/digits.h5", "", {}, spec, tables, attributes)


def opening_seconds(page: Path, folder: str) -> list[float]:
    """Return how long the page takes to be read, run and laid out, some times."""
    allowed = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    markup = page.read_text().replace("script-src ", f"script-src 'sha256-{allowed}' ", 1)
    probed = Path(folder, "probed.html")
    probed.write_text(markup.replace("<script type=", f"<script>{PROBE}</script><script type=", 1))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    seconds = []
    for _ in range(REPEATS):
        command = ["chromium", *options, "--dump-dom", str(probed)]
        dumped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        (milliseconds,) = re.findall(r'data-opened="([\d.]+)"', dumped.stdout)
        seconds.append(float(milliseconds) / 1000)
    return seconds


def main() -> None:
    """Print sizes and times."""
    n_targets = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    pixels, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
    experiment = scores_of(pixels, labels, n_targets)

    def show(is_target: bool, sample_id: int, characters: int) -> tuple[Picture, bytes]:
        place = (N_TRAIN + sample_id) % len(pixels) if is_target else sample_id
        return drawn(draw, pixels[place].reshape(8, 8)), pixels[place].tobytes()

    began = time.process_time()
    shown = explore(experiment, show, drawn=True, described=False)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(sys.argv[2] if len(sys.argv) > 2 else folder, "digits.html")
        page.write_text(answer(shown, "digits.py"), encoding="utf-8")
        cpu = time.process_time() - began
        print(environment("cpu", ["numpy", "matplotlib"]))
        print(
            f"{len(shown.targets)} targets of {n_targets}, {len(shown.train)} training samples, "
            f"{2 * TOP} influences each; left out: {shown.n_left_out}"
        )
        print(f"page: {page.stat().st_size / 1e6:.2f} MB, made in {cpu:.1f} s of CPU time")
        if shutil.which("chromium"):
            seconds = opening_seconds(page, folder)
            print(f"opens in {', '.join(f'{s:.2f}' for s in seconds)} s")


if __name__ == "__main__":
    main()
