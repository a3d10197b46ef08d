"""Generate the Python file that calls a study's functions with the config's ``study_arguments``."""

import ast
import glob
import hashlib
import json
import os
import re
import symtable
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trak_core.data.row_files import read_rows
from trak_core.dependency_digests import study_modules
from trak_core.errors import InputError
from trak_core.runtime.files import atomic_write, unwritable_error
from trak_core.settings import ADAPTER_CONFIG

_TEXT = '''\
"""The ready-made study `{name}` with the config's `study_arguments`, written by each run.

To change it, copy this file, edit the copy, and set `study` to its path.
"""

from trak_core.ready_made.{name} import {name}

study = {name}({arguments})
{functions}
'''
_OWN = '''\
"""The study `{path}` with the config's `study_arguments`, written by each run."""

from functools import partial
from pathlib import Path

from trak_core.study.study import Study

own = Study.load(Path({path!r})).module
{functions}
'''


@dataclass(frozen=True, slots=True)
class _ReadyMade:
    """The properties of a ready-made study that affect how its config is read."""

    model_output: str | None  # the default model output; None if the config must specify one
    files: tuple[str, ...]  # the names of the arguments that are paths of data files
    takes_weights: bool = False  # whether `weights` is the folder from which the model is built
    names_images: bool = False  # whether the data files can be tables with paths of images


BASE_WEIGHTS = "model*.safetensors", "pytorch_model*.bin"
READY_MADE = {
    "language_model": _ReadyMade("language_modelling", ("texts", "targets"), takes_weights=True),
    "text_classification": _ReadyMade(
        "text_classification", ("texts", "targets"), takes_weights=True
    ),
    "image_folder": _ReadyMade("image_classification", ("images", "targets"), names_images=True),
    "tabular": _ReadyMade(None, ("table", "targets")),
}
# Maps the annotation of a ready-made study's parameter to the type that the argument must have, and
# to the words for this type in error messages.
_TYPES = {
    "str": (str, "a text, in quotes"),
    "int": (int, "an integer"),
    "Sequence[str]": (list, "a list"),
    "Sequence[Any]": (list, "a list"),
}
# The characters that the config's schema allows in `results`.
_FOLDER = re.compile(r"[A-Za-z0-9._/-]+")
_STUDIES = Path(__file__).parents[1] / "ready_made"
_FUNCTIONS = (
    *("make_model", "train_data", "target_data", "train_ids", "target_ids", "encode", "describe"),
    *("train_columns", "target_columns", "class_names", "as_read"),
)

# The pipeline itself passes these arguments to a study's functions, so `study_arguments` cannot set
# them: the given number of positional arguments, and the keyword arguments with the given names.
_N_POSITIONAL = {"draw": 2, "describe": 1, "as_read": 1, "token_texts": 1}
_KEYWORDS = {"train": ("seed", "data")}
# The pipeline calls these functions without arguments. `study_arguments` must therefore contain a
# value for each of their parameters that has no default.
_CALLED_WITHOUT_ARGUMENTS = set(_FUNCTIONS) - {"encode", "describe", "as_read"}


def with_ready_study(config: Mapping[str, Any], *, writes: bool = True) -> dict[str, Any]:
    """Return a config whose ``study`` is a generated file that passes on ``study_arguments``.

    The generated file creates a ready-made study with these arguments or, for a user's Python file,
    passes each argument to every function that has a parameter of the same name. It is written to
    the results folder, unless ``writes`` is false. The files that the study reads are added to
    ``data_files``. For a ready-made study, ``model_output`` and ``weights`` get their defaults. A
    Python file without ``study_arguments`` is used as it is.
    """
    name, arguments = config.get("study"), config.get("study_arguments")
    if not isinstance(name, str) or (name.endswith(".py") and not isinstance(arguments, Mapping)):
        return dict(config)  # No file is needed, or the schema will refuse the value.
    if (name not in READY_MADE and not name.endswith(".py")) or not isinstance(arguments, Mapping):
        raise InputError(
            "study must be a Python file, or the name of a ready-made study "
            f"({', '.join(READY_MADE)}). With a ready-made study, study_arguments must be a "
            f"mapping. Found study {name} and study_arguments {arguments!r}.",
            code="config.study",
        )
    arguments = {key: value for key, value in arguments.items() if value is not None}
    results, listed = config.get("results", "results"), config.get("data_files", [])
    if not (isinstance(results, str) and _FOLDER.fullmatch(results) and isinstance(listed, list)):
        return dict(config)  # The schema will refuse the values.
    default = {}
    if name.endswith(".py"):
        read = [str(path) for path in study_modules(Path(name)).values()]
        text = _own_source(Path(name), arguments)
    else:
        about = READY_MADE[name]
        default = {} if about.model_output is None else {"model_output": about.model_output}
        _check_arguments(name, arguments, about)
        if about.names_images:
            _refuse_results_in(arguments, results)
        if about.takes_weights and "weights" not in arguments:
            arguments["weights"] = first_checkpoint(config.get("checkpoints"))
        functions = [*_FUNCTIONS, *["token_texts"] * about.takes_weights]
        text = _TEXT.format(
            name=name,
            arguments=", ".join(f"{key}={value!r}" for key, value in arguments.items()),
            functions="\n".join(f"{function} = study.{function}" for function in functions),
        )
        read = [str(arguments[key]) for key in about.files if arguments.get(key)]
        if about.names_images:
            read += [pattern for table in read for pattern in _images_of(Path(table))]
        if about.takes_weights:
            read += _model_files(Path(arguments["weights"]))
        for argument in arguments.values():
            read += _code_of(argument)
    file = _written(Path(name).stem, text, results, writes=writes)
    files = [*listed, *(file for file in dict.fromkeys(read) if file not in listed)]
    return {**default, **config, "study": file, "data_files": files}


def builder_of(config: Mapping[str, Any]) -> str:
    """Return the words by which error messages name the origin of the model.

    For a user's study, this is make_model(). Users of a ready-made study do not know its
    make_model(), so the words name the setting from which that function builds the model.
    """
    name = re.sub(r"_study_[0-9a-f]{8}\.py$", "", Path(str(config.get("study"))).name)
    if name not in READY_MADE:
        return "make_model()"
    arguments = config.get("study_arguments") or {}
    lines = (f"`{key}: {arguments[key]}`" for key in ("model", "weights") if arguments.get(key))
    return next((f"{line} in study_arguments" for line in lines), "the first of `checkpoints`")


def _own_source(study: Path, arguments: Mapping[str, Any]) -> str:
    """Return the code of a Python file that passes arguments to the functions of a user's study."""
    source: Any = study.read_bytes()  # symtable also accepts bytes, unlike its annotation.
    nodes = ast.parse(source, filename=str(study)).body
    defined = {node.name: node.args for node in nodes if isinstance(node, ast.FunctionDef)}
    table = symtable.symtable(source, str(study), "exec")
    bound = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    problems, taken, lines = [], set(), []
    for name in (*_FUNCTIONS, "train", "draw", "token_texts"):
        if name not in defined:
            # The parameters of a function that is imported or assigned are unknown here, so the
            # pipeline calls this function without `study_arguments`.
            lines += [f"{name} = own.{name}"] if name in bound else []
            continue
        function = defined[name]
        positional = [argument.arg for argument in (*function.posonlyargs, *function.args)]
        n_required = len(positional) - len(function.defaults)
        reserved = {*positional[: _N_POSITIONAL.get(name, 0)], *_KEYWORDS.get(name, ())}
        names = [*positional, *(argument.arg for argument in function.kwonlyargs)]
        names = [key for key in names if key not in reserved]
        taken |= {*names}
        passed = {key: value for key, value in arguments.items() if key in names}
        if name in _CALLED_WITHOUT_ARGUMENTS:
            keyword_only = zip(function.kwonlyargs, function.kw_defaults, strict=True)
            needed = [argument.arg for argument, default in keyword_only if default is None]
            missing = [key for key in [*positional[:n_required], *needed] if key not in passed]
            problems += [f"no {key}, which {name}() needs" for key in missing]
        keywords = "".join(f", {key}={value!r}" for key, value in passed.items())
        value = f"partial(own.{name}{keywords})" if passed else f"own.{name}"
        lines.append(f"{name} = {value}")
    problems += [f"unknown key {key}" for key in arguments if key not in taken]
    problems += [f"{key}: {value}" for key, value in arguments.items() if not _is_plain(value)]
    if problems:
        raise InputError(
            f"study_arguments must map parameters of the functions in {study} to text, numbers, "
            "true or false, lists or mappings. The parameters are: "
            f"{', '.join(sorted(taken)) or 'none'}. Found {'; '.join(problems)}.",
            code="config.study_keywords",
        )
    return _OWN.format(path=str(study), functions="\n".join(lines))


def _check_arguments(name: str, arguments: Mapping[str, Any], about: _ReadyMade) -> None:
    """Raise an error if arguments of a ready-made study are invalid or name missing files."""
    nodes = ast.parse((_STUDIES / f"{name}.py").read_text()).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    signature = next(function.args for function in functions if function.name == name)
    types = {each.arg: ast.unparse(each.annotation or ast.Name("Any")) for each in signature.args}
    required = list(types)[: len(types) - len(signature.defaults)]
    if about.takes_weights:
        required.remove("weights")  # The default is the first checkpoint.
    problems = [f"unknown key {key}" for key in arguments if key not in types]
    problems += [f"no {key}" for key in required if key not in arguments]
    for key, value in arguments.items():
        annotation = types.get(key, "").removesuffix(" | None")
        kind, words = _TYPES.get(annotation, (type(value), ""))
        if type(value) is not kind:
            problems.append(f"{key}: {value} (it must be {words})")
        elif not _is_plain(value):
            problems.append(f"{key}: {value}")
    if problems:
        raise InputError(
            f"study_arguments must map parameters of {name} to text, numbers, true or false, lists "
            f"or mappings. The parameters are: {', '.join(types)}. Required: "
            f"{', '.join(required)}. Found {'; '.join(problems)}.",
            code="config.study_arguments",
        )
    for key in about.files:
        path = Path(str(arguments[key])) if key in arguments else None
        if path and not (path.is_file() or any(files for _, _, files in os.walk(path))):
            missing = "no file in" if path.is_dir() else "nothing at"
            raise InputError(
                f"study_arguments: {key} must be an existing file or a folder with files. Found "
                f"{missing} {path} (relative to {Path.cwd()}).",
                code="config.study_arguments",
            )


def _refuse_results_in(arguments: Mapping[str, Any], results: str) -> None:
    for key in ("images", "targets"):
        folder = Path(str(arguments.get(key)))
        if folder.is_dir() and Path(results).resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"study_arguments: the folder of {key} must not contain the results folder. "
                "Otherwise, the pipeline would read pictures among the results as images of "
                f"another class. Found {results} in {folder}. Move the images, or set `results` to "
                "another folder.",
                code="config.results_in_images",
            )


def _is_plain(value: Any) -> bool:
    """Return whether a value can be written as a Python literal. Dates and infinity cannot."""
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False


def _images_of(table: Path) -> list[str]:
    """Return glob patterns that match the images whose paths are in a table's column ``path``."""
    if not table.is_file():
        return []  # All files in a folder of images are already data files.
    try:
        images = [table.parent / row["path"] for row in read_rows(table)]
    except (InputError, KeyError, TypeError):
        return []  # The study will raise an error for an invalid table.
    return [f"{glob.escape(str(path.parent))}/*{path.suffix}" for path in images]


def _model_files(weights: Path) -> list[str]:
    """Return the configuration and tokenizer files of a model that transformers saved.

    For a LoRA adapter, the weights of its base model are included if this is a folder, because
    checkpoints of the adapter do not contain them.
    """
    folders = [weights, *sorted(weights.glob("checkpoint-*"))]
    folders += [weights.parent] if (weights.parent / "tokenizer_config.json").is_file() else []
    patterns = ("*token*", "config.json", "vocab*", "merges.txt", "*.jinja", ADAPTER_CONFIG)
    paths = {path for folder in folders for pattern in patterns for path in folder.glob(pattern)}
    files = {path for path in paths if path.is_file() and path.suffix != ".bin"}
    for adapter in [path for path in files if path.name == ADAPTER_CONFIG]:
        # A damaged file is refused when the study reads it.
        with suppress(ValueError, AttributeError):
            base = str(json.loads(adapter.read_text()).get("base_model_name_or_path"))
            folders = filter(Path.is_dir, (adapter.parent / base, Path(base)))
            for folder in [*folders][:1]:
                files.update(path for kind in BASE_WEIGHTS for path in folder.glob(kind))
    return [str(path) for path in sorted(files)]


def _code_of(argument: Any) -> list[str]:
    """Return the file in an argument such as ``file.py:function``, and its local imports."""
    file = Path(argument.rpartition(":")[0]) if isinstance(argument, str) else Path()
    if file.suffix != ".py" or not file.is_file():
        return []
    return [str(path) for path in study_modules(file).values()]


def _written(name: str, text: str, results: str, *, writes: bool) -> str:
    """Return the path of a generated study file, and write the file if ``writes`` is true."""
    # The name contains a digest of the text, so that several configs can use one results folder.
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    file = Path(results, f"{name}_study_{digest}.py")
    if writes and not (file.is_file() and file.read_text() == text):
        try:
            with atomic_write(file) as part:
                part.write_text(text)
        except OSError as error:
            raise unwritable_error(file.parent, file, error) from error
    return str(file)


def first_checkpoint(checkpoints: Any) -> str:
    """Return the path of a config's first checkpoint, which is the default of ``weights``."""
    first = next(iter(checkpoints.values()), None) if isinstance(checkpoints, Mapping) else None
    path = first.get("path") if isinstance(first, Mapping) else first
    if not isinstance(path, str):
        raise InputError(
            "study_arguments must contain `weights`, the folder from which the model is built. "
            "If `checkpoints` maps ids to paths, `weights` defaults to the first path. `weights` "
            f"is missing, and `checkpoints` is {json.dumps(checkpoints)}.",
            code="config.weights",
        )
    return path
