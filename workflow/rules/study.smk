# The study is looked over once, before any job: the answer stays in the results folder under a key
# of all that was looked at, so that a further start costs nothing.
import hashlib
import json
import subprocess
import sys


def look_over(split):
    return ordered(
        {
            "study": study,
            "code": code_digest("trak_core.stages.check_study"),
            "model_output": config["model_output"],
            "parameters": config["parameters"],
            "trained": "training" in config,
            "split": split,
            "targets": experiments.get(split),
            "shards": shards[split],
        }
    )


def study_key(split):
    text = json.dumps(look_over(split))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


if workflow.is_main_process:
    record = Path(config["results"], "study.json")
    try:
        known = json.loads(record.read_text())
    except (OSError, ValueError):
        known = {}
    new = [
        split for split in shards if known.get(split, {}).get("key") != study_key(split)
    ]
    if new:
        request = {
            "study": config["study"],
            "model_output": config["model_output"],
            "parameters": (
                None if config["parameters"] == "all" else config["parameters"]
            ),
            "trained": "training" in config,
            "splits": {split: experiments.get(split) for split in new},
            "shards": shards,
        }
        answer = subprocess.run(
            [sys.executable, Path(workflow.basedir, "workflow/scripts/check_study.py")],
            input=json.dumps(request),
            capture_output=True,
            text=True,
        )
        if answer.returncode:
            raise WorkflowError(answer.stderr.strip())
        sizes = json.loads(answer.stdout.splitlines()[-1])
        known |= {
            split: {"key": study_key(split), "n_samples": sizes[split]} for split in new
        }
        known = {split: known[split] for split in shards} | {
            "n_params": sizes["n_params"]
        }
        record.parent.mkdir(parents=True, exist_ok=True)
        partial = record.with_name(f".{record.name}.{os.getpid()}.part")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(record)
