"""Guess the network of checkpoints and what prepared its images, from Python files never run."""

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Words of the line, and what is printed of it.
_FUNCTION = "file.py:function of yours that returns the network, weights unset"
_NAMED = f"a name of timm's or torchvision's such as resnet18, or {_FUNCTION}"
_FILE = "nets.py:net"
# What functions that prepare images are called, and what those are called that do other things.
_PREPARES = re.compile(
    r"(?:^|_)(?:transforms?|preprocess(?:ing)?|prepared?|to_tensor)(?:$|_)", re.I
)
_IS_OTHER = re.compile(
    r"train|augment|data|label|target|text|batch|model|path|file|get|build|make|create|inv|un_?norm"
    r"|denorm|display|show|plot|vis",
    re.I,
)
# What draws anew, by a part of its name, and the transforms that don't.
_DRAWS = re.compile(
    r"rand|shuffle|augment|jitter|blur|erasing|elastic|mix|cutout|flip|noise|dropout|uniform|choice",
    re.I,
)
_COMPOSED = {"Compose", "Sequential"}
_STILL = {
    *("Resize", "CenterCrop", "ToTensor", "PILToTensor", "ToImage", "ToDtype", "ConvertImageDtype"),
    *("Normalize", "Grayscale", "Pad"),
}
# A line of the config: key, value, and a comment that may be empty.
Line = tuple[str, Any, str]


def named_network(networks: set[str | None], report: list[str]) -> Line | None:
    """Return the network that all checkpoints are of, by timm's names for them, if they say it."""
    name = next(iter(networks)) if len(networks) == 1 else None
    if name is None:
        return None
    report.append(f"chose: timm/{name} as the network: its config.json names it")
    return "model", f"timm/{name}", ""


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
    misfits: list[tuple[str, str]] = []
    for file in code:
        try:
            tree = ast.parse(file.read_bytes())
            networks = _networks_in(tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
            continue
        runs = any(isinstance(node, ast.For | ast.While | ast.With) for node in tree.body)
        is_part = any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))
        for node in networks:
            needed, by_place = _arguments(node, networks)
            moved = f"{node.name} of {file}, moved into a file"
            if runs:
                misfits.append((_FILE, f"{moved} that runs nothing when imported"))
            elif is_part:
                misfits.append((_FILE, f"{moved} without relative imports"))
            elif _takes_classes(needed, by_place) if of_images else not needed:
                fitting[f"{file}:{node.name}"] = _names_in(node)
            else:
                values = ", ".join(f"{name}=..." for name in needed)
                written = f"def net({'n_classes' if of_images else ''}): return {node.name}"
                advice = f"a function that you add to {file}, such as `{written}({values})`"
                misfits.append((f"{file}:net", advice))
    # What another one is built of is a part of it.
    parts = {n for key, names in fitting.items() for n in names - {key.rpartition(":")[2]}}
    whole = [key for key in fitting if key.rpartition(":")[2] not in parts]
    if whole:
        others = f"{', '.join(whole[1:])} could be it too" if whole[1:] else ""
        report.append(f"chose: {whole[0]} as the network{others and '; ' + others}")
        return "model", whole[0], others
    place, advice = misfits[-1] if misfits else (_FILE, _NAMED if of_images else _FUNCTION)
    report.append(f"could not tell: what network the checkpoints are of. Give as `model` {advice}")
    return "model", place, f"a placeholder: give {advice}"


def own_transform(code: Iterable[Path], report: list[str]) -> Line:
    """Return the function of Python files that prepares images, which are parsed and not run.

    It is called as such functions are, takes one argument, and names nothing that draws; several,
    or one in a file that runs much when imported, are told of and not taken. Before the first job
    a run reads samples several times, and refuses those that differ.
    """
    fitting, misfits = list[str](), list[str]()
    for file in code:
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
            continue
        runs = any(isinstance(node, ast.For | ast.While | ast.With) for node in tree.body)
        is_part = any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))
        bound = _bound(tree.body)
        for name, value in bound.items():
            if _prepares_images(name, value, bound):
                (misfits if runs or is_part else fitting).append(f"{file}:{name}")
    if len(fitting) == 1 and not misfits:
        report.append(f"chose: {fitting[0]} as what prepares images: see that evaluation did so")
        return "transform", fitting[0], "null takes RGB from 0 to 1 in the images' own size"
    said = "A function says otherwise: study_arguments, transform: prepared.py:prepared"
    if fitting:
        maybe = " or ".join([*fitting, *misfits])
        said = f"It may be {maybe}: name the one of evaluation as `transform`"
    elif misfits:
        maybe = " or ".join(misfits)
        said = f"It may be {maybe}, in a file that runs nothing and has no relative imports"
    report.append(
        "could not tell: how training prepared images; took RGB from 0 to 1 in their own size. "
        + said
    )
    return "transform", None, "file.py:function that makes a tensor of a PIL image in RGB"


def _bound(body: Iterable[ast.stmt]) -> dict[str, ast.AST]:
    """Return what each name of a module stands for in the end, as far as its code says it."""
    bound: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            places = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {place.id: node.value for place in places if isinstance(place, ast.Name)}
        elif isinstance(node, ast.If | ast.Try):
            ways = [*node.body, *node.orelse, *getattr(node, "finalbody", [])]
            bound |= _bound(ways)
    return bound


def _prepares_images(name: str, value: ast.AST, bound: Mapping[str, ast.AST]) -> bool:
    """Return whether a function, or a composed transform, may prepare images and draws nothing."""
    if not _PREPARES.search(name) or _IS_OTHER.search(name):
        return False
    if isinstance(value, ast.Call):
        return _called(value) in _COMPOSED and _is_still(value, bound)
    if any(map(_DRAWS.search, _names_in(value))):
        return False
    if isinstance(value, ast.FunctionDef):
        needed, by_place = _arguments(value, [])
        ends = [part.value for part in ast.walk(value) if isinstance(part, ast.Return)]
        makes = any(isinstance(end, ast.Lambda) or _called(end) in _COMPOSED for end in ends)
        takes_one = bool(by_place) and needed in ([], by_place[:1])
        return takes_one and not makes and not _IS_OTHER.search(by_place[0])
    return isinstance(value, ast.Lambda)


def _called(node: ast.AST | None) -> str | None:
    """Return the last part of the name that a call calls."""
    func = node.func if isinstance(node, ast.Call) else None
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", None)


def _is_still(value: ast.AST | None, bound: Mapping[str, ast.AST], depth: int = 8) -> bool:
    """Return whether a transform is made of such alone as draw nothing."""
    if depth == 0:  # a name that stands for itself
        return False
    if isinstance(value, ast.Name):
        return _is_still(bound.get(value.id), bound, depth - 1)
    if isinstance(value, ast.List | ast.Tuple):
        return all(_is_still(part, bound, depth - 1) for part in value.elts)
    if not isinstance(value, ast.Call) or _called(value) not in _COMPOSED:
        return _called(value) in _STILL
    parts = [*value.args, *(keyword.value for keyword in value.keywords)]
    return all(_is_still(part, bound, depth - 1) for part in parts)


def _takes_classes(needed: Sequence[str], by_place: Sequence[str]) -> bool:
    """Return whether a network needs no argument but a first one, which is a number of classes."""
    is_count = bool(by_place) and re.search(r"class|label|^(n_|num_)?out", by_place[0]) is not None
    return is_count and set(needed) <= {by_place[0]}
