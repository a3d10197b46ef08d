"""Scores of means of targets, and of differences of means, follow from scores of each target."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from linear_study import with_two_checkpoints
from pipeline import averaged, read_scores, run_stages, scores_spec

from trak_core.artifacts import ArtifactError, verify
from trak_core.dependency_digests import content_digest
from trak_core.stages.compute_scores import average_targets
from trak_core.stages.draw_influences import draw_influences

SETTINGS = {"combine": "unit_average", "model_output": "regression", "normalize": True}
GROUPS = (["target-3", "target-1", "target-7"], ["target-0", "target-9"])


def scored(folder, way, study, checkpoints, targets, made=None):
    how = {"proj_dim": None} if way == "exact" else {"keep": way, "made": made}
    return run_stages(folder, study, checkpoints, targets, **SETTINGS, **how)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Return a study, its checkpoints and a folder with full scores of both groups of targets."""
    folder = tmp_path_factory.mktemp("full")
    study, checkpoints, _ = with_two_checkpoints(folder)
    for number, targets in enumerate(GROUPS):
        scored(folder / str(number), "full", study, checkpoints, targets)
    return study, checkpoints, folder


def contrast_of(folder, scores, way, checkpoints, phis=()):
    """Return scores of the difference of means, and a function that makes one checkpoint's."""
    specs = [
        scores_spec(checkpoints, own, **SETTINGS, proj_dim=None if way == "exact" else 8)
        for own in GROUPS
    ]
    digest = content_digest("mean", *(("mine", spec.targets_digest) for spec in specs))
    spec = replace(specs[0], experiment="contrast", targets_digest=digest)

    def part(checkpoint, members=(0, 1)):
        path = folder / f"scores/contrast/{checkpoint}.h5"
        average_targets(
            scores=path,
            members=[scores / f"{m}/scores/mine/{checkpoint}.h5" for m in members],
            spec=spec.under(checkpoint),
            code="code",
            memory_mb=64,
        )
        return path

    parts = [part(checkpoint) for checkpoint in sorted(checkpoints)]
    final = folder / "scores/contrast.h5"
    return averaged(final, parts, spec, phis, mean_of="mine, less that of others"), part


@pytest.mark.parametrize("way", ["full", "top_k", "exact"])
def test_scores_of_a_difference_are_differences_of_scores(way, full, tmp_path):
    study, checkpoints, given = full
    where = given if way == "full" else tmp_path
    matrices, outputs = [], []
    for number, targets in enumerate(GROUPS):
        folder = where / str(number)
        if way != "full":
            scored(folder, way, study, checkpoints, targets, made=given / str(number))
        outputs.append(pd.read_hdf(folder / "scores/mine.h5", "targets")["output"].mean())
        of_all = given if way == "top_k" else where
        matrices.append(read_scores(of_all / f"{number}/scores/mine.h5"))
    phis = [given / f"0/features/{c}/train.h5" for c in sorted(checkpoints)]
    path, part = contrast_of(tmp_path, where, way, checkpoints, phis if way == "top_k" else ())
    verify(path)
    expected = matrices[0].mean(axis=1) - matrices[1].mean(axis=1)
    near = {"rtol": 0, "atol": 2e-6 * np.abs(expected).max()}
    top = pd.read_hdf(path, "top_influences")
    np.testing.assert_allclose(top["score"], expected.loc[top["train_id"]], **near)
    assert top.loc[top["sign"] > 0, "train_id"].tolist() == expected.nlargest(5).index.tolist()
    # A mean of predictions has no label, so nothing is known about harm.
    assert "harm" not in pd.read_hdf(path, "train")
    if way != "top_k":
        assert read_scores(path).columns.tolist() == ["contrast"]
        np.testing.assert_allclose(read_scores(path)["contrast"], expected, **near)
    (about,) = pd.read_hdf(path, "targets").itertuples()
    assert (about.id, about.mean_of) == ("contrast", "mine, less that of others")
    assert about.output == pytest.approx(outputs[0] - outputs[1], rel=1e-5)
    with pytest.raises(ArtifactError, match="targets to average"):
        part("c0", (1, 0))


def test_a_mean_is_shown_by_its_description(full, tmp_path):
    study, checkpoints, scores = full
    path, _ = contrast_of(tmp_path, scores, "full", checkpoints)
    page, texts = tmp_path / "answer.html", tmp_path / "texts.h5"
    draw_influences(answer=page, texts=texts, scores=path, study_file=study, code="code")
    text = page.read_text()
    assert '"words":"the mean of mine, less that of others"' in text
    # A larger difference is neither better nor worse.
    assert "Raise the difference most" in text
    assert "helpful" not in text
    (words,) = pd.read_hdf(texts, "targets")["text"]
    assert words == "the mean of mine, less that of others"
