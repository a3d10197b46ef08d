"""slurm/profile.yaml and the rules: each rule's jobs are put together, or apart on purpose."""

import re

import yaml
from workspace import REPOSITORY

WITH_GPU = {
    *("compute_features", "compute_features_shard", "compute_gramian"),
    *("compute_embeddings", "compute_outputs", "compute_token_scores"),
}
# Minutes to hours a job, or one for the whole study; a report and a selection of targets stand
# between jobs that no group holds.
APART = WITH_GPU | {
    *("train_checkpoint", "retrain_subsets", "retrain_removals"),
    *("evaluate_scores", "compute_self_influence"),
    *("compare_removals", "write_report", "write_report_first"),
    *("write_list", "find_duplicates", "show_list", "select_targets"),
}


def test_every_rule_has_its_place_and_every_name_is_a_rule():
    profile = yaml.safe_load((REPOSITORY / "slurm/profile.yaml").read_text())
    text = "".join(p.read_text() for p in (REPOSITORY / "workflow/rules").glob("*.smk"))
    rules = set(re.findall(r"^ *rule (\w+):$", text, flags=re.M)) - {"stage"}
    rules |= set(re.findall(r"^ *use rule \w+ as (\w+) with:$", text, flags=re.M))
    rules -= {"model_stage"}  # like `stage`, what others begin with
    # Those of trainings are made in a loop.
    rules |= set(re.findall(r"\"(train_checkpoint\w*)\"", text)) - {"train_checkpoint"}
    rules |= {"train_checkpoint"}
    assert set(profile["groups"]) == rules - APART
    assert rules >= APART
    assert set(profile["set-resources"]) == set(profile["groups"])
    assert set(profile["group-components"]) == set(profile["groups"].values())


def test_every_job_with_a_model_asks_for_its_weights():
    """What runs on a device has a checkpoint in memory."""
    for path in (REPOSITORY / "workflow/rules").glob("*.smk"):
        for rule in re.split(r"^ *rule ", path.read_text(), flags=re.M)[1:]:
            name = rule.partition(":")[0]
            assert ('device=compute["device"]' in rule) is ("mem_mb=model_job_mb" in rule), name


def test_the_gpu_profile_replaces_what_it_must():
    plain, added = (
        yaml.safe_load((REPOSITORY / folder / "profile.yaml").read_text())
        for folder in ("slurm", "slurm-gpu")
    )
    # The cluster's test starts with both: what it shows of the plain one holds for it alone.
    assert set(added) == {"set-resources"}
    short, gpu = plain["set-resources"], added["set-resources"]
    # Training is the study's own business: it may not know of a GPU.
    assert gpu == short | {rule: {"gpu": 1} for rule in WITH_GPU}
