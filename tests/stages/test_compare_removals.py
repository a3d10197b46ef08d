"""Tables of models retrained without chosen samples, or only on them, agree with plain loops."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from pipeline import read_scores
from refused import refused
from small_run import RETRAINED, STUDY, embeddings_spec, margins

from trak_core.artifacts import ArtifactError
from trak_core.evaluation.intervals import mean_interval
from trak_core.runtime.files import write_csv
from trak_core.stages.compare_removals import compare_removals
from trak_core.stages.retrain import listed_rows, retrain
from trak_core.study.retraining_draws import random_removal, training_seed

FRACTIONS, DRAWS = [0.2, 0.5], 2
LISTED = replace(RETRAINED, subsets="list", seeds=1, seed=0)


def test_removals_for_targets_agree_with_a_loop(run, tmp_path):
    sizes, draws, seeds, targets = [10, 30], 2, 2, run.targets[:3]
    n_removed = [10, 0.2, 0.0667]  # of 150: 10 again
    spec = replace(RETRAINED, seeds=seeds, seed=1, n_removed=n_removed, draws=draws)
    top, at_random = (replace(spec, subsets=f"without {by}") for by in ("top", "random"))
    jobs = {"study_file": STUDY, "code": "code", "batch_size": 64, "threads": 1}
    files = [tmp_path / f"{i}.h5" for i in range(3)]
    groups = [targets[:2], targets[2:]]
    about = {"scores_spec": run.spec.as_dict()}
    naming = {"top": [about | {"target_ids": group} for group in groups], "random": [{}]}
    for path, own in zip(files, naming["top"], strict=False):
        retrain(retrained=path, named_by=[run.scores], spec=top, naming=own, **jobs)
    retrain(retrained=files[2], spec=at_random, **jobs)
    other = {"scores_spec": replace(run.spec, damping=3).as_dict(), "target_ids": targets}
    with pytest.raises(ArtifactError, match=r"current config.*'damping': 3.*rule average_scores"):
        retrain(retrained=tmp_path / "x.h5", named_by=[run.scores], spec=top, naming=other, **jobs)
    compared = {"removals": tmp_path / "c.h5", "retrained": files, "naming": naming}
    compared |= {"spec": top, "code": "code"}
    compare_removals(scores=run.scores, **compared)
    table = pd.read_hdf(tmp_path / "c.h5", "targets")
    assert len(table) == len(targets) * (1 + 2 * 2 * len(sizes))

    target, size = targets[2], 30
    column = read_scores(run.scores)[target].to_numpy()
    gone = [i for i in np.argsort(-column) if column[i] > 0][:size]

    def trained(mask, repeat):
        logits, labels = run.trained_on(mask, training_seed(1, 0, repeat))
        return margins(logits, labels)[2], int(logits[2].argmax())

    kept = ~np.isin(np.arange(150), gone)
    pairs = [(trained(np.ones(150), r), trained(kept, r)) for r in range(seeds)]
    table = table.set_index(["measure", "subset", "n", "target_id"])["mean"].sort_index()
    changes = [b[0] - a[0] for a, b in pairs]
    assert abs(table["change", "top", size, target] - np.mean(changes)) < 1e-3
    assert table["flips", "top", size, target] == np.mean([b[1] != a[1] for a, b in pairs])
    whole = table["output", "everything", 0, target]
    assert abs(whole - np.mean([a[0] for a, _ in pairs])) < 1e-3
    masks = pd.read_hdf(files[2], "masks").to_numpy()
    assert masks.sum(axis=1).tolist() == [150, 140, 140, 120, 120]
    summary = pd.read_hdf(tmp_path / "c.h5", "summary")
    assert (summary["low"] <= summary["mean"]).all()
    assert (summary["mean"] <= summary["high"]).all()
    means = summary.set_index(["measure", "subset", "n"])["mean"]
    assert abs(means["change", "top", 30] - table["change", "top", 30].mean()) < 1e-12
    for measure in ("change", "flips"):
        subsets = means[measure].index.unique("subset").tolist()
        assert subsets == ["top", "random", "top less random"]
        top, at_random, less = means[measure].to_numpy().reshape(3, 2)
        assert np.abs(top - at_random - less).max() < 1e-12
    other = run.stages(tmp_path / "other", damping=1)
    with pytest.raises(ArtifactError, match=r"0\.h5.*'named_by'.*rule retrain_removals rem"):
        compare_removals(scores=other, **compared)


def test_removals_by_baselines_are_compared_with_those_by_scores(run, tmp_path):
    """The texts of samples are their labels, so BM25 finds the first samples of the same digit."""
    study = tmp_path / "described.py"
    describe = "def describe(sample):\n    return f'a {int(sample[1])}'\n"
    study.write_text(f"{STUDY.read_text()}\n\n{describe}")
    target_ids, size = run.targets[:2], 5
    jobs = {"study_file": study, "code": "code", "batch_size": 64, "threads": 1}
    spec = replace(RETRAINED, seeds=2, seed=1, n_removed=[size], draws=1)
    embeddings = run.embeddings(tmp_path, study)
    about = embeddings_spec(run).as_dict()
    of_embeddings = {"embeddings_spec": about, "checkpoints": [*run.checkpoints]}
    naming = {
        "top": [{"scores_spec": run.spec.as_dict(), "target_ids": target_ids}],
        "random": [{}],
        "bm25": [{"target_ids": target_ids}],
        "embedding_cosine": [of_embeddings | {"target_ids": target_ids}],
    }
    files = {"top": [run.scores], "embedding_cosine": embeddings}
    for by, (own,) in naming.items():
        made_for = {"spec": replace(spec, subsets=f"without {by}"), "naming": own}
        retrain(retrained=tmp_path / f"{by}.h5", named_by=files.get(by, []), **made_for, **jobs)
    masks = pd.read_hdf(tmp_path / "bm25.h5", "masks").to_numpy()
    labels = run.train.batch(0, 150)[1].numpy()
    for row, target in enumerate(run.study.split("mine", target_ids).batch(0, 2)[1].tolist()):
        removed = np.flatnonzero(masks[row] == 0).tolist()
        assert removed == np.flatnonzero(labels == target)[:5].tolist()
    cosines = 0
    for path in embeddings:
        frames = (pd.read_hdf(path, key).astype(float) for key in ("train", "targets"))
        train, targets = (x.div(np.sqrt((x**2).sum(axis=1)), axis=0) for x in frames)
        cosines = cosines + train.to_numpy() @ targets.loc[target_ids].to_numpy().T
    masks = pd.read_hdf(tmp_path / "embedding_cosine.h5", "masks").to_numpy()
    for row, column in enumerate(cosines.T):
        assert set(np.flatnonzero(masks[row] == 0)) == set(np.argsort(-column)[:5])
    compared = {"removals": tmp_path / "c.h5", "scores": run.scores, "code": "code"}
    compared |= {"retrained": [tmp_path / f"{by}.h5" for by in naming], "naming": naming}
    compared |= {"named_by": embeddings, "spec": replace(spec, subsets="without top")}
    compare_removals(**compared)
    summary = pd.read_hdf(tmp_path / "c.h5", "summary").query("measure == 'change'")
    summary = summary.set_index("subset")["mean"]
    everything, without = (
        pd.read_hdf(tmp_path / f"{name}.h5", "outputs")[target_ids].to_numpy().astype(float)
        for name in ("random", "bm25")
    )
    change = np.mean([without[:2, 0] - everything[:2, 0], without[2:, 1] - everything[:2, 1]])
    assert abs(summary["bm25"] - change) < 1e-12
    for name in ("bm25", "embedding_cosine"):
        assert abs(summary[f"top less {name}"] - (summary["top"] - summary[name])) < 1e-12
    words = [{"digest": "other", "target_ids": target_ids}]
    others = {"bm25": {"naming": naming | {"bm25": words}}}
    others["embedding_cosine"] = {"named_by": embeddings[::-1]}
    for name, other in others.items():
        with pytest.raises(ArtifactError, match=rf"{name}\.h5.*rule retrain_removals rem"):
            compare_removals(**compared | other)


@pytest.fixture(scope="module", params=["suspects", "select"])
def listed(request, run, tmp_path_factory):
    """Return removals of a list, and the arguments that made them."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    order = np.random.default_rng(5).permutation(len(run.train.ids))
    write_csv(folder / "list.csv", pd.DataFrame({"id": [run.train.ids[i] for i in order]}))
    return kind, order, *removals_by_list(run, folder, kind, DRAWS)


def removals_by_list(run, folder, kind, n_draws):
    given = {"named_by": [folder / "list.csv"], "spec": LISTED, "code": "code"}
    files = [folder / f"{draw}.h5" for draw in range(n_draws)]
    own = [{"kind": kind, "fractions": FRACTIONS, "draw": draw} for draw in range(n_draws)]
    for path, naming in zip(files, own, strict=True):
        job = {"study_file": STUDY, "batch_size": 16, "threads": 1, "naming": naming}
        retrain(retrained=path, **job, **given)
    given |= {"scores": run.scores, "retrained": files, "naming": {kind: own}}
    compare_removals(removals=folder / "removals.h5", **given)
    return folder / "removals.h5", given


def by_hand(run, chosen, draw):
    """Return accuracy, loss and output of one model for each target, by plain torch."""
    logits, labels = run.trained_on(chosen, training_seed(0, 0, draw))
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none").numpy()
    right = (logits.argmax(1) == labels).double().numpy()
    return {"accuracy": right, "target_loss": losses, "output": margins(logits, labels)}


def test_models_of_a_list_are_those_trained_by_hand(run, listed):
    kind, order, path, _ = listed
    n = len(order)
    whole = np.ceil if kind == "select" else np.round
    sizes = [int(whole(part * n)) for part in FRACTIONS]
    keys = ["measure", "subset", "n", "target_id"]
    targets = pd.read_hdf(path, "targets").set_index(keys)["mean"].sort_index()
    summary = pd.read_hdf(path, "summary").set_index(keys[:3]).sort_index()
    expected = {("everything", 0): [by_hand(run, np.ones(n, bool), draw) for draw in range(DRAWS)]}
    for size in sizes:
        out = np.isin(np.arange(n), order[:size])
        at_random = [~random_removal(n, size, draw, 0) for draw in range(DRAWS)]
        for subset, chosen in (("list", [out] * DRAWS), ("random", at_random)):
            chosen = chosen if kind == "select" else [~rows for rows in chosen]
            models = [by_hand(run, rows, draw) for draw, rows in enumerate(chosen)]
            expected[subset, size] = models
    for (subset, size), models in expected.items():
        for measure in models[0]:
            values = np.mean([model[measure] for model in models], axis=0)
            stored = targets[measure, subset, size][run.targets].to_numpy()
            np.testing.assert_allclose(stored, values, rtol=1e-4, err_msg=f"{measure}, {subset}")
    assert len(summary) == 3 * (1 + 3 * len(sizes))
    for size in sizes:
        losses = [
            np.stack([model["target_loss"] for model in expected[subset, size]]).astype(float)
            for subset in ("list", "random")
        ]
        row = summary.loc["target_loss", "list less random", size]
        both = [summary["mean"]["target_loss", subset, size] for subset in ("list", "random")]
        assert row["mean"] == pytest.approx(both[0] - both[1], abs=1e-6)
        low, high = mean_interval(losses[0] - losses[1])
        assert (row["low"], row["high"]) == pytest.approx((low, high), abs=1e-3)


def test_models_of_another_list_or_draw_are_refused(listed, tmp_path):
    kind, _, _, given = listed
    other = "select" if kind == "suspects" else "suspects"
    given = given | {"removals": tmp_path / "removals.h5"}
    again = [own | {"kind": other} for own in given["naming"][kind]]
    with pytest.raises(ArtifactError, match="retrain_removals"):
        compare_removals(**given | {"naming": {other: again}})
    with pytest.raises(ArtifactError, match="retrain_removals"):
        compare_removals(**given | {"retrained": given["retrained"][::-1]})
    turned = pd.read_csv(given["named_by"][0])[::-1]
    write_csv(tmp_path / "list.csv", turned)
    with pytest.raises(ArtifactError, match=r"0\.h5.*'named_by'.*retrain_removals"):
        compare_removals(**given | {"named_by": [tmp_path / "list.csv"]})


def test_an_empty_list_has_only_models_of_everything(run, tmp_path):
    write_csv(tmp_path / "list.csv", pd.DataFrame({"id": []}))
    path, _ = removals_by_list(run, tmp_path, "duplicates", 1)
    summary = pd.read_hdf(path, "summary").set_index("measure")
    assert set(summary["subset"]) == {"everything"}
    expected = by_hand(run, np.ones(len(run.train.ids), dtype=bool), 0)["target_loss"].mean()
    assert summary["mean"]["target_loss"] == pytest.approx(expected, rel=1e-4)


def test_ids_of_a_list_are_read_as_texts(tmp_path):
    ids = ["=a", "-1", "007", "nan", "b, c", "plain"]
    write_csv(tmp_path / "list.csv", pd.DataFrame({"id": ["nan", "=a", "007", "nan", "-1"]}))
    assert listed_rows(tmp_path / "list.csv", ids).tolist() == [3, 0, 2, 1]
    # Lists of copies have ids of dtype object.
    write_csv(tmp_path / "list.csv", pd.DataFrame({"id": np.array([-1, 7], dtype=object)}))
    assert listed_rows(tmp_path / "list.csv", [7, 8, -1]).tolist() == [2, 0]
    with refused("stages.listed", tmp_path / "list.csv", "list", "7"):
        listed_rows(tmp_path / "list.csv", [-1, 8])
