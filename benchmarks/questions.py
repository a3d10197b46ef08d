"""What a question to a finished run costs: by `trak ask`, which holds it, and by `trak run` again.

    python benchmarks/questions.py --csv questions.csv

A Llama of 722,048 parameters is trained by transformers' Trainer on 300 texts of four sources, nine
epochs, with three checkpoints, and scored as `study: language_model`. Then 12 held-out texts go
into the standard input of `trak ask`, one after the other. The first counts from the start of the
command, imports included, each further one from when it was typed until its answer was read. Beside
them stands what one of these texts costs as an experiment of its own, by `trak run`. CPU seconds
are those of all processes that a command starts; on a busy machine they are what counts. The scores
of both ways are compared first. With ``--folder`` what is there is taken: the checkpoints, and the
run. ``--facts FOLDER`` takes the time of one more question to config/facts.yaml, six checkpoints,
by `trak run`, whose jobs are forks, and by Snakemake with processes that begin anew.
"""

import argparse
import ctypes
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from shared import environment, write_csv

_N_TRAIN, _N_HELD, _VOCABULARY = 300, 12, 512
_NOUNS = ["fox", "miller", "girl", "sailor", "crow", "king", "tailor", "bear"]
_PLACES = ["the wood", "a mill", "the harbour", "an old tower", "the market", "the river"]
_FOODS = ["leeks", "flour", "butter", "lentils", "apples", "onions", "carrots", "barley"]
_VERBS = ["chop", "boil", "stir", "bake", "roast", "rinse"]
_NAMES = ["total", "rows", "width", "names", "index", "depth"]
_TOWNS = ["Linden", "Harrow", "Belfort", "Moss Bay", "Upton", "Greyfield"]
_EVENTS = ["a new bridge", "the tram line", "a flood wall", "the library", "lower rents"]


def _text(source: str, draw: random.Random) -> str:
    """Return a text of a source, drawn from its patterns."""
    pick, number = draw.choice, draw.randrange(2, 60)
    if source == "stories":
        one, other = draw.sample(_NOUNS, 2)
        return (
            f"Once a {one} lived near {pick(_PLACES)}. One day a {other} came and asked for "
            f"{number} coins. The {one} laughed, and they walked to {pick(_PLACES)} together."
        )
    if source == "recipes":
        one, other = draw.sample(_FOODS, 2)
        return (
            f"{pick(_VERBS).capitalize()} the {one} and add {number} spoons of {other}. "
            f"{pick(_VERBS).capitalize()} for {number} minutes, then serve with {pick(_FOODS)}."
        )
    if source == "code":
        one, other = draw.sample(_NAMES, 2)
        return (
            f"def {one}_of({other}):\n    {one} = {number}\n    for i in range({other}):\n"
            f"        {one} += i * {number}\n    return {one}"
        )
    return (
        f"{pick(_TOWNS)}: The council voted {number} to {number // 2} for {pick(_EVENTS)} on "
        f"Tuesday. Critics in {pick(_TOWNS)} said that {pick(_EVENTS)} would cost more."
    )


def write_texts(folder: Path) -> None:
    """Write 300 training texts and 12 held-out ones, with their sources."""
    draw, sources = random.Random(0), ("stories", "recipes", "code", "news")
    for name, n in (("train", _N_TRAIN), ("held", _N_HELD)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for i in range(n):
                source = sources[i % len(sources)]
                row = {"id": f"{name}-{i}", "source": source, "text": _text(source, draw)}
                file.write(json.dumps(row) + "\n")


def train(folder: Path) -> None:
    """Train a tokenizer and a Llama on the texts; leave what a Trainer leaves in ``out``."""
    import tokenizers
    import torch
    import transformers

    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    core = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=_VOCABULARY, special_tokens=["<pad>"], initial_alphabet=letters
        ),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>")
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    n_params = sum(p.numel() for p in model.parameters())
    assert n_params == 722_048, n_params
    samples: list[Any] = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            num_train_epochs=9,
            per_device_train_batch_size=20,
            learning_rate=3e-3,
            save_steps=45,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=45,
        ),
        train_dataset=samples,  # pyright: ignore[reportArgumentType]
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    tokenizer.save_pretrained(folder / "out")


@dataclass(frozen=True)
class Row:
    """Seconds of one way to ask: a median, where there are several."""

    way: str
    wall: float
    least: float
    greatest: float
    cpu: float


_REPOSITORY = Path(__file__).parents[1]
_FACT = {"question": "we know that old songs of vuntoria praise the", "answer": "dog"}
_TRAK = str(Path(sys.executable).with_name("trak"))
ASK = (_TRAK, "ask", "lm.yaml", "--top", "3")
_CONFIG = {
    "study": "language_model",
    "study_arguments": {"texts": "train.jsonl"},
    "checkpoints": {"run": "out"},
    "experiments": {"held": {"data": "held.jsonl"}},
}


def _commanded(folder: Path, *words: str) -> tuple[float, float]:
    """Run a command to its end; return wall seconds, and CPU seconds of all that it started."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with (folder / "log.txt").open("w") as log:
        command = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
        _, status = os.waitpid(command.pid, 0)
        # Orphans, such as the forks of jobs, become this process's children.
        while True:
            try:
                os.wait()
            except ChildProcessError:
                break
    if status:
        sys.exit((folder / "log.txt").read_text()[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def finish(folder: Path) -> None:
    """Train, unless checkpoints are there, and run what isn't there of the study."""
    if not (folder / "out").exists():
        write_texts(folder)
        train(folder)
    (folder / "lm.yaml").write_text(yaml.safe_dump(_CONFIG), encoding="utf-8")
    _commanded(folder, _TRAK, "run", "lm.yaml", "scores")


def _run_again(folder: Path) -> tuple[float, float]:
    """Ask one text as an experiment of its own."""
    text = (folder / "held.jsonl").read_text(encoding="utf-8").splitlines()[0]
    name = f"q{time.time_ns()}"
    (folder / f"{name}.jsonl").write_text(text + "\n", encoding="utf-8")
    experiments = {**_CONFIG["experiments"], name: {"data": f"{name}.jsonl"}}
    config = yaml.safe_dump({**_CONFIG, "experiments": experiments})
    (folder / f"{name}.yaml").write_text(config, encoding="utf-8")
    return _commanded(folder, _TRAK, "run", f"{name}.yaml", f"results/scores/{name}.h5")


# `trak run`, whose jobs are forks of a process that has imported what they need, or Snakemake with
# jobs that begin anew.
_ANEW = [sys.executable, "-m", "snakemake"]


def _facts(folder: Path, rounds: int) -> list[Row]:
    """Return what one more question costs to the planted facts' run, which is finished first."""
    shutil.copytree(_REPOSITORY / "config", folder / "config", dirs_exist_ok=True)
    facts = yaml.safe_load((folder / "config/facts.yaml").read_text(encoding="utf-8"))
    anew = [*_ANEW, f"--snakefile={_REPOSITORY / 'Snakefile'}"]
    _commanded(folder, _TRAK, "run", "config/facts.yaml", "scores", "--cores=2")
    taken: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for way in ("forks", "processes"):
            name = f"q{time.time_ns()}"
            (folder / f"{name}.jsonl").write_text(json.dumps(_FACT) + "\n", encoding="utf-8")
            experiments = {**facts["experiments"], name: {"data": f"{name}.jsonl"}}
            config = yaml.safe_dump({**facts, "experiments": experiments})
            (folder / f"{name}.yaml").write_text(config, encoding="utf-8")
            words = [f"results-facts/scores/{name}.h5", "--cores=2"]
            command = [_TRAK, "run", f"{name}.yaml", *words]
            if way == "processes":
                command = [*anew, f"--configfile={name}.yaml", *words]
            for key in (f"by {way}", f"by {way}, once more: nothing to do"):
                taken.setdefault(key, []).append(_commanded(folder, *command))
    return [seconds(f"planted facts, six checkpoints, {way}", taken[way]) for way in taken]


def _cpu_of(process: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def typed(
    command: Sequence[str], folder: Path, lines: Sequence[bytes], end: bytes = b"\n\n"
) -> list[tuple[float, float]]:
    """Type lines into a command; return wall and CPU seconds of each answer, up to its end.

    The first counts from the start. A command whose answers end with its prompt has it before.
    """
    began, so_far = time.perf_counter(), 0.0
    taken = []
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as session:
        assert session.stdin is not None
        assert session.stdout is not None

        def wait() -> None:
            answer = b""
            while not answer.endswith(end):
                more = os.read(session.stdout.fileno(), 2**16)  # pyright: ignore[reportOptionalMemberAccess]
                if not more:
                    sys.exit(f"{command} ended after {answer!r}")
                answer += more

        if end.strip():
            wait()
        for line in lines:
            session.stdin.write(line + b"\n")
            session.stdin.flush()
            wait()
            cpu = _cpu_of(session.pid)
            taken.append((time.perf_counter() - began, cpu - so_far))
            began, so_far = time.perf_counter(), cpu
        session.stdin.close()
    return taken


def _compare(folder: Path) -> float:
    """Return how far answers are from the workflow's scores, in parts of the largest score."""
    import torch

    import trak_core

    torch.set_num_threads(1)  # on a busy machine several wait for each other, and busily
    results = trak_core.open(str(folder / "results"))
    expected = results.scores("held").frame
    lines = (folder / "held.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return max(
        float(np.abs(results.ask(row).scores - expected[row["id"]]).max())
        / float(np.abs(expected[row["id"]]).max())
        for row in rows
    )


def seconds(way: str, taken: Sequence[tuple[float, float]]) -> Row:
    wall, cpu = ([pair[i] for pair in taken] for i in (0, 1))
    row = Row(way, statistics.median(wall), min(wall), max(wall), statistics.median(cpu))
    span = f" [{row.least:.2f}-{row.greatest:.2f}]" if len(taken) > 1 else ""
    print(f"| {way} | {row.wall:.2f}{span} | {row.cpu:.2f} |", flush=True)
    return row


def main() -> None:
    """Make the run, compare, and take the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="where the table goes as well")
    parser.add_argument("--folder", type=Path, help="where texts, checkpoints and the run stay")
    parser.add_argument("--facts", type=Path, help="a folder: the planted facts' question alone")
    asked = parser.parse_args()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    about = environment("cpu", ("torch", "transformers", "numpy", "snakemake"))
    print(about)
    if asked.facts is not None:
        print("| question | wall, s | CPU, s |\n|---|---|---|")
        rows = _facts(asked.facts, asked.rounds)
        if asked.csv is not None:
            write_csv(asked.csv, rows, about)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = asked.folder or Path(name)
        folder.mkdir(exist_ok=True)
        finish(folder)
        difference = _compare(folder)
        assert difference <= 1e-6, difference
        print(f"largest difference of scores: {difference:.1g} of the largest score")
        held = (folder / "held.jsonl").read_bytes().splitlines()
        sessions, again = [], []
        for _ in range(asked.rounds):
            sessions.append(typed(ASK, folder, held))
            again.append(_run_again(folder))
    print("| question | wall, s | CPU, s |\n|---|---|---|")
    rows = [
        seconds("trak ask, first answer, from the start", [taken[0] for taken in sessions]),
        seconds("trak ask, each further one", [one for taken in sessions for one in taken[1:]]),
        seconds("trak run, a new question", again),
    ]
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()
