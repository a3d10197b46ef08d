"""What several files of this lane read and don't change."""

import pytest


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """The results folder of a study whose texts look like markup: two checkpoints, four targets."""
    from reported import finished

    return finished(tmp_path_factory.mktemp("reported"))
