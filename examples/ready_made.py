"""Make small data and weights for `images.yaml` and `tables.yaml`: scans as pictures, and wines.

Call it in the repository's folder: `python examples/ready_made.py`.
"""

import sys
from pathlib import Path

import pandas as pd
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_wine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def scan_net(n_classes: int) -> nn.Module:
    """Return a network for pictures of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, n_classes)
    )


def wine_net() -> nn.Module:
    """Return a network for thirteen measurements."""
    return nn.Sequential(nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 3))


def _save(model: nn.Module, x: Tensor, y: Tensor, path: Path) -> None:
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        adam.zero_grad()
        cross_entropy(model(x), y).backward()
        adam.step()
    torch.save(model.state_dict(), path)


def make(folder: Path) -> None:
    """Write pictures, a table and two networks for each into a folder."""
    digits, scans = load_digits(), folder / "scans"
    for i in range(200):
        place = scans / ("train" if i < 150 else "asked") / str(digits.target[i])
        place.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[i] * 15.9375).astype("uint8")
        Image.fromarray(pixels).save(place / f"{i}.png")
    x, y = torch.tensor(digits.images[:150]).float() / 16, torch.tensor(digits.target[:150])
    wine = load_wine()
    rows = torch.tensor(wine.data).float()
    rows = (rows - rows.mean(0)) / rows.std(0)
    table = pd.DataFrame(rows.numpy(), columns=wine.feature_names).assign(wine=wine.target)
    table.to_csv(folder / "wines.csv", index_label="id")
    for run in range(2):
        torch.manual_seed(run)
        _save(scan_net(10), x[:, None].expand(-1, 3, -1, -1), y, folder / f"scans-{run}.pt")
        _save(wine_net(), rows, torch.tensor(wine.target), folder / f"wines-{run}.pt")


if __name__ == "__main__":
    made = Path(sys.argv[1] if sys.argv[1:] else "ready-made")
    made.mkdir(exist_ok=True)
    make(made)
