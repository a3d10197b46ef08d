"""Measure CPU time and peak memory of jobs with large language models, and of one more question.

    python benchmarks/jobs.py 471M long --rounds 3
    python benchmarks/jobs.py facts --rounds 3

Cases:

- `471M`: a Llama in bfloat16, saved by transformers with random weights, and one text of 64 tokens.
- `124M`: a Llama of GPT-2's size in float32, and one text of 256 tokens.
- `long`: a Llama of width 256 and two layers in float32 with a vocabulary of 128,256, and one text
  of 1,024 tokens.
- `deep`: the same with 24 layers and a vocabulary of 8,192, and one text of 2,048 tokens.
- `facts`: one more question to a finished run of config/facts.yaml with six checkpoints. It is
  asked by `trak run` as a new experiment, by the same command when all jobs are finished, by
  Snakemake with new processes, and by `trak ask` with one question and with eleven.

The first four cases have these rows. `start` is `trak run -n`, the check before any job. `features`
computes the features of the text in a separate process. `question` is a whole `trak run` that makes
the same file.

Times are CPU seconds of a process and its children; wall seconds are printed too. Memory is the
largest resident size of any of these processes. "own MB" excludes file-backed pages, such as shared
libraries, and is sampled every 10 ms. The script prints a Markdown table. It uses the package of
the current environment, so that two checkouts can be compared.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import yaml
from shared import Usage, environment, run

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

# Width, inner width, layers, heads, vocabulary, tied, tokens, dtype.
MODELS = {
    "124M": (768, 2048, 12, 12, 50257, True, 256, "float32"),
    "471M": (1280, 3360, 20, 20, 32000, False, 64, "bfloat16"),
    "long": (256, 1024, 2, 4, 128_256, True, 1024, "float32"),
    "deep": (256, 1024, 24, 4, 8192, True, 2048, "float32"),
}

STUDY = """\
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parent / "model"
TOKENS = {tokens}


def make_model():
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER))


def train_data():
    drawn = torch.Generator().manual_seed(0)
    texts = torch.randint(0, {vocabulary}, (1, TOKENS), generator=drawn)
    return [{{"input_ids": text, "labels": text}} for text in texts]


def train_ids():
    return ["a"]


def target_data():
    return train_data()


def target_ids():
    return train_ids()
"""

CONFIG = """\
study: study.py
model_output: language_modelling
checkpoints: {run: model}
experiments: {asked: {targets: [a]}}
projection: {proj_dim: 4096}
results: results
"""

JOB = """\
import json, sys
from pathlib import Path
from trak_core.runtime.job import keep_freed_memory, quiet_libraries
quiet_libraries()
keep_freed_memory()
from trak_core.settings import FeaturesSpec
from trak_core.stages.compute_features import compute_features
compute_features(
    features=Path(sys.argv[3]), checkpoint=Path("model"), study_file=Path("study.py"),
    spec=FeaturesSpec(**json.loads(sys.argv[1])), targets=sys.argv[4:], code="code", device="cpu",
    batch_size=64, memory_mb=int(sys.argv[2]), threads=1,
)
"""


TRAK = str(Path(sys.executable).with_name("trak"))
REPOSITORY = Path(__file__).parents[1]
FACT = {"question": "we know that old songs of vuntoria praise the", "answer": "dog"}
SPEC = {
    "model_output": "language_modelling",
    "parameter_patterns": None,
    "projection": {"proj_dim": 4096, "seed": 0},
    "checkpoint": "run",
    "split": "asked",
    "dtype": "float32",
    "study_digest": "digest",
    "targets_digest": "digest",
}


def make(folder: Path, name: str) -> None:
    """Write a model with random weights in transformers' format, a study and a config."""
    width, inner, layers, heads, vocabulary, tied, tokens, dtype = MODELS[name]
    code = f"""\
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size={width}, intermediate_size={inner}, num_hidden_layers={layers},
    num_attention_heads={heads}, num_key_value_heads={heads}, vocab_size={vocabulary},
    tie_word_embeddings={tied}, max_position_embeddings=2048, pad_token_id=None,
    bos_token_id=None, eos_token_id=None, use_cache=False, dtype=torch.{dtype},
)
torch.set_default_dtype(torch.{dtype})
LlamaForCausalLM(config).save_pretrained("model")
"""
    run([sys.executable, "-c", code], folder, folder / "make.log")
    (folder / "study.py").write_text(STUDY.format(tokens=tokens, vocabulary=vocabulary))
    (folder / "config.yaml").write_text(CONFIG)


def jobs_of(folder: Path, name: str, memory_mb: int) -> dict[str, list[str]]:
    """Make a model and its study unless they exist; return the command of each job."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.yaml").exists():
        make(folder, name)
    features = [JOB, json.dumps(SPEC), str(memory_mb), "asked.h5", "a"]
    return {
        "start": [TRAK, "run", "config.yaml", "-n"],
        "features": [sys.executable, "-c", *features],
        "question": [TRAK, "run", "config.yaml", "results/features/run/asked.h5"],
    }


def facts_of(folder: Path, number: int) -> dict[str, list[str]]:
    """Finish the run of planted facts; return the commands that ask a new question."""
    shutil.copytree(REPOSITORY / "config", folder / "config", dirs_exist_ok=True)
    scores = [TRAK, "run", "config/facts.yaml", "scores", "--cores=2"]
    run(scores, folder, folder / "scores.log")
    facts = yaml.safe_load((folder / "config/facts.yaml").read_text(encoding="utf-8"))
    line = json.dumps(FACT) + "\n"
    (folder / "eleven.jsonl").write_text(11 * line, encoding="utf-8")
    for way in ("forks", "anew"):
        name = f"{way}{number}"
        (folder / f"{name}.jsonl").write_text(line, encoding="utf-8")
        experiments = {**facts["experiments"], name: {"data": f"{name}.jsonl"}}
        config = yaml.safe_dump({**facts, "experiments": experiments})
        (folder / f"{name}.yaml").write_text(config, encoding="utf-8")
    forks, anew = (f"results-facts/scores/{way}{number}.h5" for way in ("forks", "anew"))
    by_forks = [TRAK, "run", f"forks{number}.yaml", forks, "--cores=2"]
    snakemake = [sys.executable, "-m", "snakemake", f"--snakefile={REPOSITORY / 'Snakefile'}"]
    ask = [TRAK, "ask", "config/facts.yaml", "--top", "3", "--file"]
    return {
        "trak run": by_forks,
        "trak run, nothing to do": by_forks,
        "snakemake": [*snakemake, f"--configfile=anew{number}.yaml", anew, "--cores=2"],
        "trak ask, one question": [*ask, f"forks{number}.jsonl"],
        "trak ask, eleven": [*ask, "eleven.jsonl"],
    }


def show(name: str, job: str, usages: list[Usage]) -> None:
    """Print the medians of a job's rounds, with the minimum and the maximum."""
    cells = []
    for values in ([one.seconds for one in usages], [one.wall for one in usages]):
        least, greatest = min(values), max(values)
        cells.append(f"{statistics.median(values):.1f} [{least:.1f}-{greatest:.1f}]")
    cells += [
        f"{max(values):,.0f}" for values in zip(*((u.mb, u.own_mb) for u in usages), strict=True)
    ]
    print(f"| {name} | {job} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="+", choices=[*MODELS, "facts"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--memory-mb", type=int, default=1000, help="compute.memory_mb")
    parser.add_argument("--folder", type=Path, help="keep models and results here")
    parser.add_argument("--jobs", nargs="+", help="rows of large models to run; default: all")
    arguments = parser.parse_args()
    print(environment("cpu", ("torch", "transformers", "snakemake")))
    print("| model | job | CPU s | wall s | peak MB | own MB |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.models:
            folder = (arguments.folder or Path(temporary)).resolve() / name
            usages: dict[str, list[Usage]] = {}
            for number in range(arguments.rounds):
                if name == "facts":
                    folder.mkdir(parents=True, exist_ok=True)
                    jobs = facts_of(folder, time.time_ns())
                else:
                    jobs = jobs_of(folder, name, arguments.memory_mb)
                    jobs = {job: jobs[job] for job in arguments.jobs or jobs}
                for job, command in jobs.items():
                    if job == "question":
                        shutil.rmtree(folder / "results", ignore_errors=True)
                    (folder / "asked.h5").unlink(missing_ok=True)
                    log = folder / f"{number} {job}.log"
                    usages.setdefault(job, []).append(run(command, folder, log))
            for job, taken in usages.items():
                show(name, job, taken)


if __name__ == "__main__":
    main()
