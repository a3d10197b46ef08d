"""Look at a folder of weights and data, and write the config of a ready-made study for it."""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from importlib import import_module
from io import StringIO
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any

import pandas as pd
import yaml

from trak_core.command.choose_weights import ENDING, Shapes, chosen, loadable, times_of
from trak_core.command.guess_network import Line, own_network, own_transform
from trak_core.config.bind_study_arguments import READY_MADE, first_checkpoint
from trak_core.config.read_config import ALL_TARGETS
from trak_core.data.rows import LINES, SUFFIXES, TABLES, as_number, read_rows
from trak_core.errors import InputError, listed
from trak_core.study.study import beginning_and_end

_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
_CONFIGS = ("adapter_config.json", "config.json")
_EXPLAINED = re.compile(
    r"asked|dev|eval|evaluation|held|heldout|questions|targets|test|val|valid|validation"
)
_LABELS = ("label", "labels", "target", "class", "y")
# A column without a name has row numbers that pandas wrote, and gets such a name.
_NUMBERED = ("", "Unnamed: 0")
# Fields that stand before a text, and the text, in rows without the field `text`.
_PAIRS = (
    *(("prompt", "completion"), ("prompt", "response"), ("question", "answer")),
    *(("instruction", "output"), ("instruction", "response"), ("input", "output")),
)
_N_TARGETS = 3
# Columns whose largest values differ by more were hardly trained on as they are.
_MOST_TIMES = 100
# A Trainer's checkpoints may lie in runs/first/out.
_DEPTH = 4
# Labelled ones are all explained up to so many, because lists of suspects rest on hundreds.
_MOST_TARGETS = 2000
_NEEDED = (
    "a folder of weights in Hugging Face format (config.json or adapter_config.json, by itself or "
    "in checkpoint-<step>) beside texts, or checkpoints of PyTorch beside a table of numbers or a "
    f"folder of images for each class. Rows are in {', '.join(SUFFIXES)}"
)

# Which damping is best differs between studies: docs/explanation/scores.md, "The damping".
_OF_TEXTS: Line = (
    "scoring",
    {"damping": 1},
    "the default is 2; which is best differs between studies",
)

_AROUND = "what training put around it, such as a template or an end token, belongs in here"
_OF_THE_TEXT = 'give what training put around it, such as an end token, by text: "{text}</s>"'
_SUSPECTS = "# lists: [suspects]  # training samples whose label is likely wrong"


def init(words: Sequence[str]) -> None:
    """Write the config that ``trak init`` was asked for, and print what it rests on.

    Raises:
        InputError: If the config is there already, or the folder is no study.
    """
    parser = argparse.ArgumentParser("trak init", description=__doc__)
    parser.add_argument("folder", nargs="?", default=".", help="this one, if not given")
    parser.add_argument("--config", default="trak.yaml", help="the file to write; %(default)s")
    asked = parser.parse_args(words)
    folder, config = Path(asked.folder), Path(asked.config)
    if config.exists():
        raise InputError(
            f"`trak init` must write a file of its own. Found {config}. Remove it, or name another "
            "by --config.",
            code="command.config_exists",
        )
    if config.suffix not in {".yaml", ".yml"} or not config.parent.is_dir():
        raise InputError(
            "--config must name a file that ends in .yaml, in a folder that is there. Found "
            f"{config}.",
            code="command.config_name",
        )
    if not folder.is_dir():
        raise InputError(
            f"`trak init` must get a folder. Found none at {folder} (from {Path.cwd()}).",
            code="command.no_folder",
        )
    text, report = config_for(folder)
    own = "results-" + re.sub(r"[^A-Za-z0-9._-]+", "_", config.stem)
    names = (f"{own}-{i}" if i > 1 else own for i in count(1))
    results = next(name for name in names if not Path(name).exists())
    config.write_text(f"{text}results: {json.dumps(results)}\n", encoding="utf-8")
    report += [] if results == own else [f"chose: {results} for the results: {own} is there"]
    report.append(_first_sample(yaml.safe_load(text)))
    print("\n".join([*report, f"wrote: {config}. Read it, then: trak run {quote(str(config))}"]))


def _first_sample(config: Mapping[str, Any]) -> str:
    """Return a line with the first training sample as the model reads it, or why it can't."""
    name, arguments = config["study"], dict(config["study_arguments"])
    if READY_MADE[name].takes_weights:
        arguments.setdefault("weights", first_checkpoint(config["checkpoints"]))
    make = getattr(import_module(f"trak_core.ready_made.{name}"), name)
    try:
        with redirect_stderr(StringIO()):  # notices, which a run repeats
            study = make(**arguments)
            read = study.as_read(study.train_data()[0])
    except Exception as error:  # the config is written, whatever data and weights are
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        return f"could not read the training samples: {kind}{' '.join(str(error).split())}"
    return f"first training sample, as the model reads it: {beginning_and_end(read)}"


def config_for(folder: Path) -> tuple[str, list[str]]:
    """Return the text of a folder's config, and lines on what it rests on.

    It looks into folders inside only as far as it must to find a study.
    """
    inside, level, findings = [folder], [folder], "nothing of it"
    for _ in range(_DEPTH):
        level = [path for parent in level for path in sorted(parent.iterdir()) if _may_hold(path)]
        inside += level
        report: list[str] = []
        written = _config_of(folder, inside, report)
        if written is not None:
            return written
        told = "; ".join(line.removeprefix("found: ") for line in report)
        findings = told or findings
        level = [path for path in level if not _is_of_images(path) and not _weights_config(path)]
    others = f" and {_DEPTH} folders deep in it, at {listed(inside[1:])}" if inside[1:] else ""
    raise InputError(
        f"{folder} must hold a study: {_NEEDED}. Looked at it{others}. Found {findings}. Put "
        "what is missing there, or write a study of your own (docs/how-to/own-model.md).",
        code="command.no_study",
    )


def _config_of(
    folder: Path, inside: Sequence[Path], report: list[str]
) -> tuple[str, list[str]] | None:
    """Return what ``config_for`` does of a folder and some inside it; None if they are no study."""
    # timm's weights are a state dict, beside a config that names the network.
    timm = {path: name for path in inside if (name := _timm_network(path)) is not None}
    weights = [p for p in inside if p not in timm and _weights_config(p) is not None]
    images = [path for path in inside if path not in weights and _is_of_images(path)]
    # A Trainer's folder may hold the texts, but no state dicts of its own.
    plain = [path for path in inside if path not in weights]
    files = sorted({p for place in (folder, *plain) for p in place.iterdir() if p.is_file()})
    rows = [path for path in files if path.suffix in SUFFIXES]
    states = [path for path in files if ENDING.search(path.name) and path.parent in plain]
    named = (("weights", weights), ("folders of images", images), ("rows", rows))
    report += [
        f"found: {kind}: {', '.join(map(str, paths))}"
        for kind, paths in (*named, ("checkpoints", states))
        if paths
    ]
    if weights and rows:
        bare = [path for path in weights if not [*path.glob("checkpoint-*")]]
        loads = loadable(bare, report)
        weights = [path for path in weights if path in loads or path not in bare]
        return _of_texts(weights, rows, report) if weights else None
    loads = loadable(states, report) if images or rows else {}
    code = [path for path in files if path.suffix == ".py"]
    return _of_network(images, rows, loads, timm, code, report) if loads else None


def _timm_network(folder: Path) -> str | None:
    """Return the name of the network whose weights timm saved in a folder."""
    config = folder / "config.json"
    is_saved = config.is_file() and (folder / "model.safetensors").is_file()
    name = _json(config).get("architecture") if is_saved else None
    return name if isinstance(name, str) else None


def _may_hold(path: Path) -> bool:
    """Return whether a path is a folder of a user's: no results, no environment of Python."""
    if not path.is_dir() or path.name.startswith((".", "__", "results", "checkpoint-")):
        return False
    return not any((path / own).exists() for own in ("pyvenv.cfg", "code.json"))


def _refuse_here(paths: Iterable[Path], subject: str, code: str) -> None:
    """Refuse what must not lie in or around the current folder, into which results come."""
    here = Path.cwd()
    for path in (path.resolve() for path in paths):
        if here.is_relative_to(path):
            raise InputError(
                f"{subject} must lie in a folder of their own, because the results come into this "
                f"one. Found them in {path}. Call from the folder above: trak init {path.name}",
                code=code,
            )


def _weights_config(folder: Path) -> Path | None:
    """Return the file that says what weights are in a folder, or in a Trainer's checkpoints."""
    for place in (folder, *sorted(folder.glob("checkpoint-*"))):
        for name in _CONFIGS:
            if (place / name).is_file():
                return place / name
    return None


def _is_of_images(folder: Path) -> bool:
    """Return whether two folders or more, one for each class, hold images."""
    classes = (path for path in folder.iterdir() if _may_hold(path))
    return sum(any(p.suffix.lower() in _IMAGES for p in path.iterdir()) for path in classes) > 1


def _split(paths: Sequence[Path], report: list[str]) -> tuple[Path, Path | None]:
    """Return what trained and what to explain, by their names."""
    words = {path: set(re.split(r"[^a-z]+", path.stem.lower())) for path in paths}
    trained = [path for path in paths if any(word.startswith("train") for word in words[path])]
    named = [path for path in paths if any(map(_EXPLAINED.fullmatch, words[path]))]
    explained = [path for path in named if path not in trained]
    others = [path for path in paths if path not in explained]
    if not others:
        raise InputError(
            "The training data must be there. Found by their names only data to explain: "
            f"{', '.join(map(str, explained))}. Add the training data, such as train.jsonl.",
            code="command.no_training_data",
        )
    train = (trained or sorted(others, key=lambda path: -path.stat().st_size))[0]
    target = explained[0] if explained else None
    report.append(f"chose: {train} as training data, {target or 'samples of it'} to explain")
    if unused := [path for path in paths if path not in {train, target}]:
        report.append(f"could not tell what else is for: {listed(unused)}")
    return train, target


def _of_texts(weights: list[Path], rows: list[Path], report: list[str]) -> tuple[str, list[str]]:
    """Return the config of a language model or of a classifier of texts."""
    files = {folder: _weights_config(folder) for folder in weights}
    # An adapter's base often lies beside it.
    adapters = [folder for folder in weights if files[folder].name == _CONFIGS[0]]  # pyright: ignore[reportOptionalMemberAccess]
    first = (adapters or weights)[0]
    said = _json(files[first])
    kind = str(said.get("task_type") if adapters else (said.get("architectures") or [None])[0])
    classifies = kind.endswith("ForSequenceClassification")
    writes = kind in {"None", "CAUSAL_LM"} or re.search(r"CausalLM|LMHead", kind)
    if not (classifies or writes):
        raise InputError(
            "Weights must be of a causal language model, or of a classifier of texts. Found "
            f"{kind} in {first}. Write a study of your own (docs/how-to/own-model.md).",
            code="command.weights_kind",
        )
    if kind == "None":
        report.append(f"could not tell: what model {first} holds; took it for a language model")
    alike = [path for path in (adapters or weights) if _is_alike(_json(files[path]), said)]
    if other := [path for path in weights if path not in alike]:
        report.append(f"left out: {listed(other)}: not of the same model as {first}")
    bare = [path for path in alike if not [*path.glob("checkpoint-*")]]
    _refuse_here(bare, "Weights", code="command.weights_here")
    train, target = _split(rows, report)
    study = "text_classification" if classifies else "language_model"
    samples = read_rows(str(train))
    is_text = "text" in samples[0] and not classifies
    arguments: list[Line] = [("texts", str(train), _OF_THE_TEXT if is_text else "")]
    if classifies and not (first / "config.json").is_file():
        last = max(first.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
        arguments.append(("weights", str(last), "what the model is built from"))
    arguments += _text_fields(samples, classifies, report)
    asked: list[Line]
    if target is not None and target.suffix in {LINES, *(() if classifies else TABLES)}:
        asked = [("data", str(target), "")]
    else:
        explained = target or train
        arguments.append(("targets", str(explained), ""))
        given, own = {key: value for key, value, _ in arguments}, read_rows(str(explained))
        classes = [row.get(given.get("label", "label")) for row in own] if classifies else None
        asked = [_targets(own.ids(), classes)]
    more = [] if classifies else [_OF_TEXTS]
    return _text(study, arguments, more, alike, asked), [*report, f"chose: {study}"]


def _json(file: Path | None) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{file}: must be JSON. {error}.", code="command.weights_config"
        ) from error


def _is_alike(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two configs are of one model, wherever and by whatever version saved."""
    return all(
        first.get(key) == second.get(key)
        for key in {*first, *second} - {"_name_or_path", "transformers_version", "peft_version"}
    )


def _text_fields(rows: Sequence[dict[str, Any]], classifies: bool, report: list[str]) -> list[Line]:
    """Return the arguments that say which fields of rows are prompt, text and label."""
    row = rows[0]
    label = _label_of(row) if classifies else None
    lines: list[Line] = []
    if classifies and label != "label":
        note = "" if label else "put the field of the label here"
        report += [] if label else ["could not tell: which field is the label"]
        lines.append(("label", label or _last(row), note))
    pair = next((pair for pair in _PAIRS if set(pair) <= set(row)), None)
    is_chat = "messages" in row or (pair == _PAIRS[0] and not isinstance(row["completion"], str))
    if "text" in row or (is_chat and not classifies):
        return lines
    texts = [name for name in row if isinstance(row[name], str) and name not in {"id", label}]
    if pair and not classifies:
        if others := [name for name in texts if name not in pair]:
            report.append(f"could not tell: where training had {', '.join(others)}; took none")
        ends = [str(row.get(pair[0]) or "")[-1:] + str(row.get(pair[1]) or "")[:1] for row in rows]
        note = _AROUND
        if any(re.fullmatch(r"\S\S", end) for end in ends):
            report.append(f"could not tell: what training had between {' and '.join(pair)}")
            note += "; so does what it had between the two, such as a space"
        prompt = [("prompt", f"{{{pair[0]}}}", "")] if pair[0] != "prompt" else []
        return [*lines, *prompt, ("text", f"{{{pair[1]}}}", note)]
    if len(texts) == 1:
        report.append(f"chose: {texts[0]} as the text: no other field is one")
        return [*lines, ("text", f"{{{texts[0]}}}", "" if classifies else _AROUND)]
    longest = max(texts or row, key=lambda name: len(str(row[name])))
    report.append(f"could not tell: which field is the text; took {longest} of {', '.join(row)}")
    return [*lines, ("text", f"{{{longest}}}", "put a template of the rows' fields here")]


def _label_of(row: dict[str, Any]) -> str | None:
    """Return the field that is called as labels are, however it is written."""
    written = {name.strip().lower(): name for name in reversed([*row])}
    return next((written[name] for name in _LABELS if name in written), None)


def _last(row: dict[str, Any]) -> str:
    """Return the last field that tells something of a sample."""
    return ([name for name in row if name not in {"id", *_NUMBERED}] or [*row])[-1]


def _of_network(
    images: list[Path],
    rows: list[Path],
    states: Mapping[Path, Shapes],
    timm: Mapping[Path, str],
    code: list[Path],
    report: list[str],
) -> tuple[str, list[str]]:
    """Return the config of a classifier of images, or of a network of tables.

    ``timm`` names the networks of folders that timm saved; ``code`` are Python files that may.
    """
    train, target = _split(images or rows, report)
    given: list[Line] = [] if target is None else [("targets", str(target), "")]
    if images:
        explained = target or train
        _refuse_here((train, explained), "Images", code="command.images_here")
        inner = sorted(explained.glob("*/**/*"))
        relative = [p.relative_to(explained) for p in inner if p.suffix.lower() in _IMAGES]
        asked = _targets([path.as_posix() for path in relative], [i.parts[0] for i in relative])
        checkpoints = chosen(states, sum(map(_may_hold, train.iterdir())), report)
        name, *others = {timm.get(path.parent) for path in checkpoints}
        network = ("model", f"timm/{name}", "its config.json names it")
        if name is None or others:
            network = own_network(code, report, of_images=True)
        arguments = [("images", str(train), ""), *given, network, own_transform(code, report)]
        report.append("chose: image_folder")
        return _text("image_folder", arguments, [], checkpoints, [asked]), report
    trained, explained = read_rows(str(train)), read_rows(str(target or train))
    row = trained[0]
    label = _label_of(row) or _last(row)
    report.append(f"could not tell: whether {label} is what the network predicts")
    own = {"id", *_NUMBERED} - {label}
    cells = {name: [row.get(name) for row in trained] for name in row if name not in own}
    numbers = {name: [as_number(value) for value in values] for name, values in cells.items()}
    texts = [name for name in cells if _are_texts(cells[name])]
    labels = cells[label]
    known = {value: n for value in labels if (n := as_number(value)) is not None}
    are_whole = bool(known) and all(isinstance(number, int) for number in known.values())
    names = {value for value in labels if value and isinstance(value, str)}
    # Where every cell is a text, 1 is a number and 01 a name.
    are_names = names == known.keys() and (
        train.suffix not in TABLES
        or (are_whole and any(str(number) != name for name, number in known.items()))
    )
    are_texts = label in texts or are_names
    # Such as 0.0 and 1.0: classes' numbers that went through a column of floats.
    are_numbers = not are_whole and {*known.values()} == {*range(len({*labels}))}
    classes = sorted(names) if are_texts else sorted(known, key=lambda value: known[value])
    is_class = are_texts or are_numbers or are_whole
    n_classes = len(classes) if are_texts or are_numbers else 1 + max(known.values(), default=0)
    output = "image_classification" if is_class else "regression"
    asked = _targets(explained.ids(), [row.get(label) for row in explained] if is_class else None)
    arguments = [("table", str(train), ""), *given, ("label", label, "the column to predict")]
    texts = [name for name in texts if name != label]
    inputs = [name for name in cells if name != label and name not in texts]
    if texts or any(name in row for name in _NUMBERED):
        arguments.append(("columns", inputs, "the model's inputs, in its order"))
    report += [f"left out: {', '.join(texts)}: texts are no inputs"] if texts else []
    arguments.append(_scale({name: numbers[name] for name in inputs}, report))
    if are_texts:
        report.append("could not tell: the order of the model's classes; took the alphabet's")
    if are_texts or are_numbers:
        arguments.append(("classes", classes, "in the order of the logits"))
    kind = ("model_output", output, "regression for a number, image_classification for a class")
    checkpoints = chosen(states, int(n_classes) if is_class else 1, report)
    arguments.append(own_network(code, report, of_images=False))
    report.append("chose: tabular")
    return _text("tabular", arguments, [kind], checkpoints, [asked]), report


def _are_texts(values: Sequence[Any]) -> bool:
    """Return whether most cells are no numbers; an empty one is a number that is missing."""
    # Separators of thousands make no text; the run refuses them by line.
    is_text = re.compile(r"(?![-+]?\d[\d.,' ]*$).+", re.S).match
    n_texts = sum(isinstance(value, str) and is_text(value) is not None for value in values)
    return sum(as_number(value) is not None for value in values) < min(n_texts, len(values) / 2)


def _scale(columns: Mapping[str, Sequence[int | float | None]], report: list[str]) -> Line:
    """Return whether the study scales the inputs, because few networks learn from all sizes."""
    sizes = [(max(map(abs, filter(None, own)), default=0), name) for name, own in columns.items()]
    known = sorted((size, name) for size, name in sizes if size)
    if not known or known[-1][0] <= _MOST_TIMES * known[0][0]:
        report.append("could not tell: whether training scaled the columns; took them as they are")
        return "scale", None, "null takes the columns as they are, standard as StandardScaler does"
    (least, small), (most, large) = known[0], known[-1]
    report.append(
        f"could not tell: whether training scaled the columns; took StandardScaler, because "
        f"{large} is up to {most:.3g} and {small} to {least:.3g}"
    )
    return "scale", "standard", "as scikit-learn's StandardScaler; null if training did not"


def _targets(ids: Sequence[Any], classes: Sequence[Any] | None = None) -> Line:
    """Return what to explain: the first ids; of samples of classes all, or one of each in turn."""
    if classes is not None:
        if len(ids) <= _MOST_TARGETS:
            return "targets", ALL_TARGETS, ""
        labels = pd.Series([str(label) for label in classes])
        turns = labels.groupby(labels).cumcount()
        ids = [ids[i] for i in turns.argsort(kind="stable")]
    return "targets", list(ids[:_N_TARGETS]), "ids of what to explain"


def _text(
    study: str, arguments: list[Line], more: list[Line], checkpoints: list[Path], asked: list[Line]
) -> str:
    """Return a config's text: JSON is YAML, so that no value is read as another."""
    names = [ENDING.sub("", path.name) or "run" for path in checkpoints]
    stems = [re.sub(r"[^A-Za-z0-9_]+", "_", name) for name in names]
    ids: list[str] = []
    for stem in stems:
        free = (f"{stem}_{i}" for i in count() if f"{stem}_{i}" not in {*ids, *stems})
        ids.append(stem if stems.count(stem) == 1 else next(free))
    times = times_of(checkpoints)
    runs: list[Line] = [
        (name, {"path": str(path), **times[path]} if path in times else str(path), "")
        for name, path in zip(ids, checkpoints, strict=True)
    ]
    by_line = ["", *_written(runs, "  ")]
    return "\n".join([
        "# Written by `trak init`. docs/how-to/ready-made.md says what may stand here.",
        *_written([("study", study, ""), *more]),
        *_comments(arguments),
        f"study_arguments: {_on_a_line(arguments)}",
        "# Several of one training run must be {path: ..., run: a name, at: its epoch or step}.",
        "checkpoints:" + (f" {_on_a_line(runs)}" if len(runs) == 1 else "\n".join(by_line)),
        *_comments(asked),
        f"experiments: {{asked: {_on_a_line(asked)}}}",
        *[_SUSPECTS] * (asked == [("targets", ALL_TARGETS, "")]),
        "",
    ])


def _written(lines: list[Line], indent: str = "") -> list[str]:
    return [
        f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}{comment and '  # ' + comment}"
        for key, value, comment in lines
    ]


def _on_a_line(lines: list[Line]) -> str:
    return "{" + ", ".join(_written([(key, value, "") for key, value, _ in lines])) + "}"


def _comments(lines: list[Line]) -> list[str]:
    return [f"# {key}: {comment}" for key, _, comment in lines if comment]
