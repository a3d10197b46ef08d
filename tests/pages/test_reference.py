"""The reference that `make docs` builds: what it is generated from, and what it must hold."""

import importlib
import inspect
import re
import sys

import pytest
import yaml
from workspace import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "docs"))
from generate.config_keys import config_keys, keys_of

DOCS = REPOSITORY / "docs"
SCHEMA = yaml.safe_load((REPOSITORY / "workflow/schemas/config.schema.yaml").read_text())
PYTHON = "".join(path.read_text() for path in (DOCS / "reference/python").glob("*.md"))
MODULES = re.findall(r"automodule:: (\S+)", PYTHON)


@pytest.mark.parametrize("name", MODULES)
def test_public_names_of_a_module_are_described(name):
    module = importlib.import_module(name)
    values = vars(module)
    own = [key for key, value in values.items() if getattr(value, "__module__", "") == name]
    public = getattr(module, "__all__", [key for key in own if not key.startswith("_")])
    assert public
    assert inspect.getdoc(module)
    for key in public:
        if inspect.isfunction(values[key]) or inspect.isclass(values[key]):
            assert inspect.getdoc(values[key]), key


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
