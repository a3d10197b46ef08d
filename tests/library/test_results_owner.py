"""A results folder of another study is refused, and a copy of a results folder is recognized."""

import shutil
from pathlib import Path

import pytest
from refused import refused

from trak_core.config.read_config import record_config
from trak_core.config.results_owner import differences_of_copy, earlier_configs
from trak_core.errors import InputError


def test_a_folder_that_another_config_made_is_known(here):
    """The folder of another study is refused only if that study's config still exists."""
    results, one, two = (Path(name) for name in ("results", "one.yaml", "two.yaml"))
    own = {"study": "results/tabular_study_0f0f0f0f.py", "study_arguments": {"table": "a.csv"}}
    later = {**own, "study": "results/tabular_study_12345678.py"}  # by another version
    assert earlier_configs(results, [one], own) == []
    record_config(own, results, [one, Path("more.yaml")])
    assert earlier_configs(results, [one.absolute()], own) == []
    assert earlier_configs(results, [], own) == []  # the default study's
    assert earlier_configs(results, [two], later) == ["one.yaml", "more.yaml"]
    others = [{"study": "s.py"}, {**own, "study_arguments": {"table": "b.csv"}}]
    for other in others:
        assert earlier_configs(results, [two], other) == ["one.yaml", "more.yaml"]
    one.touch()
    for other in others:
        with refused("config.results_of_another", "two.yaml", "one.yaml", "tabular"):
            earlier_configs(results, [two], other)
        assert earlier_configs(results, [one], other) == []
    assert earlier_configs(results, [two], later) == ["one.yaml", "more.yaml"]


# Where a results folder was made, where it is now, and whether the original still exists.
COPIES = [
    ("results", "results-two", True),
    ("results-one", "runs/two/results", True),
    ("runs/one/results", "results", True),
    ("results-one", "results-two", False),
    ("/results-one", "/results-two", True),
]


@pytest.mark.parametrize(("made", "now", "is_kept"), COPIES)
def test_a_copy_of_a_results_folder_replaces_nothing_of_its_maker(here, made, now, is_kept):
    made, now = (f"{here}{name}" if name[0] == "/" else name for name in (made, now))
    one, two = Path("one.yaml"), Path("two.yaml")
    one.touch()
    own = {"study": "s.py", "scoring": {"damping": 2}, "checkpoints": {"c": "c.pt"}}
    own |= {} if made == "results" else {"results": made}
    record_config(own, Path(made), [one])
    copied = {**own, "results": now, "compute": {"memory_mb": 2000}}
    Path(now).parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if is_kept else shutil.move)(made, now)
    assert earlier_configs(Path(now), [two], copied) == []
    assert differences_of_copy(copied, Path(now)) == []
    other = copied | {"scoring": {"damping": 7}, "projection": {"proj_dim": 8}}
    assert "settings: projection, scoring." in differences_of_copy(other, Path(now))[0]
    other_study = {**copied, "study": "t.py"}
    assert "settings: study." in differences_of_copy(other_study, Path(now))[0]
    if is_kept:
        assert differences_of_copy(other | {"results": made}, Path(made)) == []
        assert earlier_configs(Path(made), [two], own) == ["one.yaml"]
    # Files of two studies would be mixed.
    if made.count("/") == now.count("/"):
        with pytest.raises(InputError, match=r"Set `results` to a new folder in two\.yaml"):
            earlier_configs(Path(now), [two], {**copied, "study": "t.py"})


def test_a_copy_of_a_ready_made_studys_results_is_of_the_same_study(here):
    """The generated study file is in the results folder, so its path differs in a copy."""
    Path("one.yaml").touch()
    for name in ("one", "two"):
        study = f"results-{name}/tabular_study_0f0f0f0f.py"
        own = {"study": study, "study_arguments": {"table": "a.csv"}, "results": f"results-{name}"}
        if name == "one":
            record_config(own, Path("results-one"), [Path("one.yaml")])
            shutil.copytree("results-one", "results-two")
        else:
            assert earlier_configs(Path("results-two"), [Path("two.yaml")], own) == []
            assert differences_of_copy(own, Path("results-two")) == []
