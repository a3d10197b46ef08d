"""An experiment's figure shows the samples as the page does: one drawing, one print."""

import io

import numpy as np
import pytest
from matplotlib.image import imread
from reported import DRAW, HOSTILE, STUDY, finished

from trak_core.report.examples import EACH, find_examples
from trak_core.report.figure import influences_figure
from trak_core.report.numbers import signed
from trak_core.report.read import read_experiment
from trak_core.stages.draw_influences import draw_influences
from trak_core.study.study import Study


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("figure"))


@pytest.fixture(params=["", DRAW], ids=["printed", "drawn"])
def study_file(request, tmp_path):
    path = tmp_path / "study.py"
    path.write_text(STUDY.replace("HOSTILE", repr(HOSTILE)) + request.param)
    return path


def unspaced(text):
    """Text as it is before lines are broken."""
    return "".join(text.split())


def test_a_figure_shows_what_the_page_shows(results, study_file):
    experiment = read_experiment(results / "scores/mine.h5", results, 4, EACH)
    (examples,) = find_examples(Study.load(study_file), [experiment], [4])
    tiles = np.reshape(influences_figure(examples).axes, (4, 1 + 2 * EACH))
    for row, about in zip(tiles, experiment.targets, strict=True):
        expected = [(f"target {about['id']}", "predicted", examples.targets[about["id"]])]
        for sign in (1, -1):
            best = examples.strongest(about["id"], sign)
            expected += [
                (f"train {one['train_id']}", signed(one["score"]), examples.train[one["train_id"]])
                for one in best
            ]
            expected += [None] * (EACH - len(best))
        for axes, shown in zip(row, expected, strict=True):
            assert axes.axison is (shown is not None)
            if shown is None:
                continue
            title, more, sample = shown
            above = unspaced(axes.get_title())
            assert above.startswith(f"{unspaced(title)}label")
            assert above.endswith(more) or (more == "predicted" and more in above)
            if isinstance(sample, str):
                assert unspaced(axes.texts[0].get_text()) == unspaced(sample)
            else:
                pixels = imread(io.BytesIO(sample.data), format=sample.kind)
                assert np.array_equal(axes.images[0].get_array(), pixels)


def test_the_same_scores_give_the_same_picture(results, study_file, tmp_path):
    files = [tmp_path / name for name in ("one.png", "two.png")]
    for file in files:
        draw_influences(figure=file, scores=results / "scores/mine.h5", study_file=study_file)
    one, two = (file.read_bytes() for file in files)
    assert one == two
    assert imread(io.BytesIO(one), format="png").ndim == 3


def test_text_of_users_is_no_formula(results, tmp_path):
    study = tmp_path / "study.py"
    words = "\nx_data = ['$x^{$'] * 24\n"
    text = STUDY.replace("HOSTILE", repr(HOSTILE)) + words
    for rows in ("[:20]", "[20:]"):
        text = text.replace(f"TensorDataset(x{rows}, y{rows})", f"list(zip(x_data{rows}, y{rows}))")
    study.write_text(text)
    draw_influences(figure=tmp_path / "a.png", scores=results / "scores/mine.h5", study_file=study)
    assert (tmp_path / "a.png").stat().st_size > 0
