"""Which scans taught a LightningModule to read other scans? Run this file in an empty folder."""

from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from trak_core import Attributor

scans, digits = map(torch.tensor, load_digits(return_X_y=True))
train, test = random_split(TensorDataset(scans.float() / 16, digits), [1700, 97])


class Reader(lightning.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


checkpoints = {}
for run in ("seed0", "seed1"):
    lightning.seed_everything(int(run[-1]))
    keep = ModelCheckpoint(f"lightning-out/{run}", "{step}", save_top_k=-1, every_n_epochs=2)
    reader, loader = Reader(), DataLoader(train, 50, shuffle=True)
    lightning.Trainer(max_epochs=4, callbacks=[keep], logger=False).fit(reader, loader)
    for path in Path("lightning-out", run).glob("step=*.ckpt"):
        entry = {"path": path, "run": run, "at": int(path.stem.removeprefix("step="))}
        checkpoints[f"{run}-{entry['at']}"] = entry

# Keys in the files begin with `model.`. The Attributor removes this prefix to load `reader.model`.
attributor = Attributor(reader.model, "image_classification", checkpoints).fit(train)
print(attributor.score(test).top(1).head())
