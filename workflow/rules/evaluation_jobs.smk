# What each job of an evaluation needs to know, as functions of its wildcards; no rules here.
from trak_core.config.demands import check_sizes
from trak_core.config.budget import evaluation_need

folder = config["results"]
looks_at_features = bool(
    evaluation.get("trak")
    or "sweep" in evaluation
    or "gradient_dot" in evaluation.get("baselines", ())
)
embedded = "embedding_cosine" in evaluation.get("baselines", ())


if evaluation and workflow.is_main_process:
    if not Path(given := evaluation.get("ground_truth", config["study"])).is_file():
        raise WorkflowError(
            f"evaluation.ground_truth must exist. Found nothing at {given} (from {os.getcwd()})."
        )
    counts = {s: one["n_samples"] for s, one in sizes["splits"].items()}
    with explained():
        check_sizes(evaluation, counts["train"], counts)
        # Models retrained elsewhere are counted when they are read.
        for experiment in measured if "subsets" in evaluation else []:
            evaluation_need(
                proj_dim=config["projection"]["proj_dim"] if looks_at_features else 0,
                n_train=counts["train"],
                n_targets=counts[experiment],
                n_subsets=evaluation["subsets"]["count"],
                n_checkpoints=len(checkpoints),
                sweep=evaluation.get("sweep"),
            ).check(compute["memory_mb"])


def retrained_groups():
    """First and last number of the halves of each job."""
    count, size = evaluation["subsets"]["count"], evaluation["subsets"]["per_job"]
    return [(i, min(i + size, count) - 1) for i in range(0, count, size)]


def retrained_files():
    if "ground_truth" in evaluation:
        return [ancient(evaluation["ground_truth"])]
    return [f"{folder}/retrained/{i}-{j}.h5" for i, j in retrained_groups()]


def expected_retrained():
    """What retrained models must say of themselves."""
    if "ground_truth" in evaluation:
        return None
    return ordered(
        {
            "arguments": config["training"],
            "model_output": config["model_output"],
            "study": study,
            "subsets": "halves",
            "seeds": evaluation["subsets"]["seeds"],
            "seed": evaluation["subsets"]["seed"],
        }
    )


def expected_embeddings():
    kept = ("model_output", "parameter_patterns", "study")
    return {key: features_settings[key] for key in kept} | {
        "projection": {"kind": "embedding"},
        "dtype": "float32",
    }


def expected_final_scores(wildcards):
    return expected_scores(wildcards) | {
        "combine": scoring["combine"],
        "loss_weight_power": scoring["loss_weight_power"],
    }


def of_checkpoints(pattern, needed):
    """One file a checkpoint, where it is needed."""
    return [pattern.format(results=folder, c=c) for c in checkpoints if needed]


def evaluated_targets(wildcards):
    pattern = f"{{results}}/features/{{c}}/{wildcards.experiment}.h5"
    return of_checkpoints(pattern, looks_at_features)


influence_settings = ordered(
    {
        "damping": scoring["damping"],
        "weighting": scoring["weighting"],
        "combine": scoring["combine"],
        "loss_weight_power": scoring["loss_weight_power"],
    }
)


def expected_train_features():
    """What the training features of all checkpoints must say of themselves."""
    return features_settings | {
        "checkpoints": list(checkpoints),
        "split": "train",
        "targets_digest": None,
    }


def removals_groups():
    """The targets of each job."""
    asked = evaluation["removals"]
    targets = experiments[asked["experiment"]][: asked["targets"]]
    size = asked["per_job"]
    return [targets[i : i + size] for i in range(0, len(targets), size)]


def removals():
    """What the trainings of both kinds of removals share."""
    asked = evaluation["removals"]
    kept = ("n_removed", "draws", "seeds", "seed")
    return {key: asked[key] for key in kept} | {
        "arguments": config["training"],
        "model_output": config["model_output"],
        "study_digest": study,
    }


def evaluation_files():
    files = [f"{folder}/evaluation/{experiment}.h5" for experiment in measured]
    if evaluation.get("self_influence"):
        files.append(f"{folder}/self_influence.h5")
    if "flipped" in evaluation:
        files.append(f"{folder}/flipped.h5")
    if "removals" in evaluation:
        experiment = evaluation["removals"]["experiment"]
        files.append(f"{folder}/removals/{experiment}.h5")
    return files
