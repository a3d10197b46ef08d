"""A list put to the proof: models retrained without it, or on it, beside random samples."""

import numpy as np
import pandas as pd
import pytest
import torch
from refused import refused
from small_run import ARGUMENTS, OUTPUT, STUDY, margin
from torch.utils.data import Subset

from trak_core.artifacts import ArtifactError
from trak_core.spec import RetrainedSpec
from trak_core.stages.compare_removals import prove_list
from trak_core.stages.retrain import listed_rows, retrain
from trak_core.study.retraining_draws import random_removal, training_seed
from trak_core.system.files import write_csv

FRACTIONS, DRAWS = [0.2, 0.5], 2
SPEC = RetrainedSpec(
    subsets="list", arguments=ARGUMENTS, model_output=OUTPUT, study_digest="digest", seeds=1, seed=0
)


@pytest.fixture(scope="module", params=["suspects", "select"])
def proved(request, run, tmp_path_factory):
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    order = np.random.default_rng(5).permutation(len(run.train.ids))
    write_csv(folder / "list.csv", pd.DataFrame({"id": [run.train.ids[i] for i in order]}))
    files = [folder / f"{draw}.h5" for draw in range(DRAWS)]
    for draw, path in enumerate(files):
        retrain(
            retrained=path,
            listed=folder / "list.csv",
            study_file=STUDY,
            spec=SPEC,
            kind=kind,
            fractions=FRACTIONS,
            draw=draw,
            code="code",
            batch_size=16,
            threads=1,
        )
    proof = folder / "proof.h5"
    given = {"scores": run.scores, "retrained": files, "spec": SPEC, "code": "code"}
    given |= {"listed": folder / "list.csv"}
    prove_list(proof=proof, kind=kind, **given)
    return kind, order, proof, given


def by_hand(run, chosen, draw):
    """Accuracy and loss of one model on the targets, in plain torch."""
    data = Subset(run.train.samples, np.flatnonzero(chosen).tolist())
    model = run.study.function("train")(**ARGUMENTS, seed=training_seed(0, 0, draw), data=data)
    images, labels = run.study.split("mine", run.targets).batch(0, len(run.targets))
    with torch.no_grad():
        logits = model.eval()(images)
    outputs = [margin(x, y).item() for x, y in zip(logits, labels, strict=True)]
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    return (logits.argmax(1) == labels).double().mean().item(), loss, np.mean(outputs)


def test_models_are_those_trained_by_hand(run, proved):
    kind, order, proof, _ = proved
    n = len(order)
    whole = np.ceil if kind == "select" else np.round
    sizes = [int(whole(part * n)) for part in FRACTIONS]
    keys = ["measure", "subset", "n", "draw"]
    models = pd.read_hdf(proof, "models").set_index(keys)["mean"].sort_index()
    for draw in range(DRAWS):
        for size in sizes:
            out = np.zeros(n, dtype=bool)
            out[order[:size]] = True
            at_random = ~random_removal(n, size, draw, 0)
            for subset, chosen in (("list", out), ("random", at_random)):
                expected = by_hand(run, chosen if kind == "select" else ~chosen, draw)
                for measure, value in zip(
                    ("accuracy", "target_loss", "output"), expected, strict=True
                ):
                    found = models[measure, subset, size, draw]
                    assert found == pytest.approx(value, rel=1e-4), (measure, subset)
        whole = by_hand(run, np.ones(n, dtype=bool), draw)
        assert models["target_loss", "everything", 0, draw] == pytest.approx(whole[1], rel=1e-4)
    summary = pd.read_hdf(proof, "summary", where="subset == difference & measure == target_loss")
    assert summary["n"].tolist() == sizes
    for row in summary.itertuples():
        both = [models["target_loss", subset, row.n].mean() for subset in ("list", "random")]
        assert row.mean == pytest.approx(both[0] - both[1], abs=1e-6)
        assert row.low <= row.mean <= row.high


def test_models_of_another_list_or_draw_are_refused(proved, tmp_path):
    kind, _, _, given = proved
    other = "select" if kind == "suspects" else "suspects"
    with pytest.raises(ArtifactError, match="retrain_list"):
        prove_list(proof=tmp_path / "proof.h5", kind=other, **given)
    turned = given | {"retrained": given["retrained"][::-1]}
    with pytest.raises(ArtifactError, match="retrain_list"):
        prove_list(proof=tmp_path / "proof.h5", kind=kind, **turned)
    again = pd.read_csv(given["listed"])[::-1]
    write_csv(tmp_path / "list.csv", again)
    with pytest.raises(ArtifactError, match=r"0\.h5.*'listed'.*retrain_list"):
        prove_list(proof=tmp_path / "p.h5", kind=kind, **given | {"listed": tmp_path / "list.csv"})


def test_an_empty_list_has_a_proof_too(run, tmp_path):
    """Without copies `duplicates` names nothing: models of everything are all there is."""
    write_csv(tmp_path / "list.csv", pd.DataFrame({"id": []}))
    retrained, proof = tmp_path / "0.h5", tmp_path / "proof.h5"
    job = {"study_file": STUDY, "fractions": FRACTIONS, "draw": 0, "batch_size": 16, "threads": 1}
    about = {"spec": SPEC, "kind": "duplicates", "code": "code"}
    retrain(retrained=retrained, listed=tmp_path / "list.csv", **job, **about)
    listed = tmp_path / "list.csv"
    prove_list(proof=proof, scores=run.scores, retrained=[retrained], listed=listed, **about)
    summary = pd.read_hdf(proof, "summary").set_index("measure")
    assert set(summary["subset"]) == {"everything"}
    expected = by_hand(run, np.ones(len(run.train.ids), dtype=bool), 0)
    assert summary["mean"]["target_loss"] == pytest.approx(expected[1], rel=1e-4)


def test_a_list_is_read_as_it_was_written(tmp_path):
    ids = ["=a", "-1", "007", "nan", "b, c", "plain"]
    write_csv(tmp_path / "list.csv", pd.DataFrame({"id": ["nan", "=a", "007", "nan", "-1"]}))
    assert listed_rows(tmp_path / "list.csv", ids).tolist() == [3, 0, 2, 1]
    # Copies come as plain objects.
    write_csv(tmp_path / "list.csv", pd.DataFrame({"id": np.array([-1, 7], dtype=object)}))
    assert listed_rows(tmp_path / "list.csv", [7, 8, -1]).tolist() == [2, 0]
    with refused("stages.listed", tmp_path / "list.csv", "list", "7"):
        listed_rows(tmp_path / "list.csv", [-1, 8])
