"""Write the config of a ready-made study for a folder that contains weights and data.

Files do not determine all settings. Next to each setting that is only assumed, the config has a
comment that tells the user what to check. The comments are also printed.
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from os.path import commonpath
from pathlib import Path
from shlex import quote
from typing import Any

from trak_core.config.checkpoint_list import folder_names, grouped, times_of, trainer_checkpoints
from trak_core.config.read_config import ALL_TARGETS
from trak_core.data.row_files import (
    LINES,
    LIST,
    SUFFIXES,
    TABLES,
    as_number,
    is_saved_dataset,
    read_rows,
)
from trak_core.errors import InputError, listed
from trak_core.settings import ADAPTER_CONFIG
from trak_core.study.load_checkpoint import read_weights
from trak_core.study.match_state_dict import shared_prefixes

_STATE_DICT = re.compile(r"\.(?:pt|pth|ckpt|bin|safetensors)(?:\.tar)?$", re.I)
_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"})
_MODEL = "config.json"
_EXPLAINED = re.compile(
    r"asked|dev|eval(uation)?|h[eo]ld(out)?|new|questions|targets|test|unseen|val(id\w*)?"
)
_CODE = re.compile(r"0[0-9]+")  # A number with leading zeros is an id or a code.
_LABELS = ("label", "labels", "target", "class", "outcome", "y")
# The names that a column of row numbers can have if pandas wrote the table.
_ROW_NUMBERS = ("", "Unnamed: 0")
# Names of the fields for a prompt and its completion, in rows without a field `text`.
_PAIRS = (
    *(("prompt", "completion"), ("prompt", "response"), ("question", "answer")),
    *(("instruction", "output"), ("instruction", "response"), ("input", "output")),
)
_DEPTH = 4  # Search four levels of subfolders, as in a Trainer's runs/first/out/checkpoint-5.
# The number of targets that a config selects. If targets have classes, it selects all of up to
# _MOST_LABELLED targets, because a list of suspects needs hundreds of targets.
_N_TARGETS, _MOST_LABELLED = 3, 2000
_NEEDED = (
    "weights in Hugging Face format (config.json or adapter_config.json, possibly in "
    "checkpoint-<step>) and texts, or PyTorch checkpoints and a table or a folder of images for "
    f"each class. Rows are in {', '.join(SUFFIXES)} or a saved Dataset"
)

# A line of the config: the key, the value, and a comment for the user on what to check, or "".
Line = tuple[str, Any, str]
# With at most this many training texts, features with 4,096 dimensions need little time and disk
# space, and scores are more accurate than with the default of 1,024 dimensions
# (docs/explanation/projections.md).
_FEW_TEXTS = 10_000
# Comments in the config that tell the user what to check or to write.
_TEMPLATE = 'if training added text, such as an end token, add a template: text: "{text}</s>"'
_ALL_TEXT = "include all text that training added, such as a template or an end token"
_PAIR = f"{_ALL_TEXT}, and any text between the prompt and this field, such as a space"
_NETWORK = "a placeholder: give file.py:function, your function that returns the network"
_IMAGE_NET = f"{_NETWORK} for a number of classes, or the name of a timm or torchvision model"
_TRANSFORM = (
    "null means RGB from 0 to 1 in the images' original size; otherwise give file.py:function, "
    "which converts a PIL image in RGB to a tensor as at test time"
)
_SCALE = "null means unscaled columns; give standard if training scaled them with StandardScaler"
_RUNS = "files whose names differ only in an epoch or a step form one run, others are separate runs"
_SEVERAL = (
    "# Write several checkpoints of one run as {path: ..., run: a name, at: an epoch or step}."
)
_SUSPECTS = "# lists: [suspects]  # training samples whose label is likely wrong"
_OUTPUT = "regression for a number, image_classification for a class"


def init(words: Sequence[str]) -> None:
    """Run ``trak init``: write a config, and print which files it uses and what to check.

    Raises:
        InputError: If the config already exists, or if the folder does not contain a study's files.
    """
    parser = argparse.ArgumentParser("trak init", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", default=".", help="default: this folder")
    parser.add_argument(
        "--config", default="trak.yaml", help="the file to write; default %(default)s"
    )
    asked = parser.parse_args(words)
    folder, config = Path(asked.folder), Path(asked.config)
    if config.exists() or config.suffix not in {".yaml", ".yml"} or not config.parent.is_dir():
        raise InputError(
            "--config must be the name of a new file that ends in .yaml, in an existing folder. "
            f"Found {config}. Choose another name, or remove that file.",
            code="command.config_name",
        )
    if not folder.is_dir():
        message = f"`trak init` needs a folder. Found no folder at {folder.absolute()}."
        raise InputError(message, code="command.no_folder")
    text, report = config_for(folder)
    usual = "results-" + re.sub(r"[^A-Za-z0-9._-]+", "_", config.stem)
    names = (f"{usual}-{i}" if i > 1 else usual for i in count(1))
    results = next(name for name in names if not Path(name).exists())
    config.write_text(f"{text}results: {json.dumps(results)}\n", encoding="utf-8")
    print("\n".join([*report, f"wrote: {config}. Read it, then: trak run {quote(str(config))}"]))


def config_for(folder: Path) -> tuple[str, list[str]]:
    """Return the text of a config for a folder, and lines that report which files it uses.

    Subfolders are searched level by level until the files of a study are found.
    """
    inside = level = [folder]
    report: list[str] = []
    for _ in range(_DEPTH):
        level = [path for parent in level for path in sorted(parent.iterdir()) if _may_hold(path)]
        inside, report = inside + level, []
        if (text := _config_of(folder, inside, report)) is not None:
            return text, report
        level = [path for path in level if not _has_images(path) and not _weights_config(path)]
    searched = f" and {_DEPTH} levels of subfolders, {listed(inside[1:])}" if inside[1:] else ""
    findings = "; ".join(line.removeprefix("found: ") for line in report) or "none of them"
    raise InputError(
        f"{folder} must contain the files of a study: {_NEEDED}. Searched this folder{searched}. "
        f"Found {findings}. Add the missing files, or write your own study "
        "(docs/how-to/own-model.md).",
        code="command.no_study",
    )


def _config_of(folder: Path, inside: Sequence[Path], report: list[str]) -> str | None:
    """Return the text of a config for the folders ``inside``, or None if they contain no study."""
    # timm saves a state dict together with a config that contains the name of the network.
    saved = [path for path in inside if (path / "model.safetensors").is_file()]
    timm = {path: name for path in saved if (name := _json(path / _MODEL).get("architecture"))}
    weights = [path for path in inside if path not in timm and _weights_config(path)]
    images = [path for path in inside if path not in weights and _has_images(path)]
    # A folder of Hugging Face weights may contain the texts too, but no separate state dicts.
    plain = [path for path in inside if path not in weights]
    files = sorted({p for place in (folder, *plain) for p in place.iterdir() if p.is_file()})
    rows = [path for path in files if path.suffix in SUFFIXES and _may_be_rows(path)]
    rows += filter(is_saved_dataset, inside)
    states = [path for path in files if _STATE_DICT.search(path.name) and path.parent in plain]
    kinds = {"weights": weights, "folders of images": images, "rows": rows, "checkpoints": states}
    report += [f"found: {k}: {', '.join(map(str, paths))}" for k, paths in kinds.items() if paths]
    if weights and rows:
        bare = [path for path in weights if not [*path.glob("checkpoint-*")]]
        loads = _loadable(bare, report)
        weights = [path for path in weights if path in loads or path not in bare]
        return _text_config(weights, rows, report) if weights else None
    loads = _loadable(states, report) if images or rows else {}
    if not loads:
        return None
    # Checkpoints of the same network contain tensors with the same names and shapes. If there are
    # several networks, the config is for the one with the most checkpoints.
    networks = grouped(loads, loads.__getitem__)
    checkpoints = sorted(max(networks, key=len))
    for network in networks:
        if network[0] not in checkpoints:
            reason = f"another network than {checkpoints[0]}, which has more files or comes first"
            report.append(f"left out: {listed(network)}: {reason}")
    others = [path for path in loads if path not in checkpoints]
    images, rows = (_nearest_data(data, checkpoints, others, report) for data in (images, rows))
    if images:
        return _image_config(images, checkpoints, timm, report)
    return _table_config(rows, checkpoints, report)


def _loadable(checkpoints: Iterable[Path], report: list[str]) -> dict[Path, frozenset[Any]]:
    """Return the names and shapes of the tensors in each checkpoint that can be loaded.

    A prefix that all names share is removed. If a file cannot be loaded, the reason is added to
    ``report``.
    """
    loaded = {}
    for path in checkpoints:
        try:
            weights = read_weights(path)
        except InputError as error:
            report.append(f"left out: {error}")
            continue
        if weights.notice:
            report.append(f"found: {path}: {weights.notice}")
        prefix = shared_prefixes(weights.state)[-1]
        pairs = ((key.removeprefix(prefix), t.shape) for key, t in weights.state.items())
        loaded[path] = frozenset(pairs)
    return loaded


def _may_hold(path: Path) -> bool:
    """Return whether a path is a folder that can contain a study's files, and not results."""
    if not path.is_dir() or path.name.startswith((".", "__", "results", "checkpoint-")):
        return False
    return not any((path / name).exists() for name in ("pyvenv.cfg", "study.json"))


def _has_images(folder: Path) -> bool:
    """Return whether a folder has a subfolder of images for each of at least two classes."""
    classes = (path for path in folder.iterdir() if _may_hold(path))
    return sum(any(p.suffix.lower() in _IMAGES for p in path.iterdir()) for path in classes) > 1


def _weights_config(folder: Path) -> Path | None:
    """Return the config of the model in a folder or in its ``checkpoint-*`` folders, or None."""
    places = (folder, *sorted(folder.glob("checkpoint-*")))
    files = (place / name for place in places for name in (ADAPTER_CONFIG, _MODEL))
    return next((file for file in files if file.is_file()), None)


def _json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} must be JSON. {error}.", "command.weights_config") from error


def _refuse_here(paths: Sequence[Path], subject: str) -> None:
    """Raise an error if the current folder, which will contain results, is in one of the paths."""
    for path in (path.resolve() for path in paths):
        if Path.cwd().is_relative_to(path):
            raise InputError(
                f"{subject} must not be in the current folder, because results are written here. "
                f"Found them in {path}. Run this in the folder above: trak init {path.name}",
                code="command.results_here",
            )


def _split(paths: Sequence[Path], report: list[str]) -> tuple[Path, Path | None]:
    """Choose the training data and the data to explain by the names of the files or folders.

    If several paths can be the training data, the largest one is chosen.

    Returns:
        The path of the training data, and the path of the data to explain (or None).
    """
    words = {path: re.split(r"[^a-z]+", path.stem.lower()) for path in paths}
    trained = [path for path in paths if any(word.startswith("train") for word in words[path])]
    named = [path for path in paths if any(map(_EXPLAINED.fullmatch, words[path]))]
    explained = [path for path in named if path not in trained]
    others = trained or [path for path in paths if path not in explained]
    if not others:
        raise InputError(
            "The folder must contain training data. Judging by the names, it contains only data to "
            f"explain: {listed(explained)}. Add the training data, such as train.jsonl.",
            code="command.no_training_data",
        )
    train, target = max(others, key=_n_bytes), explained[0] if explained else None
    report.append(f"chose: {train} as training data, {target or 'samples of it'} to explain")
    if others[1:]:
        largest = f"the largest of {listed(others)}"
        report.append(f"check: {train} is assumed to be the training data, because it is {largest}")
    if unused := [path for path in paths if path not in {train, target}]:
        report.append(f"left out: {listed(unused)}: the names do not show what the data are for")
    return train, target


def _nearest_data(
    data: list[Path], chosen: Sequence[Path], others: Sequence[Path], report: list[str]
) -> list[Path]:
    """Return the paths in ``data`` that are at least as near to ``chosen`` as to ``others``.

    The more folders two paths have in common, the nearer they are. If all data are nearer to
    ``others``, all data are returned.
    """

    def shared(path: Path, weights: Sequence[Path]) -> int:
        return max((len(Path(commonpath([path, other])).parts) for other in weights), default=0)

    own = [path for path in data if shared(path, chosen) >= shared(path, others)]
    if own and (left := [path for path in data if path not in own]):
        report.append(f"left out: {listed(left)}: nearer to other weights than to {chosen[0]}")
    return own or data


def _may_be_rows(path: Path) -> bool:
    """Return whether a file may contain samples, judging by the beginning of a .json file.

    Samples are a list of objects that contain texts. Settings are not a list, and the objects in a
    log contain only numbers. Files with other endings are not checked.
    """
    if path.suffix != LIST:
        return True
    with suppress(OSError), path.open("rb") as file:
        begun = rb"(\xef\xbb\xbf)?\s*\[\s*\{[^}]*:\s*[\"\[]"
        return re.match(begun, file.read(10_000)) is not None
    return False


def _n_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def _text_config(weights: list[Path], rows: list[Path], report: list[str]) -> str:
    """Return the text of a config for a language model or a text classifier."""
    files = {path: file for path in weights if (file := _weights_config(path)) is not None}
    # If there are adapters, only they are used, as other weights are probably their base model.
    adapters = [path for path, file in files.items() if file.name == ADAPTER_CONFIG]
    configs = {path: _json(files[path]) for path in adapters or weights}
    first, about = next(iter(configs.items()))
    kind = str(about.get("task_type") if adapters else (about.get("architectures") or [None])[0])
    classifies = kind.endswith("ForSequenceClassification")
    if not classifies and not re.search(r"CausalLM|LMHead|CAUSAL_LM", kind):
        raise InputError(
            "The weights must belong to a causal language model or a text classifier. Found "
            f"{kind} in {first}. Write your own study (docs/how-to/own-model.md).",
            code="command.weights_kind",
        )
    # Checkpoints of the same model can differ in these keys.
    ignored = {"_name_or_path", "transformers_version", "peft_version"}
    models = {
        path: {key: value for key, value in about.items() if key not in ignored}
        for path, about in configs.items()
    }
    alike = [path for path in models if models[path] == models[first]]
    if other := [path for path in weights if path not in alike]:
        report.append(f"left out: {listed(other)}: another model than in {first}")
    _refuse_here([path for path in alike if not [*path.glob("checkpoint-*")]], "Weights")
    train, target = _split(_nearest_data(rows, alike, other, report), report)
    texts = read_rows(str(train))
    row = texts[0]
    is_text = "text" in row and not classifies
    arguments: list[Line] = [("texts", str(train), _TEMPLATE if is_text else "")]
    if classifies and not (first / _MODEL).is_file():
        last = max(first.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
        arguments.append(("weights", str(last), ""))
    arguments += _text_fields(row, classifies)
    if target is not None and target.suffix in {LINES, LIST, *(() if classifies else TABLES)}:
        asked = ("data", str(target), "")
    else:
        arguments.append(("targets", str(target or train), ""))
        asked = _targets(read_rows(str(target or train)).ids(), classifies)
    top: list[Line] = [("study", "text_classification" if classifies else "language_model", "")]
    if not classifies:
        top += [("projection", {"proj_dim": 4096}, "")] * (len(texts) <= _FEW_TEXTS)
        top += [("scoring", {"damping": 1}, "")]
    return _config_text(top, arguments, alike, asked, report)


def _text_fields(row: Mapping[str, Any], classifies: bool) -> list[Line]:
    """Return the config lines that name the fields of the prompt, the text and the label."""
    label, note = _label_of(row) if classifies else ("label", "")
    lines: list[Line] = [("label", label, note)] if label != "label" else []
    # Conversations need no field names, because the study applies the chat template.
    is_chat = "messages" in row or not isinstance(row.get("completion", ""), str)
    if "text" in row or (is_chat and not classifies):
        return lines
    texts = [name for name in row if isinstance(row[name], str) and name not in {"id", label}]
    pair = next((pair for pair in _PAIRS if set(pair) <= set(row) and not classifies), None)
    if pair:
        others = ", ".join(name for name in texts if name not in pair)
        note = f"{_PAIR}, and {others}, if training read it" if others else _PAIR
        lines += [("prompt", f"{{{pair[0]}}}", "")] if pair[0] != "prompt" else []
        return [*lines, ("text", f"{{{pair[1]}}}", note)]
    longest = max(texts or row, key=lambda name: len(str(row[name])))
    note = f"give a template of the rows' fields ({', '.join(row)}); this is the longest field"
    if len(texts) == 1:
        note = "" if classifies else _ALL_TEXT
    return [*lines, ("text", f"{{{longest}}}", note)]


def _label_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of the label's field, and a comment if the name had to be guessed."""
    names = [name for name in row if name not in {"id", *_ROW_NUMBERS}] or [*row]
    named = [name for label in _LABELS for name in names if name.strip().lower() == label]
    note = "" if named else "give the field of the label; this is the last field"
    return (*named, names[-1])[0], note


def _image_config(
    images: list[Path], checkpoints: list[Path], timm: Mapping[Path, str], report: list[str]
) -> str:
    """Return the text of a config for an image classifier.

    ``timm`` maps folders that timm saved to the names of their networks.
    """
    train, target = _split(images, report)
    explained = target or train
    _refuse_here([train, explained], "Images")
    inner = [path for path in sorted(explained.glob("*/**/*")) if path.suffix.lower() in _IMAGES]
    asked = _targets([path.relative_to(explained).as_posix() for path in inner], True)
    name, *others = {timm.get(path.parent) for path in checkpoints}
    is_known = name is not None and not others
    arguments: list[Line] = [
        ("images", str(train), ""),
        *([] if target is None else [("targets", str(target), "")]),
        ("model", f"timm/{name}", "") if is_known else ("model", "nets.py:net", _IMAGE_NET),
        ("transform", None, _TRANSFORM),
    ]
    return _config_text([("study", "image_folder", "")], arguments, checkpoints, asked, report)


def _table_config(rows: list[Path], checkpoints: list[Path], report: list[str]) -> str:
    """Return the text of a config for a network whose inputs are columns of a table."""
    train, target = _split(rows, report)
    trained = read_rows(str(train))
    label, note = _label_of(trained[0])
    ignored = {"id", *_ROW_NUMBERS} - {label}
    cells = {key: [row.get(key) for row in trained] for key in trained[0] if key not in ignored}
    # A column is numeric if at least half of its cells are numbers. The run will raise an error for
    # the other cells.
    numbers = {name: [as_number(value) for value in values] for name, values in cells.items()}
    texts = [name for name in cells if numbers[name].count(None) > len(trained) / 2]
    known = [number for number in numbers[label] if number is not None]
    is_class = label in texts or all(isinstance(number, int) for number in known)
    output = "image_classification" if is_class else "regression"
    arguments: list[Line] = [("table", str(train), "")]
    arguments += [] if target is None else [("targets", str(target), "")]
    arguments.append(("label", label, note))
    inputs = [name for name in cells if name not in {label, *texts}]
    codes = [name for name in inputs if any(_CODE.fullmatch(str(cell)) for cell in cells[name])]
    inputs = [name for name in inputs if name not in codes]
    if len(inputs) + 1 < len({*trained[0]} - {"id"}):
        order = "the model's inputs, in the model's order"
        if codes:
            order += f"; left out, because numbers with leading zeros are codes: {listed(codes)}"
        arguments.append(("columns", inputs, order))
    if label in texts:
        classes = sorted({str(value) for value in cells[label] if value})
        arguments.append(("classes", classes, "give them in the order of the logits"))
    arguments += [("model", "nets.py:net", _NETWORK), ("scale", None, _SCALE)]
    asked = _targets(read_rows(str(target or train)).ids(), is_class)
    top = [("study", "tabular", ""), ("model_output", output, _OUTPUT)]
    return _config_text(top, arguments, checkpoints, asked, report)


def _targets(ids: Sequence[Any], of_classes: bool) -> Line:
    """Return the config line that selects the targets to explain.

    It selects all targets if they have classes and there are at most 2,000, and otherwise the first
    few.
    """
    if of_classes and len(ids) <= _MOST_LABELLED:
        return "targets", ALL_TARGETS, ""
    return "targets", list(ids[:_N_TARGETS]), "ids of the samples to explain"


def _config_text(
    top: list[Line], arguments: list[Line], checkpoints: list[Path], asked: Line, report: list[str]
) -> str:
    """Return the text of a config, and add to ``report`` lines on what the user should check."""
    stems = [
        re.sub(r"[^A-Za-z0-9_]+", "_", _STATE_DICT.sub("", p.name) or "run") for p in checkpoints
    ]
    folders = folder_names(path.parent for path in checkpoints)
    longer = [f"{folders.get(p.parent)}_{s}" for p, s in zip(checkpoints, stems, strict=True)]
    numbered = [f"{stem}_{i}" for i, stem in enumerate(stems)]
    ids = next(ids for ids in (stems, longer, numbered) if len({*ids}) == len(ids))
    times = times_of(checkpoints)
    values = [{"path": str(p), **times[p]} if p in times else str(p) for p in checkpoints]
    steps = [[step for step, _ in trainer_checkpoints(path)] for path in checkpoints]
    saved = [
        f"checkpoints of one run, of the steps {listed(some)}" if some else "" for some in steps
    ]
    notes = zip(checkpoints, saved, strict=True)
    report += [f"found: {path}: {note}" for path, note in notes if note]
    runs: list[Line] = [*zip(ids, values, saved, strict=True)]
    report += [f"check: {key}: {note}" for key, _, note in [*top, *arguments] if note]
    report += [f"check: checkpoints: {_RUNS}"] * (len(checkpoints) > 1)
    return "\n".join([
        "# Written by `trak init`. docs/how-to/ready-made.md describes all arguments.",
        *_yaml_lines(top),
        *("study_arguments:", *_yaml_lines(arguments, "  ")),
        *[_SEVERAL] * (not any(saved)),
        *("checkpoints:", *_yaml_lines(runs, "  ")),
        *("experiments:", "  asked:", *_yaml_lines([asked], "    ")),
        *[_SUSPECTS] * (asked[1] == ALL_TARGETS),
        "",
    ])


def _yaml_lines(lines: Sequence[Line], indent: str = "") -> list[str]:
    return [
        f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}{note and '  # ' + note}"
        for key, value, note in lines
    ]
