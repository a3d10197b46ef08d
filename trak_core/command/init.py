"""Look at a folder of weights and data, and write the config of a ready-made study for it."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any

from trak_core.command.guess_network import Line, named_network, own_network, own_transform
from trak_core.config.read_config import ALL_TARGETS
from trak_core.errors import InputError, listed
from trak_core.ready_made.ready_study import ids_of, read_rows

_ROWS = (".jsonl", ".csv", ".tsv", ".parquet")
_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
_STATE_DICTS = frozenset({".pt", ".pth", ".ckpt", ".safetensors"})
_CONFIGS = ("adapter_config.json", "config.json")
_EXPLAINED = re.compile(
    r"asked|dev|eval|evaluation|held|heldout|questions|targets|test|val|valid|validation"
)
# What stands before the number of an epoch or a step in a file's name; "sweep_1" has none.
_TIME = re.compile(r"((?:.*[^a-z])?(?:epochs?|ep|steps?|iter(?:ation)?s?)[-_=]?)(\d+)", re.I)
_LABELS = ("label", "labels", "target", "class", "y")
# What a table written with its row numbers calls them: pandas, of a column without a name.
_NUMBERED = "Unnamed: 0"
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
    f"folder of images for each class. Rows are in {', '.join(_ROWS)}"
)

# Which damping is best differs between studies: docs/explanation/scores.md, "The damping".
_OF_TEXTS: Line = ("scoring", {"damping": 1}, "which damping is best differs between studies")

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
    print("\n".join([*report, f"wrote: {config}. Read it, then: trak run {quote(str(config))}"]))


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
    others = [str(path) for path in inside[1:]]
    looked = f" and {_DEPTH} folders deep in it, at {listed(others)}" if others else ""
    raise InputError(
        f"{folder} must hold a study: {_NEEDED}. Looked at it{looked}. Found {findings}. Put "
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
    rows = _files([folder, *plain], _ROWS)
    states = _files(plain, _STATE_DICTS)
    named = (("weights", weights), ("folders of images", images), ("rows", rows))
    report += [
        f"found: {kind}: {', '.join(map(str, paths))}"
        for kind, paths in (*named, ("checkpoints", states))
        if paths
    ]
    if weights and rows:
        return _of_texts(weights, rows, report)
    if not (states and (images or rows)):
        return None
    if _times(states):
        report.append("chose: files whose names differ in an epoch or a step as times of one run")
    networks: set[str | None] = {None}
    if images:
        networks = {timm.get(path.parent) for path in states}
    network = named_network(networks, report)
    code = _files([folder, *plain], [".py"])
    if network is None:
        network = own_network(code, report, of_images=bool(images))
    lines = [network, own_transform(code, report)] if images else [network]
    return _of_network(images, rows, states, lines, report)


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


def _files(folders: Iterable[Path], suffixes: Iterable[str]) -> list[Path]:
    inside = {path for folder in folders for path in folder.iterdir() if path.is_file()}
    return sorted(path for path in inside if path.suffix in suffixes)


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
    report.append(f"chose: {train} as training data, {target or 'some of it'} to explain")
    unused = [str(path) for path in paths if path not in {train, target}]
    if unused:
        report.append(f"could not tell what else is for: {', '.join(unused)}")
    return train, target


def _of_texts(weights: list[Path], rows: list[Path], report: list[str]) -> tuple[str, list[str]]:
    """Return the config of a language model or of a classifier of texts."""
    files = {folder: _weights_config(folder) for folder in weights}
    # An adapter's base often lies beside it.
    adapters = [folder for folder in weights if files[folder].name == _CONFIGS[0]]  # pyright: ignore[reportOptionalMemberAccess]
    chosen = (adapters or weights)[0]
    said = _json(files[chosen])
    kind = str(said.get("task_type") if adapters else (said.get("architectures") or [None])[0])
    classifies = kind.endswith("ForSequenceClassification")
    if (
        not classifies
        and kind not in {"None", "CAUSAL_LM"}
        and not re.search(r"CausalLM|LMHead", kind)
    ):
        raise InputError(
            "Weights must be of a causal language model, or of a classifier of texts. Found "
            f"{kind} in {chosen}. Write a study of your own (docs/how-to/own-model.md).",
            code="command.weights_kind",
        )
    if kind == "None":
        report.append(f"could not tell: what model {chosen} holds; took it for a language model")
    alike = [path for path in (adapters or weights) if _is_alike(_json(files[path]), said)]
    other = [str(path) for path in weights if path not in alike]
    report += [f"left out: {', '.join(other)}: not of the same model"] if other else []
    bare = [path for path in alike if not [*path.glob("checkpoint-*")]]
    _refuse_here(bare, "Weights", code="command.weights_here")
    train, target = _split(rows, report)
    samples = read_rows(str(train))
    study = "text_classification" if classifies else "language_model"
    arguments: list[Line] = [("texts", str(train), "")]
    if classifies and not (chosen / "config.json").is_file():
        last = max(chosen.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
        arguments.append(("weights", str(last), "what the model is built from"))
    arguments += _text_fields(samples[0], classifies, report)
    asked: list[Line]
    if target is not None and target.suffix == ".jsonl":
        asked = [("data", str(target), "")]
    else:
        explained = target or train
        arguments.append(("targets", str(explained), ""))
        given, own = {key: value for key, value, _ in arguments}, read_rows(str(explained))
        classes = [row.get(given.get("label", "label")) for row in own] if classifies else None
        asked = [_targets(ids_of(own), classes)]
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


def _text_fields(row: dict[str, Any], classifies: bool, report: list[str]) -> list[Line]:
    """Return the arguments that say which fields of a row are prompt, text and label."""
    label = _label_of(row) if classifies else None
    lines: list[Line] = []
    if classifies and label != "label":
        note = "" if label else "put the field of the label here"
        report += [] if label else ["could not tell: which field is the label"]
        lines.append(("label", label or _last(row), note))
    if "text" in row or ("messages" in row and not classifies):
        return lines
    pair = next((pair for pair in _PAIRS if set(pair) <= set(row)), None)
    if pair and not classifies:
        note = "put the training's own template here"
        return [*lines, ("prompt", f"{{{pair[0]}}} ", note), ("text", f"{{{pair[1]}}}", note)]
    texts = [name for name in row if isinstance(row[name], str) and name not in {"id", label}]
    if len(texts) == 1:
        report.append(f"chose: {texts[0]} as the text: no other field is one")
        return [*lines, ("text", f"{{{texts[0]}}}", "")]
    longest = max(texts or row, key=lambda name: len(str(row[name])))
    report.append(f"could not tell: which field is the text; took {longest} of {', '.join(row)}")
    return [*lines, ("text", f"{{{longest}}}", "put a template of the rows' fields here")]


def _label_of(row: dict[str, Any]) -> str | None:
    """Return the field that is called as labels are, however it is written."""
    written = {name.strip().lower(): name for name in reversed([*row])}
    return next((written[name] for name in _LABELS if name in written), None)


def _last(row: dict[str, Any]) -> str:
    """Return the last field that tells something of a sample."""
    return ([name for name in row if name not in {"id", _NUMBERED}] or [*row])[-1]


def _of_network(
    images: list[Path], rows: list[Path], states: list[Path], network: list[Line], report: list[str]
) -> tuple[str, list[str]]:
    """Return the config of a classifier of images, or of a network of tables.

    ``network`` holds the lines that name it, and what prepares its images.
    """
    train, target = _split(images or rows, report)
    given: list[Line] = [] if target is None else [("targets", str(target), "")]
    if images:
        explained = target or train
        _refuse_here((train, explained), "Images", code="command.images_here")
        inner = (
            path for path in sorted(explained.glob("*/**/*")) if path.suffix.lower() in _IMAGES
        )
        relative = [path.relative_to(explained) for path in inner]
        asked = _targets([path.as_posix() for path in relative], [i.parts[0] for i in relative])
        arguments = [("images", str(train), ""), *given, *network]
        text = _text("image_folder", arguments, [], states, [asked])
        return text, [*report, "chose: image_folder"]
    trained, explained = read_rows(str(train)), read_rows(str(target or train))
    row = trained[0]
    label = _label_of(row) or _last(row)
    report.append(f"could not tell: whether {label} is what the network predicts")
    own = {"id", _NUMBERED} - {label}
    cells: dict[str, list[Any]] = {
        name: [row.get(name) for row in trained] for name in row if name not in own
    }
    numbers = {name: [_number(value) for value in values] for name, values in cells.items()}
    texts = [name for name in cells if _are_texts(cells[name])]
    labels = cells[label]
    distinct = set(labels)
    are_texts = label in texts or (
        all(isinstance(value, str) for value in distinct) and None not in numbers[label]
    )
    # Such as 0.0 and 1.0: classes' numbers that went through a column of floats.
    are_numbers = all(isinstance(value, float) for value in distinct) and (
        distinct == set(range(len(distinct)))
    )
    is_class = are_texts or are_numbers or isinstance(numbers[label][0], int)
    output = "image_classification" if is_class else "regression"
    asked = _targets(ids_of(explained), [row.get(label) for row in explained] if is_class else None)
    arguments = [("table", str(train), ""), *given, ("label", label, "the column to predict")]
    texts = [name for name in texts if name != label]
    inputs = [name for name in cells if name != label and name not in texts]
    if texts or _NUMBERED in row:
        arguments.append(("columns", inputs, "the model's inputs, in its order"))
    report += [f"left out: {', '.join(texts)}: texts are no inputs"] if texts else []
    classes = {value for value in distinct if value and isinstance(value, str)}
    for name in [*inputs, label]:
        taken = numbers[name]
        if name == label and are_texts:
            taken = [value if value in classes else None for value in labels]
        odd = [index for index, value in enumerate(taken) if value is None]
        if odd:
            report.append(
                f"could not tell: what training had for {cells[name][odd[0]]!r} in column "
                f"{name}, row {odd[0] + 1}{f' and {len(odd) - 1} more' if odd[1:] else ''}. Write "
                f"that into {train}, or delete the row if training did: the run refuses it as it is"
            )
    arguments.append(_scale({name: numbers[name] for name in inputs}, report))
    if are_texts:
        report.append("could not tell: the order of the model's classes; took the alphabet's")
    if are_texts or are_numbers:
        arguments.append((
            "classes",
            sorted(classes if are_texts else distinct),
            "in the order of the logits",
        ))
    kind = ("model_output", output, "regression for a number, image_classification for a class")
    text = _text("tabular", [*arguments, *network], [kind], states, [asked])
    return text, [*report, "chose: tabular"]


def _number(value: Any) -> int | float | None:
    """Return the number that a table's cell is, if it is one."""
    if isinstance(value, str):
        # All cells of a column are texts where one is none.
        for kind in (int, float):
            with suppress(ValueError):
                return _number(kind(value))
    return value if isinstance(value, int | float) and value == value else None


def _are_texts(values: Sequence[Any]) -> bool:
    """Return whether most cells are no numbers; an empty one is a number that is missing."""
    n_texts = sum(isinstance(value, str) and bool(value) for value in values)
    return sum(_number(value) is not None for value in values) < min(n_texts, len(values) / 2)


def _scale(columns: Mapping[str, Sequence[int | float | None]], report: list[str]) -> Line:
    """Return whether the study scales the inputs, because few networks learn from all sizes."""
    sizes = sorted(
        (max((abs(value) for value in values if value is not None), default=0), name)
        for name, values in columns.items()
    )
    known = [(size, name) for size, name in sizes if size]
    if not known or known[-1][0] <= _MOST_TIMES * known[0][0]:
        report.append("could not tell: whether training scaled the columns; took them as they are")
        return "scale", None, "null takes the columns as they are, standard as StandardScaler does"
    (least, small), (most, large) = known[0], known[-1]
    report.append(
        f"could not tell: whether training scaled the columns; took StandardScaler, because "
        f"{large} is up to {most:.3g} and {small} to {least:.3g}"
    )
    return "scale", "standard", "as scikit-learn's StandardScaler; null if training did not"


def _times(checkpoints: Sequence[Path]) -> dict[Path, tuple[str, int]]:
    """Return run and time of checkpoints whose names differ in an epoch or a step alone."""
    told: dict[tuple[Path, str], dict[Path, int]] = {}
    for path in checkpoints:
        if match := _TIME.fullmatch(path.stem):
            told.setdefault((path.parent, match[1]), {})[path] = int(match[2])
    runs = [times for times in told.values() if len(times) > 1]
    return {path: (f"run{n}", at) for n, run in enumerate(runs, 1) for path, at in run.items()}


def _targets(ids: Sequence[Any], classes: Sequence[Any] | None = None) -> Line:
    """Return what to explain: the first ids; of samples of classes all, or one of each in turn."""
    if classes is not None:
        if len(ids) <= _MOST_TARGETS:
            return "targets", ALL_TARGETS, ""
        seen = Counter[str]()
        turns = []
        for label in map(str, classes):
            turns.append(seen[label])
            seen[label] += 1
        ids = [ids[i] for i in sorted(range(len(ids)), key=lambda i: turns[i])]
    return "targets", list(ids[:_N_TARGETS]), "ids of what to explain"


def _text(
    study: str, arguments: list[Line], more: list[Line], checkpoints: list[Path], asked: list[Line]
) -> str:
    """Return a config's text: JSON is YAML, so that no value is read as another."""
    stems = [re.sub(r"[^A-Za-z0-9_]+", "_", path.stem) or "run" for path in checkpoints]
    ids: list[str] = []
    for stem in stems:
        free = (f"{stem}_{i}" for i in count() if f"{stem}_{i}" not in {*ids, *stems})
        ids.append(stem if stems.count(stem) == 1 else next(free))
    times = _times(checkpoints)
    runs: list[Line] = []
    for name, path in zip(ids, checkpoints, strict=True):
        of_run = dict(zip(("run", "at"), times[path], strict=True)) if path in times else {}
        runs.append((name, {"path": str(path), **of_run} if of_run else str(path), ""))
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
