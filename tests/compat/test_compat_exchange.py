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
from trak_core.artifacts import FEATURES, ArtifactError, open_artifact
from trak_core.compat.exchange import export_features, import_features
from trak_core.compat.projectors import NoOpProjector
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
        given = {"checkpoint": name, "checkpoint_file": path, "study": study["path"]}
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
        study=study["path"],
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
        given = {"checkpoint": name, "checkpoint_file": path, "study": study["path"]}
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


def test_finalizing_writes_artifacts_that_go_together(study, tmp_path):
    made = featurized(study, tmp_path)
    made.finalize_scores("mine")
    folder = tmp_path / "artifacts/features" / str(stream_of("run1"))
    p = made.num_params_for_grad
    made.saver.load_current_store(stream_of("run1"))
    with (
        open_artifact(folder / "train.h5", FEATURES) as train,
        open_artifact(folder / "mine.h5", FEATURES) as mine,
    ):
        shared = ("projection", "parameters", "checkpoint", "model_output", "study", "dtype")
        assert [train.spec[key] for key in shared] == [mine.spec[key] for key in shared]
        assert train.spec["projection"]["stream"] == stream_of("run1")
        expected = made.saver.current_store["grads"] * np.sqrt(p / K)
        np.testing.assert_allclose(train.matrix("features"), expected, rtol=1e-6)
    frame = pd.read_hdf(folder / "mine.h5", "features")
    assert frame.shape == (len(TARGETS), K)
    # Training features do not change; scoring again replaces those of the targets.
    before = (folder / "train.h5").stat().st_mtime_ns, (folder / "mine.h5").stat().st_mtime_ns
    made.finalize_features()
    made.finalize_scores("mine")
    after = (folder / "train.h5").stat().st_mtime_ns, (folder / "mine.h5").stat().st_mtime_ns
    assert after[0] == before[0]
    assert after[1] > before[1]


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
    other = trak.TRAKer(
        nn.Linear(6, 3), "image_classification", N, tmp_path / "b", device="cpu", proj_dim=K
    )
    with pytest.raises(ArtifactError, match="n_params"):
        import_features(other, file, run1)
    unknown = tracer(study, tmp_path / "c")
    unknown.projector = NoOpProjector(device="cpu")
    with pytest.raises(ArtifactError, match="'identity'"):
        import_features(unknown, file, run1)
    made.saver.del_grads(run1)
    with pytest.raises(InputError, match="all rows of model id"):
        export_features(made, run1, tmp_path / "late.h5")
    assert not Path(tmp_path / "late.h5").exists()


def test_tasks_that_the_pipeline_does_not_know_leave_no_artifact(study, tmp_path):
    class Mine(trak.modelout_functions.ImageClassificationModelOutput):
        pass

    made = tracer(study, tmp_path)
    made.task = Mine()
    made.load_checkpoint(torch.load(study["checkpoints"]["run1"]), model_id=0)
    made.featurize((study["x"][:N], study["y"][:N]), num_samples=N)
    made.finalize_features()
    assert not (tmp_path / "artifacts").exists()
    with pytest.raises(
        InputError, match=r"own model outputs and projections only\. Found the task"
    ):
        export_features(made, 0, tmp_path / "train.h5")
