"""Targets are selected by a condition on their columns."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from pipeline import ON_CPU
from refused import refused
from small_run import STUDY, margins

from trak_core.artifacts import ArtifactError, selected_ids
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_outputs import compute_outputs
from trak_core.stages.select_targets import select_targets


@pytest.fixture(scope="module")
def spec(run):
    return replace(run.spec.features, projection={"kind": "none"}, split="all")


@pytest.fixture(scope="module")
def outputs(run, spec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    for name, checkpoint in run.checkpoints.items():
        compute_outputs(
            outputs=folder / f"{name}.h5",
            checkpoint=checkpoint,
            study_file=STUDY,
            spec=spec.under(name),
            **ON_CPU,
        )
    return [folder / f"{name}.h5" for name in run.checkpoints]


def selected(path, outputs, spec, where, **more):
    given = {"experiment": "errors", "targets_digest": "by description", "code": "code"}
    select_targets(targets=path, outputs=outputs, spec=spec, where=where, **given | more)
    return pd.read_hdf(path, "targets")


def test_wrong_predictions_are_selected_in_the_studys_order(run, outputs, spec, tmp_path):
    """The oracle is plain torch: the class that most of three models predict is not the label."""
    split = run.study.split("pool", run.pool)
    images, labels = split.batch(0, len(run.pool))
    predictions, values = [], []
    for checkpoint in run.checkpoints.values():
        model = run.study.make_model()
        model.load_state_dict(torch.load(checkpoint, weights_only=True))
        logits = model.eval()(images).detach()
        predictions.append(logits.argmax(1).numpy())
        values.append(margins(logits, labels))
    most = []
    sure = np.mean(values, axis=0) > 0
    for column, label, likely in zip(np.transpose(predictions), labels.tolist(), sure, strict=True):
        counts = np.bincount(column, minlength=10)
        tied = np.flatnonzero(counts == counts.max()).tolist()
        # A tie is won by the label if its mean log-odds are positive, else by the smallest class.
        others = [k for k in tied if k != label]
        most.append(label if label in tied and (likely or not others) else others[0])
    wrong = [i for i, (a, b) in enumerate(zip(most, labels.tolist(), strict=True)) if a != b]
    table = selected(tmp_path / "errors.h5", outputs, spec, "prediction != label")
    assert table["id"].tolist() == [run.pool[i] for i in wrong]
    assert table["prediction"].tolist() == [most[i] for i in wrong]
    assert table["label"].tolist() == [labels[i] for i in wrong]
    np.testing.assert_allclose(table["output"], np.mean(values, axis=0)[wrong], rtol=1e-4)
    np.testing.assert_allclose(table["output_sd"], np.std(values, axis=0)[wrong], rtol=1e-3)


def test_features_of_selected_targets_are_those_of_their_ids(run, outputs, spec, tmp_path):
    path = tmp_path / "errors.h5"
    ids = selected(path, outputs, spec, "prediction != label and label in [2, 3]")["id"].tolist()
    files = [tmp_path / name for name in ("selected.h5", "named.h5")]
    own = replace(run.spec.features, checkpoint="c0", split="mine", targets_digest="by description")
    for file, given in zip(files, ({"selected": [path]}, {"targets": ids}), strict=True):
        compute_features(
            features=file, checkpoint=run.checkpoints["c0"], study_file=STUDY, spec=own,
            **given, **ON_CPU,
        )  # fmt: skip
    assert len(ids) > 1
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(ArtifactError, match="description of targets"):
        selected_ids([path], replace(own, targets_digest="another"))


def test_conditions_can_use_the_studys_columns(run, outputs, spec, tmp_path):
    study = tmp_path / "study.py"
    columns = "\n\ndef target_columns():\n    return {'row': range(len(target_ids()))}\n"
    study.write_text(STUDY.read_text() + columns)
    table = selected(tmp_path / "rows.h5", outputs, spec, "row < 3", study_file=study)
    assert table["id"].tolist() == run.pool[:3]
    assert table["row"].tolist() == [0, 1, 2]


def test_no_or_too_many_targets_are_refused(outputs, spec, tmp_path, monkeypatch):
    with refused("stages.matches", "label == 77", "Found 0"):
        selected(tmp_path / "errors.h5", outputs, spec, "label == 77")
    monkeypatch.setattr("trak_core.stages.select_targets.MOST_TARGETS", 39)
    with refused("stages.matches", "39"):
        selected(tmp_path / "errors.h5", outputs, spec, "label >= 0")
    other = replace(spec, study_digest="another")
    with pytest.raises(ArtifactError, match="the current config"):
        selected(tmp_path / "errors.h5", outputs, other, "prediction != label")
