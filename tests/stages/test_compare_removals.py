"""Models retrained without the most helpful samples: the stages against a loop of trainings."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from pipeline import read_scores
from small_run import ARGUMENTS, RETRAINED, STUDY, embeddings_spec, margin
from torch.utils.data import Subset

from trak_core.artifacts import ArtifactError
from trak_core.evaluation.intervals import mean_interval
from trak_core.stages.compare_removals import compare_removals
from trak_core.stages.compute_outputs import compute_embeddings
from trak_core.stages.retrain import retrain
from trak_core.study.retraining_draws import training_seed


def test_removals_are_what_a_loop_of_trainings_gives(run, tmp_path):
    sizes, draws, seeds, targets = [10, 30], 2, 2, run.targets[:3]
    n_removed = [10, 0.2, 0.0667]  # of 150: 10 again
    spec = replace(RETRAINED, subsets="top removals", seeds=seeds, seed=1, n_removed=n_removed)
    random_spec = replace(spec, subsets="random removals", draws=draws)
    jobs = {"study_file": STUDY, "code": "code", "batch_size": 64, "threads": 1}
    random = tmp_path / "random.h5"
    retrain(retrained=random, spec=random_spec, **jobs)
    of_scores = {"named_by": [run.scores], "spec": spec, **jobs}
    groups, top = [targets[:2], targets[2:]], [tmp_path / "1.h5", tmp_path / "2.h5"]
    for group, path in zip(groups, top, strict=True):
        naming = {"scores_spec": run.spec.as_dict(), "target_ids": group}
        retrain(retrained=path, naming=naming, **of_scores)
    other = {"scores_spec": replace(run.spec, damping=3).as_dict(), "target_ids": targets}
    with pytest.raises(ArtifactError, match=r"today's config.*'damping': 3.*rule average_scores"):
        retrain(retrained=tmp_path / "x.h5", naming=other, **of_scores)
    compared = {"removals": tmp_path / "c.h5", "random": random, "top": top, "groups": groups}
    compared |= {"spec": random_spec, "code": "code"}
    compare_removals(scores=run.scores, **compared)
    table = pd.read_hdf(tmp_path / "c.h5", "targets")
    assert len(table) == 2 * len(sizes) * len(targets)

    target, size = targets[2], 30
    column = read_scores(run.scores)[target].to_numpy()
    gone = [i for i in np.argsort(-column) if column[i] > 0][:size]
    image, label = run.study.split("mine", [target]).batch(0, 1)

    def trained(rows, repeat):
        data = Subset(run.train.samples, rows)
        seed = training_seed(1, 0, repeat)
        model = run.study.function("train")(**ARGUMENTS, seed=seed, data=data).eval()
        with torch.no_grad():
            logits = model(image)[0]
        return margin(logits, label[0]).item(), int(logits.argmax())

    everything = list(range(len(column)))
    kept = [i for i in everything if i not in gone]
    pairs = [(trained(everything, r), trained(kept, r)) for r in range(seeds)]
    rows = (table["removed"] == "top") & (table["n_removed"] == size)
    effect = table[rows & (table["target_id"] == target)].iloc[0]
    assert abs(effect["change"] - np.mean([b[0] - a[0] for a, b in pairs])) < 1e-3
    assert effect["flips"] == np.mean([b[1] != a[1] for a, b in pairs])
    assert abs(effect["output"] - np.mean([a[0] for a, _ in pairs])) < 1e-3
    masks = pd.read_hdf(random, "masks").to_numpy()
    assert masks.sum(axis=1).tolist() == [150, 140, 140, 120, 120]
    summary = pd.read_hdf(tmp_path / "c.h5", "summary")
    assert summary["removed"].tolist() == ["top"] * 2 + ["random"] * 2 + ["difference"] * 2
    assert abs(summary["change"][1] - table[rows]["change"].mean()) < 1e-12
    for column in ("change", "flips"):
        top, random, difference = summary[column].to_numpy().reshape(3, 2)
        assert np.abs(top - random - difference).max() < 1e-12
    assert (summary["low"] <= summary["change"]).all()
    assert (summary["change"] <= summary["high"]).all()
    other = run.stages(tmp_path / "other", damping=1)
    with pytest.raises(ArtifactError, match=r"1\.h5.*'scores'.*rule retrain_without_top rem"):
        compare_removals(scores=other, **compared)


def test_removals_by_baselines_stand_beside_those_by_scores(run, tmp_path):
    """The study's texts are their labels: BM25 names the first samples of the same digit."""
    study = tmp_path / "described.py"
    says = "def describe(sample):\n    return f'a {int(sample[1])}'\n"
    study.write_text(f"{STUDY.read_text()}\n\n{says}")
    target_ids, size = run.targets[:2], 5
    jobs = {"study_file": study, "code": "code", "batch_size": 64, "threads": 1}
    spec = replace(RETRAINED, subsets="top removals", seeds=2, seed=1, n_removed=[size])
    random_spec = replace(spec, subsets="random removals", draws=1)
    retrain(retrained=tmp_path / "random.h5", spec=random_spec, **jobs)
    top = {"scores_spec": run.spec.as_dict(), "target_ids": target_ids}
    retrain(retrained=tmp_path / "top.h5", spec=spec, named_by=[run.scores], naming=top, **jobs)
    embeddings = [tmp_path / f"embeddings-{c}.h5" for c in run.checkpoints]
    about = embeddings_spec(run)
    for (name, checkpoint), path in zip(run.checkpoints.items(), embeddings, strict=True):
        given = {"checkpoint": checkpoint, "spec": about.under(name), "device": "cpu"}
        compute_embeddings(embeddings=path, **given, **jobs)
    naming = {"embeddings_spec": about.as_dict(), "checkpoints": [*run.checkpoints]}
    naming |= {"digest": "texts", "target_ids": target_ids}
    for name, files in {"bm25": [], "embedding_cosine": embeddings}.items():
        by = {"spec": replace(spec, subsets=f"top by {name}"), "naming": naming}
        retrain(retrained=tmp_path / f"{name}.h5", named_by=files, **by, **jobs)
    masks = pd.read_hdf(tmp_path / "bm25.h5", "masks").to_numpy()
    labels = run.train.batch(0, 150)[1].numpy()
    for row, target in enumerate(run.study.split("mine", target_ids).batch(0, 2)[1].tolist()):
        assert (
            np.flatnonzero(masks[row] == 0).tolist()
            == np.flatnonzero(labels == target)[:5].tolist()
        )
    cosines = 0
    for path in embeddings:
        own, asked = (pd.read_hdf(path, key).astype(float) for key in ("train", "targets"))
        asked = asked.loc[target_ids]
        own, asked = (x.div(np.sqrt((x**2).sum(axis=1)), axis=0) for x in (own, asked))
        cosines = cosines + own.to_numpy() @ asked.to_numpy().T
    masks = pd.read_hdf(tmp_path / "embedding_cosine.h5", "masks").to_numpy()
    for row, column in enumerate(cosines.T):
        assert set(np.flatnonzero(masks[row] == 0)) == set(np.argsort(-column)[:5])
    compared = {"removals": tmp_path / "c.h5", "random": tmp_path / "random.h5", "code": "code"}
    compared |= {"scores": run.scores, "top": [tmp_path / "top.h5"], "groups": [target_ids]}
    compared |= {name: [tmp_path / f"{name}.h5"] for name in ("bm25", "embedding_cosine")}
    compared |= {"digest": "texts", "embeddings": embeddings, "spec": random_spec}
    compare_removals(**compared)
    summary = pd.read_hdf(tmp_path / "c.h5", "summary").set_index("removed")["change"]
    everything, without = (
        pd.read_hdf(tmp_path / f"{name}.h5", "outputs")[target_ids].to_numpy().astype(float)
        for name in ("random", "bm25")
    )
    change = np.mean([without[:2, 0] - everything[:2, 0], without[2:, 1] - everything[:2, 1]])
    assert abs(summary["bm25"] - change) < 1e-12
    for name in ("bm25", "embedding_cosine"):
        assert abs(summary[f"top less {name}"] - (summary["top"] - summary[name])) < 1e-12
    others = {"bm25": {"digest": "other"}, "embedding_cosine": {"embeddings": embeddings[::-1]}}
    for name, other in others.items():
        with pytest.raises(ArtifactError, match=rf"{name}\.h5.*rule retrain_without_baseline rem"):
            compare_removals(**compared | other)


def test_what_all_targets_share_by_chance_is_in_the_interval():
    """The models that saw everything are the same for all targets: a lucky one shifts them all."""
    lucky = np.array([[-1.0], [0.0], [0.3]]).repeat(50, axis=1)
    low, high = mean_interval(lucky)
    assert low < -0.9
    assert high > 0.2
    own = np.random.default_rng(0).standard_normal((3, 50)).mean(axis=0) * np.ones((3, 1))
    low, high = mean_interval(own)
    error = own[0].std() / np.sqrt(50)
    assert abs((high - low) / (2 * 1.96 * error) - 1) < 0.15
