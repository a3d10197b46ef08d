"""slurm-gpu/profile.yaml gives a GPU to each rule that computes on one, and nothing else."""

import yaml
from workspace import REPOSITORY

WITH_GPU = {
    *("compute_features", "compute_features_shard"),
    *("compute_gramian", "compute_embeddings", "compute_outputs"),
    "compute_token_scores",
}


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
