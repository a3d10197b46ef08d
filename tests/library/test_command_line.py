"""Values within ``--config key={...}``, which Snakemake passes as text."""

import pytest
import yaml
from refused import refused

from trak_core.config.read_config import with_values_read


@pytest.mark.parametrize(
    "text",
    [
        "{a: {b: 1e-3, c: 1.5, d: null, e: true, f: ''}}",
        "{mine: {targets: [1506, '1506', patient-1]}}",
        "[1, '2', {a: '007'}]",
        "{a: 'b: c', d: \"[1]\"}",
    ],
)
def test_they_are_read_as_in_a_file(text):
    as_text = yaml.load(text, Loader=yaml.BaseLoader)
    config = with_values_read({"key": as_text, "other": "5"}, [f"key={text}", "other=5"])
    assert config == {"key": yaml.safe_load(text), "other": "5"}


def test_other_values_of_the_file_are_kept():
    config = {"projection": {"kind": "normal", "proj_dim": "64"}, "checkpoints": {"1": "01"}}
    merged = with_values_read(config, ["projection={proj_dim: 64}", "checkpoints={1: '01'}"])
    assert merged == {"projection": {"kind": "normal", "proj_dim": 64}, "checkpoints": {"1": "01"}}


def test_a_value_that_is_not_yaml_is_refused():
    config = {"training": {"until": "2024-13-45"}}
    with refused("config.no_yaml", "--config training: the value must be YAML"):
        with_values_read(config, ["training={until: 2024-13-45}"])
    with refused("config.octal", "--config training: a number must be decimal", "010", 8):
        with_values_read(config, ["training={epochs: 010}"])
