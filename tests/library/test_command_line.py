"""Values within ``--config key={...}``, which Snakemake hands over as text."""

import pytest
import yaml

from trak_core.config.read_config import with_values_read
from trak_core.errors import InputError

TEXTS = [
    "{proj_dim: 256, seed: 0}",
    "{a: {b: 1e-3, c: 1.5, d: null, e: true, f: ''}}",
    "{mine: {targets: [1506, '1506', patient-1]}}",
    "{c0: {seed: 1, lr: [0.1, {a: '007'}]}}",
    "[1, '2', {a: 3}]",
    "{a: 'b: c', d: \"[1]\"}",
]


def as_snakemake_leaves_it(text):
    return yaml.load(text, Loader=yaml.BaseLoader)


@pytest.mark.parametrize("text", TEXTS)
def test_they_are_read_as_in_a_file(text):
    config = {"key": as_snakemake_leaves_it(text), "other": "5"}
    found = with_values_read(config, [f"key={text}", "other=5"])
    assert found == {"key": yaml.safe_load(text), "other": "5"}
    assert config["key"] == as_snakemake_leaves_it(text)


def test_what_a_file_says_beside_them_stays():
    config = {"projection": {"kind": "normal", "proj_dim": "64"}, "checkpoints": {"1": "01"}}
    found = with_values_read(config, ["projection={proj_dim: 64}", "checkpoints={1: '01'}"])
    assert found == {"projection": {"kind": "normal", "proj_dim": 64}, "checkpoints": {"1": "01"}}


def test_what_is_no_value_is_refused():
    config = {"training": {"until": "2024-13-45"}}
    with pytest.raises(InputError, match="--config training: the value must be YAML"):
        with_values_read(config, ["training={until: 2024-13-45}"])
