"""Fixtures that several test files of this folder use."""

import pytest

# Imports are in fixtures, because the process that distributes tests imports this file too.


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    """Two small studies with trained checkpoints; their features and oracles are computed once."""
    import torch
    from trained_cases import Case

    folder = tmp_path_factory.mktemp("checkpoints")
    torch.set_num_threads(1)
    return {name: Case(name, folder) for name in ("small_digits", "diabetes")}


@pytest.fixture(scope="session")
def digits(cases):
    """The study of images, a classification."""
    return cases["small_digits"]


@pytest.fixture(params=["small_digits", "diabetes"])
def case(request, cases):
    return cases[request.param]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """The results folder of a study whose texts look like markup: two checkpoints, four targets."""
    from reported import finished

    return finished(tmp_path_factory.mktemp("reported"))


@pytest.fixture(scope="session")
def shown_as(results, tmp_path_factory):
    """The study of each kind of samples, and the files that show them."""
    from reported import CODES, draw, study_with

    def drawn(name):
        folder = tmp_path_factory.mktemp(name)
        study_file = study_with(folder, CODES[name])
        return study_file, draw(results, folder, study_file)

    return {name: drawn(name) for name in CODES}


@pytest.fixture
def reads(monkeypatch):
    """The checkpoints that are read, in order."""
    from trak_core.attribution.loaded_model import LoadedModel

    paths, of = [], LoadedModel.of_study

    def watched(study, checkpoint, *given):
        paths.append(checkpoint)
        return of(study, checkpoint, *given)

    monkeypatch.setattr(LoadedModel, "of_study", watched)
    return paths


@pytest.fixture
def linear(tmp_path, monkeypatch):
    """Training samples and targets of the linear study, and a function that makes attributors."""
    import torch
    from linear_study import with_two_checkpoints

    from trak_core import Attributor
    from trak_core.study.study import Study

    monkeypatch.chdir(tmp_path)
    study = Study.load(with_two_checkpoints(tmp_path)[0]).module
    train, targets = (study.x[:30], study.y[:30]), (study.x[30:], study.y[30:])

    def attributor(checkpoints=("c0.pt", "c1.pt"), **settings):
        settings = {"proj_dim": 8, **settings}
        return Attributor(torch.nn.Linear(3, 1), "regression", checkpoints, **settings)

    return train, targets, attributor
