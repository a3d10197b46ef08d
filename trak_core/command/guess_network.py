"""Guess the network of checkpoints and what prepared its images, from Python files never run."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trak_core.errors import listed

_FUNCTION = "file.py:function of yours that returns the network, weights unset"
_NAMED = f"a name of timm's or torchvision's such as resnet18, or {_FUNCTION}"
# What functions that prepare images are called; those of training draw.
_PREPARES = re.compile(r"^(?!.*(train|augm))(.*_)?(transforms?|preprocess|prepared?)(_|$)", re.I)
# A line of the config: key, value, and a comment that may be empty.
Line = tuple[str, Any, str]


_Defined = ast.ClassDef | ast.FunctionDef


def _names_in(node: ast.AST) -> set[str]:
    """Return the last parts of all names in some code, such as ``Module`` of ``nn.Module``."""
    named = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return named | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def _networks_in(tree: ast.Module) -> list[_Defined]:
    """Return a file's classes of modules, and the functions that return one, unread by Python."""
    modules, definitions = {"Module", "Sequential"}, list[_Defined]()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            is_network = any(not modules.isdisjoint(_names_in(base)) for base in node.bases)
        elif isinstance(node, ast.FunctionDef):
            ends = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
            calls = [end.func for end in ends if isinstance(end, ast.Call)]
            said = [*calls, *([node.returns] if node.returns else [])]
            is_network = any(not modules.isdisjoint(_names_in(part)) for part in said)
        else:
            continue
        if is_network:
            definitions.append(node)
            modules.add(node.name)
    return definitions


def _arguments(node: _Defined, among: Sequence[_Defined]) -> tuple[list[str], list[str]]:
    """Return what a class or a function must get, and what it may get by place."""
    if isinstance(node, ast.FunctionDef):
        given, is_method = node.args, False
    else:
        own = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        if "__init__" not in own:
            bases = {name for base in node.bases for name in _names_in(base)}
            earlier = among[: among.index(node)]  # or a class of its base's name would be its own
            parent = next((d for d in reversed(earlier) if d.name in bases), None)
            return _arguments(parent, earlier) if parent else ([], [])
        given, is_method = own["__init__"].args, True
    by_place = [argument.arg for argument in (*given.posonlyargs, *given.args)][is_method:]
    by_name = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    needed = by_place[: len(by_place) - len(given.defaults)]
    needed += [argument.arg for argument, default in by_name if default is None]
    return needed, by_place


def own_network(code: Iterable[Path], report: list[str], *, of_images: bool) -> Line:
    """Return the network that Python files define, which are parsed and not run.

    One of images gets the number of classes, one of a table nothing. Where none can be built so,
    the line is a placeholder, with what to do about the last one: parts stand before the whole.
    """
    fitting: dict[str, set[str]] = {}
    place, advice = "nets.py:net", _NAMED if of_images else _FUNCTION
    for file, tree in _parsed(code):
        networks = _networks_in(tree)
        for node in networks:
            needed, by_place = _arguments(node, networks)
            if _takes_classes(needed, by_place) if of_images else not needed:
                fitting[f"{file}:{node.name}"] = _names_in(node)
            else:
                values = ", ".join(f"{name}=..." for name in needed)
                place = f"{file}:net"
                written = f"def net({'n_classes' if of_images else ''}): return {node.name}"
                advice = f"a function that you add to {file}, such as `{written}({values})`"
    # What another one is built of is a part of it.
    parts = {n for key, names in fitting.items() for n in names - {key.rpartition(":")[2]}}
    whole = [key for key in fitting if key.rpartition(":")[2] not in parts]
    if whole:
        others = f"{', '.join(whole[1:])} could be it too" if whole[1:] else ""
        report.append(f"chose: {whole[0]} as the network{others and '; ' + others}")
        return "model", whole[0], others
    report.append(f"could not tell: what network the checkpoints are of. Give as `model` {advice}")
    return "model", place, f"a placeholder: give {advice}"


def own_transform(code: Iterable[Path], report: list[str]) -> Line:
    """Return the line of what prepares images: none, with what Python files call so to choose from.

    What a function does to an image is not guessed.
    """
    maybe: list[str] = []
    for file, tree in _parsed(code):
        for node in tree.body:
            places = node.targets if isinstance(node, ast.Assign) else []
            names = [place.id for place in places if isinstance(place, ast.Name)]
            names += [node.name] if isinstance(node, ast.FunctionDef) else []
            maybe += [f"{file}:{name}" for name in names if _PREPARES.search(name)]
    named = f"maybe {listed(maybe)}" if maybe else "such as prepared.py:prepared"
    report.append(
        "could not tell: how training prepared images; took RGB from 0 to 1 in their own size. "
        f"Give as `transform` a function that does what evaluation did, {named}"
    )
    comment = f"file.py:function that makes a tensor of a PIL image in RGB, {named}"
    return "transform", None, comment


def _parsed(code: Iterable[Path]) -> Iterator[tuple[Path, ast.Module]]:
    """Yield Python files with what the parser makes of them, if it can."""
    for file in code:
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError, OSError):
            yield file, ast.parse(file.read_bytes())


def _takes_classes(needed: Sequence[str], by_place: Sequence[str]) -> bool:
    """Return whether a network needs no argument but a first one, which is a number of classes."""
    is_count = bool(by_place) and re.search(r"class|label|^(n_|num_)?out", by_place[0]) is not None
    return is_count and set(needed) <= {by_place[0]}
