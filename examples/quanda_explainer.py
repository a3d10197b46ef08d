"""How do quanda's metrics rate an Attributor? Run this file with quanda 0.5 in an empty folder."""

import copy

import quanda
import torch
from sklearn.datasets import load_digits

from trak_core import Attributor


class TrakCore(quanda.Explainer):
    """A quanda explainer that computes scores with an ``Attributor`` from all checkpoints.

    ``settings`` are keyword arguments of the ``Attributor``. With ``cache_dir``, features are
    stored in ``cache_dir/model_id`` and reused for the same weights. It is an error if the training
    data or the settings have changed. Text tasks, inputs in a dict, random augmentation, and
    ``self_influence`` with ``projection="exact"`` are not supported.
    """

    accepted_tasks = ("image_classification",)

    def __init__(self, model, train_dataset, cache_dir=None, model_id="", **settings):
        names = {"task", "checkpoints", "checkpoints_load_func"} & settings.keys()
        super().__init__(model, train_dataset, **{name: settings.pop(name) for name in names})
        copies = [copy.deepcopy(model) for _ in self.checkpoints]
        for loaded, checkpoint in zip(copies, self.checkpoints, strict=True):
            self.checkpoints_load_func(loaded, checkpoint)
        weights = [loaded.state_dict() for loaded in copies] or None
        settings = {"device": self.device} | settings
        self.attributor = Attributor(model, "image_classification", weights, **settings)
        self.attributor.fit(train_dataset, cache_dir and f"{cache_dir}/{model_id}")

    def explain(self, test_data, targets):
        scores = self.attributor.score((test_data, torch.as_tensor(targets)))
        return torch.tensor(scores.frame.to_numpy().T, device=self.device)

    def self_influence(self, batch_size=32):
        values = self.attributor.self_influence()["self_influence"].to_numpy()
        return torch.tensor(values, dtype=torch.float32, device=self.device)


scans, digits = map(torch.tensor, load_digits(return_X_y=True))
scans = scans.float() / 16
wrong = [*range(0, 1200, 20)]  # training samples that get another label
digits[wrong] = (digits[wrong] + torch.arange(60) % 9 + 1) % 10
marked = [i for i in range(1, 1200, 2) if digits[i] == 0]
scans[[*marked, *range(1500, 1797)], :4] = 1  # a shortcut: in training, this mark is only on zeros
train = torch.utils.data.TensorDataset(scans[:1200], digits[:1200])
asked, labels = scans[1200:], digits[1200:]


def fit(rows, path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in torch.cat([rows[torch.randperm(len(rows))] for _ in range(15)]).split(50):
        adam.zero_grad()
        torch.nn.functional.cross_entropy(model(scans[batch]), digits[batch]).backward()
        adam.step()
    torch.save(model.state_dict(), path)
    return model


torch.manual_seed(0)
paths = [f"{i}.pt" for i in range(23)]
rows = [torch.arange(1200)] * 3 + [torch.randperm(1200)[:600] for _ in range(20)]
model, *_ = map(fit, rows, paths)
stored = {"batch_size": 100, "load_from_disk": False}
retrained = {"m": 20, "subset_ids": rows[3:], "subset_ckpt_filenames": paths[3:]}
predicted = model(asked).argmax(1)
explainers = {
    "random": quanda.RandomExplainer(model, train),
    "similarity": quanda.CaptumSimilarity(model, train, "similarity", "1", **stored),
    "TRAK": quanda.TRAK(model, train, "trak", proj_dim=256, **stored),
    "TrakCore": TrakCore(model, train),
    "TrakCore of 3": TrakCore(model, train, checkpoints=paths[:3]),
}
print("               mislabelled  class  shortcut  LDS")
for name, explainer in explainers.items():
    scores = explainer.explain(asked, predicted)
    # To break ties, the metric adds 1e-4 times the row number to each self-influence. This could
    # reorder small values, but it cannot reorder ranks.
    ranks = explainer.self_influence().argsort().argsort().float()
    metrics = [
        quanda.MislabelingDetectionMetric(model, train, wrong, precomputed_self_influence=ranks),
        quanda.ClassDetectionMetric(model, train),
        quanda.ShortcutDetectionMetric(model, train, marked, shortcut_cls=0),
        quanda.LinearDatamodelingMetric(model, train, **retrained),
    ]
    for i, given in enumerate([(predicted,), (asked, labels), (predicted, asked)], 1):
        metrics[i].update(scores, *given)
    print(f"{name:15}" + "".join(f"{metric.compute()['score']:9.2f}" for metric in metrics))
