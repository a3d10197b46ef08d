"""Show which training samples pushed the model output for new samples up or down."""

import argparse
import atexit
import contextlib
import gc
import itertools
import json
import os
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

_HELP = """\
Type or pipe one line for each sample: a JSON object with the fields of an experiment's `data`, or
plain text for the field `text`. Empty lines are skipped. Press Ctrl-D to end the input.
Each answer starts with the sample and its model output. For a text, the output is the log-odds
log(p / (1 - p)) of the joint probability p of all scored tokens, so it is far below 0 for most
texts. The number of scored tokens follows, and how many of them the model predicts correctly.
"""
_MOST_TOKENS = 3
# At most this many lines of a file are scored together.
_AT_ONCE = 100


def ask(words: Sequence[str]) -> None:
    """Run the subcommand ``trak ask`` with the arguments ``words``.

    If a line cannot be answered, an error is printed and the next line is read. After such an
    error, the exit status is 1, unless the lines were typed.
    """
    parser = argparse.ArgumentParser(
        "trak ask", description=__doc__, epilog=_HELP, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config", help="the config of the run")
    parser.add_argument(
        "--file",
        type=Path,
        help="samples: .jsonl, .json, .csv, .tsv, .parquet, or plain texts, one per line",
    )
    parser.add_argument(
        *("--target", "-t"), action="append", default=[], help="the id of a target to explain"
    )
    parser.add_argument("--label", help="the class to explain for these targets")
    parser.add_argument(
        "--top", type=int, default=5, help="scores of each sign to show; default %(default)s"
    )
    parser.add_argument("--tokens", action="store_true", help="show scores by token, in colours")
    parser.add_argument("--csv", type=Path, help="the CSV file to write all answers to")
    parser.add_argument("--html", type=Path, help="the HTML page to write all answers to")
    asked, others = parser.parse_known_args(words)
    if others:
        parser.error(
            f"unrecognized arguments: {' '.join(others)}. Samples are read from standard input: "
            f"echo ... | trak ask {asked.config}"
        )
    if asked.label is not None and not asked.target:
        parser.error("--label needs --target. To set the label of a line, write it in the line")
    check_config_file("ask", asked.config)
    for path in filter(None, (asked.csv, asked.html)):
        if not path.parent.is_dir() or path.is_dir():
            raise InputError(
                f"--csv and --html must name files in existing folders. Found {path}.",
                code="command.no_output_folder",
            )
    # is_file() would refuse a pipe, as in `--file <(...)`, which is allowed.
    if asked.file is not None and (asked.file.is_dir() or not asked.file.exists()):
        message = f"--file must name an existing file. Found a folder or nothing at {asked.file}."
        raise InputError(message, code="command.no_file")
    if asked.top < 1:
        raise InputError(f"--top must be at least 1. Found {asked.top}.", code="command.top")
    # OpenBLAS with several threads crashes for matrices of 16,384 or more rows. It reads this
    # variable only when it is loaded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Without gc.freeze(), the garbage collection at exit takes a second.
    atexit.register(gc.freeze)
    try:
        session = _Session(asked)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                session.answer_all()
        except BrokenPipeError:
            # The reader has closed the pipe. Python flushes stdout at exit, which would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        finally:
            session.write()
    except KeyboardInterrupt:  # Ctrl-C was pressed before the first line, or twice.
        sys.exit(128 + signal.SIGINT)
    if session.has_failed and not session.is_typed:
        sys.exit(1)


class _Session:
    """A call of ``trak ask``: the opened run, the answers, and whether a line had an error."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        is_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._reads_input = asked.file is None and not asked.target
        self.is_typed = self._reads_input and is_terminal
        self.has_failed = False
        self._answers: list[Answer] = []
        # Maps the id of each sample to its origin, such as "target 3" or "line 5".
        self._places: dict[str, str] = {}
        self._outputs = [path for path in (asked.csv, asked.html) if path is not None]
        if is_terminal:
            print("Loading the run ...", file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(sys.stderr):
            self._run = _open_run(asked.config)
            _check_outputs(self._run.run, asked, self._outputs)
            self._run.load()
        # Like the pages of the run, the page that --html writes shows tokens if `answers` says so.
        shows_tokens = asked.html is not None and self._run.run.specs.config["answers"]["tokens"]
        self._has_tokens: bool = asked.tokens or shows_tokens

    def answer_all(self) -> None:
        """Print an answer or an error for each target and each line."""
        if self.is_typed:
            print(_HELP, file=sys.stderr)
        samples = self._samples()
        # All checkpoints may be read again for each group of samples. Targets and the lines of a
        # file therefore form large groups. A line of standard input is answered at once.
        while group := list(itertools.islice(samples, 1 if self._reads_input else _AT_ONCE)):
            answers = self._run.answers(group, self._asked.top, tokens=self._has_tokens)
            while pair := _next(answers):
                asked, answer = pair
                if isinstance(answer, InputError):
                    self._tell(f"{self._places[str(asked.id)]}: {answer}")
                    continue
                if self._outputs:
                    # Without the scores of all training samples, many answers fit in memory.
                    self._answers.append(replace(answer, scores=answer.scores.iloc[:0].copy()))
                print(_in_words(answer), flush=True)

    def write(self) -> None:
        """Write the table and the page that were requested, if there is at least one answer."""
        if not self._outputs:
            return
        paths = ", ".join(map(str, self._outputs))
        if not self._answers:
            self._tell(f"there is no answer to write, so {paths} was not written")
            return
        from trak_core.queries.render_answers import answer_rows, asked_page
        from trak_core.runtime.files import atomic_write, write_csv

        if self._asked.csv is not None:
            write_csv(self._asked.csv, answer_rows(self._answers))
        if self._asked.html is not None:
            page = asked_page(self._run, self._answers, self._asked.top)
            with atomic_write(self._asked.html) as partial:
                partial.write_text(page, encoding="utf-8")
        print(f"wrote: {paths}", file=sys.stderr)

    def _tell(self, message: str) -> None:
        self.has_failed = True
        print(f"Error: {message}", file=sys.stderr, flush=True)

    def _samples(self) -> Iterator["Asked"]:
        """Yield the samples of targets and lines. Print an error for each that is invalid."""
        for target_id in self._asked.target:
            place = f"target {target_id}"
            try:
                with contextlib.redirect_stdout(sys.stderr):  # Reading it can print notices.
                    asked = self._run.target(target_id)
                if self._asked.label is not None:
                    asked = self._run.of_class(asked, self._asked.label)
                self._check_new_id(asked, place)
            except InputError as error:
                self._tell(str(error))
            else:
                yield asked
        if self._asked.target and self._asked.file is None:
            return
        for number, (place, line) in enumerate(self._lines()):
            try:
                asked = self._run.asked(line, number)
                self._check_new_id(asked, place)
                if not number:
                    for text in self._run.as_read(asked):
                        print(text, file=sys.stderr, flush=True)
            except InputError as error:
                self._tell(f"{place}: {error}")
            else:
                yield asked

    def _check_new_id(self, asked: "Asked", place: str) -> None:
        """Raise an error if an earlier target or line has the same id."""
        before = self._places.setdefault(str(asked.id), place)
        if before is not place:
            raise InputError(
                f"Ids of targets and lines must be unique. Found {asked.id} again, which is the id "
                f"of {before}. The id of a line is its field `id`. Without this field, it is the "
                "line's number, counted from 0.",
                code="command.id_again",
            )

    def _lines(self) -> Iterator[tuple[str, Any]]:
        """Yield the origin, such as "line 1", and the content of each line that is not empty.

        The content is text or bytes. For a row of a table or an entry of a JSON list, it is a dict
        of fields.
        """
        file: Path | None = self._asked.file
        from trak_core.data.row_files import LINES, SUFFIXES
        from trak_core.study.read_targets import read_questions

        if file is not None and file.suffix in SUFFIXES and file.suffix != LINES:
            ids, rows = read_questions(file)
            for index, row_id in enumerate(ids):
                place = rows.place(index).removeprefix(f"{file}, ")
                yield place, {"id": row_id, **rows[index]}
            return
        if file is not None:
            lines = file.read_bytes().split(b"\n")
        else:
            lines = _typed() if self.is_typed else sys.stdin.buffer if sys.stdin else ()
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"line {number}", line


def _check_outputs(run: "FinishedRun", asked: argparse.Namespace, outputs: list[Path]) -> None:
    """Raise an error if two outputs are the same file, or if one would replace a used file."""
    from trak_core.runtime.files import matches

    used_files = [Path(asked.config), *filter(None, (asked.file,)), run.results]
    used_files += [run.checkpoint(name) for name in run.specs.checkpoints]
    # The next run would treat an output that matches a pattern in `data_files` as data.
    used_files += [*run.specs.files, *map(Path, run.specs.config["data_files"])]
    for i, path in enumerate(outputs):
        for used in (*used_files, *outputs[:i]):
            is_inside = used.is_dir() and used.resolve() in path.resolve().parents
            if is_inside or _is_same(path, used) or matches(path, str(used)):
                raise InputError(
                    "--csv and --html must be different files outside the results folder. They "
                    "must not replace the config, --file, or files of the study, its data or its "
                    f"checkpoints. Found {path}.",
                    code="command.output_of_run",
                )


def _is_same(path: Path, other: Path) -> bool:
    """Return whether two paths refer to the same file, which need not exist."""
    exist = path.exists() and other.exists()
    return path.samefile(other) if exist else path.resolve() == other.resolve()


def _open_run(config_file: str) -> "OpenRun":
    import torch

    from trak_core.config.read_config import given_by_command, read_config
    from trak_core.queries.finished_run import FinishedRun
    from trak_core.queries.open_run import OpenRun
    from trak_core.runtime.job import quiet_libraries

    quiet_libraries()
    schema = workflow_folder() / "schemas/config.schema.yaml"
    config = read_config(Path(config_file), schema)
    given = given_by_command(Path(config_file), config)
    if given:
        message = f"Notice: the values of the run's --config are used: {json.dumps(given)}."
        print(message, file=sys.stderr)
    torch.set_num_threads(config["compute"]["threads"])
    run = FinishedRun.of_config(config, Path(config["results"]), Path.cwd())
    return OpenRun(run.results, run)


def _next(answers: "Iterator[tuple[Asked, Answer | InputError]]") -> Any:
    """Return the next pair of sample and answer, or None, without output to standard output."""
    from trak_core.runtime.progress import reported_to

    with contextlib.redirect_stdout(sys.stderr), reported_to(lambda n_rows: None):
        return next(answers, None)


def _typed() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # ruff: ignore[unused-import] -- `input` uses it for editing and history
    with contextlib.suppress(EOFError):
        try:
            while True:
                yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)  # The user typed no line break, so end the line.
            raise


def _in_words(answer: "Answer") -> str:
    from trak_core.report.template_filters import label
    from trak_core.study.show_samples import in_a_line

    width = max(40, shutil.get_terminal_size().columns)
    lines = textwrap.wrap(in_a_line(f"{answer.asked.id}: {answer.text}"), width)
    lines += [*_in_colours(answer.tokens_of()), in_a_line(answer.said())]
    for sign, heading in ((1, "pushed it up:"), (-1, "pushed it down:")):
        lines.append(heading)
        for row in answer.side(sign).to_dict("records"):
            train_id, score, text = (
                row.pop(key) for key in ("train_id", "score", "described_text")
            )
            text = "" if text in row.values() else text  # The text can be the name of the class.
            known = ", ".join(
                f"{name} {shown}" for name, value in row.items() if (shown := label(value))
            )
            lines.append(in_a_line(f"  {score:+.3g}  train {train_id}{known and '  ' + known}"))
            lines += textwrap.indent(textwrap.fill(in_a_line(text), width - 4), "    ").splitlines()
            lines += [f"    {line}" for line in _in_colours(answer.tokens_of(train_id))]
    return "\n".join([*lines, ""])


def _in_colours(tokens: "pd.DataFrame") -> list[str]:
    """Return a line that lists the tokens with the largest scores, after a line with all tokens.

    In the line with all tokens, tokens that push the output up are green, tokens that push it down
    are red, and the strongest are bold. This line is left out if the output is not a terminal or
    if the environment variable ``NO_COLOR`` is set.
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
