"""The reference that `make docs` builds: what it is generated from, and what it must hold."""

import re
import sys

import yaml
from workspace import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "docs"))
from generate.config_keys import config_keys, keys_of

SCHEMA = yaml.safe_load((REPOSITORY / "workflow/schemas/config.schema.yaml").read_text())


def test_every_key_of_the_config_is_described():
    keys = {name: value for name, value, _ in keys_of(SCHEMA)}
    assert {"projection.kind", "compute.threads", "experiments.{name}.targets"} <= set(keys)
    assert set(SCHEMA["properties"]) <= set(keys)
    assert [name for name, value in keys.items() if not value.get("description")] == []
    page = config_keys()
    assert re.findall(r"^##+ `(.+)`$", page, flags=re.M) == list(keys)
    assert (
        "### `projection.proj_dim`\n\nAn integer, at least 1, at most 65,536. Default: `1024`."
        in page
    )
    assert "### `evaluation.removals.n_removed`\n\nA list of integers or numbers." in page
