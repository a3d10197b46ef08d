"""slurm/profile.yaml and the rules: each rule's jobs are put together, or apart on purpose."""

import re

import yaml
from workspace import REPOSITORY

# Minutes to hours a job, of one checkpoint: gradients.
APART = {
    "train_checkpoint",
    "compute_features",
    "compute_feature_shard",
    "compute_kernel",
    "compute_diagnostics",
}


def test_every_rule_has_its_place_and_every_name_is_a_rule():
    profile = yaml.safe_load((REPOSITORY / "slurm/profile.yaml").read_text())
    text = "".join(p.read_text() for p in (REPOSITORY / "workflow/rules").glob("*.smk"))
    rules = set(re.findall(r"^rule (\w+):$", text, flags=re.M))
    rules |= set(re.findall(r"^use rule \w+ as (\w+) with:$", text, flags=re.M))
    assert set(profile["groups"]) == rules - APART
    assert rules >= APART
    assert set(profile["set-resources"]) == set(profile["groups"])
    assert set(profile["group-components"]) == set(profile["groups"].values())
