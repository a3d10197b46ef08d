# The study is looked over once, before any job: the answer stays in the results folder under a key
# of all that was looked at, so that a further start costs nothing.
import hashlib
import json
import subprocess
import sys

from trak_core.config.budget import check_memory
from trak_core.system.record import read_record, write_record
from trak_core.spec import ProjectionSpec

look = code_digest("trak_core.stages.check_study")


def key_of(*looked_at):
    text = json.dumps(ordered([study, look, looked_at]))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def look_over(known):
    """Return what is known of the study, having asked it for what is not."""
    common = {
        "study": config["study"],
        "model_output": config["model_output"],
        "weighting": scoring["weighting"],
        "parameters": parameter_patterns,
        "training": (
            {name: config["training"] | own for name, own in checkpoints.items()}
            if "training" in config
            else None
        ),
    }
    if {"subsets", "removals", "flipped"} & set(evaluation):
        common["retraining"] = config["training"]
    keys = {s: key_of(common, s, experiments.get(s), shards[s]) for s in shards}
    splits = known.get("splits", {})
    new = [s for s in shards if splits.get(s, {}).get("key") != keys[s]]
    if not new:
        return known
    request = common | {
        "splits": {s: experiments.get(s) for s in new},
        "shards": shards,
    }
    answer = subprocess.run(
        [sys.executable, Path(workflow.basedir, "workflow/scripts/check_study.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
    )
    if answer.returncode or not answer.stdout:
        raise InputError(
            answer.stderr.strip()
            or f"{config['study']}: the study must load. The process that looks it over ended with "
            f"exit status {answer.returncode} and without a message: out of memory, or a crash."
        )
    print(answer.stderr, end="", file=sys.stderr)
    sizes = json.loads(answer.stdout)
    found = {s: {"key": keys[s], "n_samples": n} for s, n in sizes["n_samples"].items()}
    return {
        "n_params": sizes["n_params"],
        "splits": {s: found.get(s) or splits[s] for s in shards},
    }


if workflow.is_main_process:
    record = Path(config["results"], "study.json")
    known = read_record(record)
    with explained():
        sizes = look_over(known)
        if not exact:
            ProjectionSpec(**config["projection"], n_params=sizes["n_params"], stream=0)
        n_samples = {s: one["n_samples"] for s, one in sizes["splits"].items()}
        check_distortion(config, n_samples["train"])
        check_memory(
            compute["memory_mb"],
            proj_dim=None if exact else config["projection"]["proj_dim"],
            n_train=n_samples.pop("train"),
            n_targets=n_samples,
            n_checkpoints=len(checkpoints),
            scores=scoring["keep"],
            top=scoring["top"],
            distortion=config.get("distortion"),
        )
        if sizes != known:
            write_record(record, sizes)
