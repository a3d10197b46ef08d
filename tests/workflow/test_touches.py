"""What the workflow takes of Snakemake that isn't documented; CONTRIBUTING.md has the reasons."""

import re
from pathlib import Path

import pytest
from workspace import REPOSITORY, snakemake

RULES = [
    *(REPOSITORY / "workflow").rglob("*.smk"),
    *(REPOSITORY / name for name in ("Snakefile", "workflow/Snakefile")),
]
# What the rules say of `workflow`: settings, which are read; where a module's files lie; and the
# list of configs, which is added to.
TAKEN = {
    *("config_settings", "configfiles", "is_main_process", "local_exec", "overwrite_configfiles"),
    *("storage_settings", "source_path", "modifier"),
}


def test_rules_take_no_more_of_snakemake():
    text = "".join(path.read_text() for path in RULES)
    assert set(re.findall(r"\bworkflow\.(\w+)", text)) == TAKEN
    assert set(re.findall(r"\bworkflow\.modifier\.(\w+)", text)) == {"path_modifier"}
    imports = set(re.findall(r"^from (snakemake\S*) import (\w+)", text, flags=re.M))
    assert imports == {
        ("snakemake.io", "get_flag_value"),  # a file's object in a store
        ("snakemake.settings.types", "SharedFSUsage"),
        ("snakemake.utils", "min_version"),  # documented
    }
    assert "vars(workflow)" not in text


OUTER = """
assert __name__ is None
assert workflow.is_main_process and workflow.local_exec is not None
assert [file.name for file in workflow.overwrite_configfiles] == ["mine.yaml"]
settings = workflow.config_settings
assert settings.config_args == ["top=3"] and settings.config == {"top": 3}
assert [file.name for file in settings.configfiles] == ["mine.yaml"]
assert workflow.storage_settings.default_storage_provider is None
assert workflow.storage_settings.shared_fs_usage
workflow.configfiles += ["more.txt"]


module inner:
    snakefile:
        "inner.smk"
    config:
        config
    prefix:
        "in/it"


use rule * from inner as inner_*
"""
INNER = """
from snakemake.io import get_flag_value

assert __name__ == "inner"
assert workflow.modifier.path_modifier.replace_prefix("results/_") == "in/it/results/_"
file = storage.fs("stored.txt")
store = get_flag_value(file, "storage_object")
assert store.query == "stored.txt" and store.exists() and store.size() == 5
assert store.mtime() > 1e9 and get_flag_value("stored.txt", "storage_object") is None


rule base:
    shell:
        "touch {output}"


use rule base as made with:
    output:
        "results/{x}.txt",


rule all:
    default_target: True
    input:
        "results/a.txt",
    localrule: True
"""


def test_snakemake_has_what_the_rules_take(tmp_path, monkeypatch):
    """Snakemake's own `assert`s, so to say: which of them has failed stands in the output."""
    pytest.importorskip("snakemake_storage_plugin_fs")
    monkeypatch.chdir(tmp_path)
    texts = {"Snakefile": OUTER, "inner.smk": INNER, "mine.yaml": "{}", "stored.txt": "12345"}
    for name, text in texts.items():
        Path(name).write_text(text)
    status, output = snakemake(
        tmp_path, "--cores", "1", "--configfile", "mine.yaml", "--config", "top=3"
    )
    assert status == 0, output
    assert Path("in/it/results/a.txt").exists()
