"""Features made in a notebook are scored by the pipeline, and the other way round."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from compat_study import (
    DAMPING,
    TARGETS,
    K,
    N,
    compat_scores,
    featurized,
    featurized_by_the_pipeline,
    make_study,
    pipeline_scores,
    tracer,
)
from pipeline import read_scores, run_stages
from torch import nn

import trak_core.compat as trak
from trak_core.artifacts import FEATURES, ArtifactError, create, open_artifact
from trak_core.compat.exchange import export_features, import_features
from trak_core.compat.projectors import NoOpProjector
from trak_core.compat.savers import SAMPLE_COLUMNS, ModelIDException
from trak_core.errors import InputError
from trak_core.spec import stream_of


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path)


def close(found, expected):
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def test_the_pipeline_scores_what_a_notebook_featurized(study, tmp_path):
    made = featurized(study, tmp_path / "store")
    results = tmp_path / "results/features"
    for name, path in study["checkpoints"].items():
        given = {"checkpoint": name, "checkpoint_file": path, "study_file": study["path"]}
        export_features(made, stream_of(name), results / name / "train.h5", **given)
        export_features(
            made,
            stream_of(name),
            results / name / "mine.h5",
            exp_name="mine",
            sample_ids=TARGETS,
            **given,
        )
    found = pipeline_scores(study, tmp_path, results)
    assert found.columns.tolist() == TARGETS
    close(found.to_numpy(), compat_scores(study, tmp_path / "store"))


def test_an_export_is_the_file_that_the_pipeline_writes(study, tmp_path):
    made = featurized(study, tmp_path / "store")
    featurized_by_the_pipeline(study, tmp_path / "theirs.h5", "run1", "train")
    export_features(
        made,
        stream_of("run1"),
        tmp_path / "ours.h5",
        checkpoint="run1",
        checkpoint_file=study["checkpoints"]["run1"],
        study_file=study["path"],
    )
    with (
        open_artifact(tmp_path / "theirs.h5", FEATURES) as theirs,
        open_artifact(tmp_path / "ours.h5", FEATURES) as ours,
    ):
        assert ours.spec == theirs.spec
        assert set(ours.file) == set(theirs.file)
        np.testing.assert_allclose(ours.matrix("features"), theirs.matrix("features"), atol=1e-5)
        for key in ("outputs", "loss_weights", "curvature", "labels", "predictions", "sample_ids"):
            assert ours.vector(key).dtype == theirs.vector(key).dtype
            np.testing.assert_allclose(ours.vector(key), theirs.vector(key), rtol=1e-4)


def test_a_notebook_and_the_pipeline_share_one_scoring(study, tmp_path):
    """Training features of a notebook, targets of the pipeline: the same scores again."""
    made = featurized(study, tmp_path / "store")
    results = tmp_path / "results/features"
    for name, path in study["checkpoints"].items():
        file = results / name / "train.h5"
        given = {"checkpoint": name, "checkpoint_file": path, "study_file": study["path"]}
        export_features(made, stream_of(name), file, **given)
        featurized_by_the_pipeline(study, results / name / "mine.h5", name, "mine", TARGETS)
    mixed = pipeline_scores(study, tmp_path, results)
    close(mixed.to_numpy(), compat_scores(study, tmp_path / "store"))


def test_a_notebook_scores_what_the_pipeline_featurized(study, tmp_path):
    results = tmp_path / "results"
    final = run_stages(
        results,
        study["path"],
        study["checkpoints"],
        TARGETS,
        model_output="image_classification",
        proj_dim=K,
        damping=DAMPING,
    )
    made = tracer(study, tmp_path / "store", lambda_reg=1.0)
    for name in study["checkpoints"]:
        folder = results / "features" / name
        import_features(made, folder / "train.h5", stream_of(name))
        import_features(made, folder / "mine.h5", stream_of(name), exp_name="mine")
    assert made.saver.model_ids[stream_of("run1")]["is_featurized"] == 1
    made.finalize_features()
    close(compat_scores(study, tmp_path / "store"), read_scores(final).to_numpy())


def test_only_what_was_asked_for_is_written(study, tmp_path):
    """The files of ``trak``, a lock, and the maps of labels and predictions for an export."""
    made = featurized(study, tmp_path / "store")
    made.finalize_scores("mine")
    names = [
        "grads",
        "features",
        "out_to_loss",
        "_is_featurized",
        "_samples",
        "mine_grads",
        "mine_samples",
    ]
    ids = [stream_of(name) for name in study["checkpoints"]]
    expected = {f"{m}/{name}.mmap" for m in ids for name in names} | {f"id_{m}.json" for m in ids}
    expected |= {"metadata.json", "experiments.json", "scores/mine.mmap", ".lock"}
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "store")) for path in files} == expected


def test_exports_of_one_store_go_together(study, tmp_path):
    made = featurized(study, tmp_path / "store")
    run1, p = stream_of("run1"), made.num_params_for_grad
    export_features(made, run1, tmp_path / "train.h5")
    export_features(made, run1, tmp_path / "mine.h5", exp_name="mine")
    made.saver.load_current_store(run1)
    with (
        open_artifact(tmp_path / "train.h5", FEATURES) as train,
        open_artifact(tmp_path / "mine.h5", FEATURES) as mine,
    ):
        assert train.spec.keys() == mine.spec.keys()
        own = {"split", "targets_digest"}
        for key in train.spec.keys() - own:
            assert train.spec[key] == mine.spec[key], key
        assert train.spec["projection"]["stream"] == run1
        expected = made.saver.current_store["grads"] * np.sqrt(p / K)
        np.testing.assert_allclose(train.matrix("features"), expected, rtol=1e-6)
    assert pd.read_hdf(tmp_path / "mine.h5", "features").shape == (len(TARGETS), K)


def rewritten(file, **changes):
    """Write a features file again as one of another specification."""
    with open_artifact(file, FEATURES) as old:
        features, ids = old.matrix("features")[:], old.index("features")
        columns = {key: old.vector(key) for key in (*SAMPLE_COLUMNS, "loss_weights", "sample_ids")}
        spec, provenance = {**old.spec, **changes}, old.provenance
    with create(file, FEATURES, spec, provenance) as new:
        new.matrix("features", ids, range(features.shape[1]))[:] = features
        for key, values in columns.items():
            new.vector(key, values)


def test_what_does_not_belong_together_is_refused(study, tmp_path):
    made = featurized(study, tmp_path / "store")
    run1, file = stream_of("run1"), tmp_path / "train.h5"
    with pytest.raises(InputError, match=rf"must be its projection's stream, {run1} .* Found"):
        export_features(made, stream_of("run2"), file, checkpoint="run1")
    with pytest.raises(InputError, match=r"one id a sample, 60\. Found 2"):
        export_features(made, run1, file, sample_ids=[1, 2])
    featurized_by_the_pipeline(study, file, "run1", "train")
    with pytest.raises(ArtifactError, match=r"settings of this TRAKer.*'stream'"):
        import_features(made, file, stream_of("run2"))
    rewritten(file, preconditioner="adam")
    with pytest.raises(ArtifactError, match=r"settings of this TRAKer.*'preconditioner': 'adam'"):
        import_features(made, file, run1)
    rewritten(file, preconditioner=None)
    other = trak.TRAKer(
        nn.Linear(6, 3), "image_classification", N, tmp_path / "b", device="cpu", proj_dim=K
    )
    with pytest.raises(ArtifactError, match="n_params"):
        import_features(other, file, run1)
    unknown = tracer(study, tmp_path / "c")
    unknown.projector = NoOpProjector(device="cpu")
    with pytest.raises(ArtifactError, match="'identity'"):
        import_features(unknown, file, run1)
    with pytest.raises(InputError, match=f"all rows of model id {run1} must be there"):
        export_features(made, run1, tmp_path / "late.h5", exp_name="other")
    with pytest.raises(ModelIDException, match="Found no 7"):
        export_features(made, 7, tmp_path / "late.h5")
    made.saver.del_grads(run1)
    with pytest.raises(InputError, match="all rows of model id"):
        export_features(made, run1, tmp_path / "late.h5")
    assert not Path(tmp_path / "late.h5").exists()


def test_tasks_that_the_pipeline_does_not_know_are_not_exchanged(study, tmp_path):
    class Mine(trak.modelout_functions.ImageClassificationModelOutput):
        pass

    made = tracer(study, tmp_path)
    made.task = Mine()
    made.load_checkpoint(torch.load(study["checkpoints"]["run1"]), model_id=0)
    made.featurize((study["x"][:N], study["y"][:N]), num_samples=N)
    message = r"own model outputs .* only\. Found the task Mine"
    with pytest.raises(InputError, match=message):
        export_features(made, 0, tmp_path / "train.h5")
    with pytest.raises(InputError, match=message):
        import_features(made, tmp_path / "train.h5", 0)
    assert not (tmp_path / "train.h5").exists()
