"""Ask a finished run which training samples pushed further samples up and down."""

import argparse
import atexit
import contextlib
import gc
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trak_core.command.run import check_config_file, workflow_folder
from trak_core.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from trak_core.queries.finished_run import FinishedRun
    from trak_core.queries.open_run import OpenRun
    from trak_core.queries.question_and_answer import Answer, Asked

_HOW = """\
Type, or pipe, a line for each sample: a JSON object, as the `data` of an experiment has them, or
the plain text of one with the field `text`. An empty line is nothing; Ctrl-D ends.
An answer begins with the sample and with what the model makes of it. For a text that is the
log-odds log(p / (1 - p)) of all its tokens that count together, so far below 0 for most; how many
tokens count; and how many of them the model would have written in their place.
"""
_PROMPT = "> "
_MOST_TOKENS = 3
# Lines of a file that are answered together, at most.
_AT_ONCE = 100


def ask(words: Sequence[str]) -> None:
    """Answer what ``trak ask`` was asked.

    A line that can't be answered is told of, and the next one taken; if it was not typed, the
    process ends with status 1.
    """
    parser = argparse.ArgumentParser(
        "trak ask", description=__doc__, epilog=_HOW, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config", help="that of the run")
    parser.add_argument(
        "--file", type=Path, help="lines to answer: .jsonl, .csv, .tsv or plain texts"
    )
    parser.add_argument(
        *("--target", "-t"), action="append", default=[], help="a target of the study's, by its id"
    )
    parser.add_argument("--label", help="explain these targets as of another class")
    parser.add_argument("--top", type=int, default=5, help="samples of either sign; %(default)s")
    parser.add_argument(
        "--tokens", action="store_true", help="cut the scores shown by tokens, and colour these"
    )
    parser.add_argument("--csv", type=Path, help="a table to write of all answers")
    parser.add_argument("--html", type=Path, help="a page to write of all answers")
    asked, others = parser.parse_known_args(words)
    if any(word.startswith("-") for word in others):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if others:
        raise InputError(
            "`trak ask` must get its lines typed, piped or in --file, none in its own call. Found "
            f"{' '.join(others)!r}. Pipe it: echo {shlex.quote(' '.join(others))} | trak ask "
            f"{asked.config}",
            code="command.line_in_call",
        )
    if asked.label is not None and not asked.target:
        parser.error("--label needs --target; a line has its label itself")
    check_config_file("ask", asked.config)
    read = [Path(asked.config), *filter(None, (asked.file,))]
    for path in filter(None, (asked.csv, asked.html)):
        if not path.parent.is_dir() or path.is_dir():
            raise InputError(
                f"--csv and --html must name files in folders that are there. Found {path}.",
                code="command.no_output_folder",
            )
        read.append(path)
        if sum(_is_same(path, other) for other in read) > 1:
            raise InputError(
                "--csv and --html must name files of their own, not each other's, nor the config "
                f"or the lines that are asked. Found {path} twice.",
                code="command.output_again",
            )
    # A pipe will do: `--file <(...)`.
    if asked.file is not None and (asked.file.is_dir() or not asked.file.exists()):
        there = "a folder" if asked.file.is_dir() else "nothing"
        raise InputError(
            f"--file must be a file of lines. Found {there} at {asked.file}.",
            code="command.no_file",
        )
    if asked.top < 1:
        raise InputError(f"--top must be at least 1. Found {asked.top}.", code="command.top")
    # OpenBLAS reads it once; more threads than one crash in it from 16,384 dimensions on.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Python's end looks for cycles, for a second among all that libraries have made.
    atexit.register(gc.freeze)
    try:
        _answer(_Session(asked))
    except KeyboardInterrupt:  # before the first line, or once more
        sys.exit(128 + signal.SIGINT)


def _answer(session: "_Session") -> None:
    """Answer all lines, and write what is wanted of the answers, however the lines end."""
    try:
        with contextlib.suppress(KeyboardInterrupt):
            session.answer_all()
    except BrokenPipeError:
        # Whoever read has gone. Python would fail once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        session.write()
    if session.has_failed and not session.is_typed:
        sys.exit(1)


class _Session:
    """The answers of one call so far, and whether a line could not be answered."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        is_given = asked.file is not None or asked.target
        self.is_typed = not is_given and sys.stdin is not None and sys.stdin.isatty()
        self.has_failed = False
        self._answers: list[Answer] = []
        # What was asked about, by its id: a target, or a line by its number.
        self._places: dict[str, str] = {}
        self._wanted = [path for path in (asked.csv, asked.html) if path is not None]
        if sys.stdin is not None and sys.stdin.isatty():
            print("Loading the run ...", file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(sys.stderr):
            self._run = _open_run(asked.config)
            _check_outputs(self._run.run, self._wanted)
            self._run.load()
        # A page shows what that of the run shows.
        shows_tokens = asked.html is not None and self._run.run.specs.config["answers"]["tokens"]
        self._cuts: bool = asked.tokens or shows_tokens

    def answer_all(self) -> None:
        """Print an answer for each line, and what is wrong with a line that has none."""
        if self.is_typed:
            print(_HOW, file=sys.stderr)
        samples = self._samples()
        # Checkpoints that don't stay in memory are read once for many lines of a file.
        is_given = self._asked.file is not None or self._asked.target
        while group := list(itertools.islice(samples, _AT_ONCE if is_given else 1)):
            answers = self._run.answers(group, self._asked.top, tokens=self._cuts)
            for asked, answer in _silently(answers):
                if isinstance(answer, InputError):
                    self._tell(f"{self._places[str(asked.id)]}: {answer}")
                    continue
                if self._wanted:
                    # A session may be long, and scores of all training samples many.
                    self._answers.append(replace(answer, scores=answer.scores.iloc[:0].copy()))
                print(_in_words(answer), flush=True)

    def write(self) -> None:
        """Write the table and the page of all answers, if they are wanted and there are any."""
        wanted = self._wanted
        if wanted and not self._answers:
            self._tell(
                f"nothing was answered, so that {', '.join(map(str, wanted))} stays as it is"
            )
            return
        if not wanted:
            return
        from trak_core.queries.render_answers import answer_rows, asked_page
        from trak_core.system.files import write_csv, written_whole

        if self._asked.csv is not None:
            write_csv(self._asked.csv, answer_rows(self._answers))
        if self._asked.html is not None:
            page = asked_page(self._run, self._answers, self._asked.top)
            with written_whole(self._asked.html) as partial:
                partial.write_text(page, encoding="utf-8")
        print(f"wrote: {', '.join(map(str, wanted))}", file=sys.stderr)

    def _tell(self, message: str) -> None:
        self.has_failed = True
        print(f"Error: {message}", file=sys.stderr, flush=True)

    def _samples(self) -> Iterator["Asked"]:
        """Yield a sample for each target or line that is one."""
        for target_id in self._asked.target:
            place = f"target {target_id}"
            try:
                target = self._run.target(target_id)
                if self._asked.label is not None:
                    target = self._run.of_class(target, self._asked.label)
                asked = self._with_new_id(target, place)
            except InputError as error:
                self._tell(str(error))
            else:
                yield asked
        if self._asked.target and self._asked.file is None:
            return
        for number, (place, line) in enumerate(self._lines()):
            try:
                asked = self._with_new_id(self._run.asked(line, number), f"line {place}")
            except InputError as error:
                self._tell(f"line {place}: {error}")
            else:
                yield asked

    def _with_new_id(self, asked: "Asked", place: str) -> "Asked":
        """Return what is asked, unless its id was asked about before: answers go by it."""
        before = self._places.setdefault(str(asked.id), place)
        if before is not place:
            raise InputError(
                f"Each target and line must have an id of its own. Found {asked.id} again, which "
                f"is that of {before}. A line's is its field id; without one it is numbered, from "
                "0, among those that are not empty.",
                code="command.id_again",
            )
        return asked

    def _lines(self) -> Iterator[tuple[int, Any]]:
        """Yield lines that are not empty with their numbers, from 1.

        A line is text, bytes, or the fields of a table's row.
        """
        file: Path | None = self._asked.file
        from trak_core.data.rows import TABLES
        from trak_core.study.read_targets import read_questions

        if file is not None and file.suffix in TABLES:
            ids, rows = read_questions(file)
            for number, own_id, row in zip(rows.numbers, ids, rows, strict=True):
                yield number, {"id": own_id, **row}
            return
        if file is not None:
            lines = file.read_bytes().split(b"\n")
        else:
            lines = _typed() if self.is_typed else sys.stdin.buffer if sys.stdin else ()
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _check_outputs(run: "FinishedRun", outputs: Sequence[Path]) -> None:
    """Refuse to write over what a run is made of, or among what it has made."""
    from trak_core.system.files import matches

    made_of = [run.checkpoint(name) for name in run.specs.checkpoints]
    # Folders too: a further file would be data.
    made_of += [*run.specs.files, *map(Path, run.specs.config["data_files"])]
    for path in outputs:
        for own in (run.results, *made_of):
            is_inside = own.is_dir() and own.resolve() in path.resolve().parents
            if is_inside or _is_same(path, own) or matches(path, str(own)):
                raise InputError(
                    "--csv and --html must name files outside the results folder, none of the "
                    f"study's, its data or its checkpoints. Found {path}. Name another.",
                    code="command.output_of_run",
                )


def _is_same(path: Path, other: Path) -> bool:
    """Return whether two paths are those of one file, there or not; hard links are."""
    there = path.exists() and other.exists()
    return path.samefile(other) if there else path.resolve() == other.resolve()


def _open_run(config_file: str) -> "OpenRun":
    """Return the run of a config, with its study loaded."""
    import torch

    from trak_core.config.read_config import given_by_command, read_config
    from trak_core.queries.finished_run import FinishedRun
    from trak_core.queries.open_run import OpenRun
    from trak_core.system.job import quiet_libraries

    quiet_libraries()
    schema = workflow_folder() / "schemas/config.schema.yaml"
    config = read_config(Path(config_file), schema)
    given = given_by_command(Path(config_file), config)
    if given:
        print(
            f"Notice: as the run was started, with --config {json.dumps(given)}.", file=sys.stderr
        )
    torch.set_num_threads(config["compute"]["threads"])
    run = FinishedRun.of_config(config, Path(config["results"]), Path.cwd())
    return OpenRun(run.results, run)


def _silently(
    answers: "Iterator[tuple[Asked, Answer | InputError]]",
) -> "Iterator[tuple[Asked, Answer | InputError]]":
    """Yield answers; notices go to standard error, and progress nowhere."""
    from trak_core.system.progress import reported_to

    while True:
        with contextlib.redirect_stdout(sys.stderr), reported_to(lambda n_rows: None):
            pair = next(answers, None)
        if pair is None:
            return
        yield pair


def _typed() -> Iterator[str]:
    """Yield what is typed, line by line, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # ruff: ignore[unused-import] -- `input` has lines to edit and go back to
    with contextlib.suppress(EOFError):
        try:
            while True:
                yield input(_PROMPT)
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)  # no line break was typed
            raise


def _in_words(answer: "Answer") -> str:
    """Return an answer as lines for a terminal."""
    from trak_core.report.template_filters import label
    from trak_core.study.show_samples import in_a_line

    width = max(40, shutil.get_terminal_size().columns)
    lines = textwrap.wrap(in_a_line(f"{answer.asked.id}: {answer.text}"), width)
    lines += [*_in_colours(answer.tokens_of()), in_a_line(answer.said())]
    for sign, words in ((1, "pushed it up:"), (-1, "pushed it down:")):
        lines.append(words)
        for row in answer.side(sign).to_dict("records"):
            train_id, score, text = (
                row.pop(key) for key in ("train_id", "score", "described_text")
            )
            text = "" if text in row.values() else text  # such as the name of a class
            known = ", ".join(f"{name} {label(value)}" for name, value in row.items())
            about = f"  {score:+.3g}  train {train_id}{known and '  ' + known}"
            lines.append(in_a_line(about))
            lines += textwrap.indent(textwrap.fill(in_a_line(text), width - 4), "    ").splitlines()
            lines += [f"    {line}" for line in _in_colours(answer.tokens_of(train_id))]
    return "\n".join([*lines, ""])


def _in_colours(tokens: "pd.DataFrame") -> list[str]:
    """Return a line of the tokens that add most to a score, and on a terminal one of all.

    There, green ones push up and red ones down, the strongest in bold; ``NO_COLOR`` leaves it out.
    """
    scores = tokens["score"].to_numpy()
    if not scores.any():
        return []
    from trak_core.report.explore_data import LEVELS, token_levels
    from trak_core.study.show_samples import in_a_line

    texts = [in_a_line(text) for text in tokens["text"]]
    order = sorted((i for i in range(len(scores)) if scores[i]), key=lambda i: -abs(scores[i]))
    words = [text.strip() or "space" for text in texts]
    most = [f'"{words[i]}" {scores[i]:+.2g}' for i in order[:_MOST_TOKENS]]
    lines = [f"most by {', '.join(most)}"]
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        parts = []
        for text, level in zip(texts, token_levels(scores), strict=True):
            strength = "1;" if abs(level) > LEVELS // 2 else ""
            colour = f"\x1b[{strength}{32 if level > 0 else 31}m"
            parts.append(f"{colour}{text}\x1b[0m" if level else text)
        lines.insert(0, "".join(parts))
    return lines
