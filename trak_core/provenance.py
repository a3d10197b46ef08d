"""Which source and which files a job depends on, as short strings that Snakemake can compare.

Standard library only: every start of Snakemake calls this.
"""

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trak_core.errors import InputError

_REPOSITORY = Path(__file__).parents[1]
_Name = tuple[str, ...]


def _module_file(root: Path, name: _Name) -> Path | None:
    stem = root.joinpath(*name)
    # Not with_suffix: a study's own name may hold a dot.
    files = (stem.with_name(f"{stem.name}.py"), stem / "__init__.py") if name else ()
    return next((path for path in files if path.is_file()), None)


@cache
def _read(path: Path, mtime_ns: int) -> tuple[list[ast.Import | ast.ImportFrom], str]:
    """Return the import statements of a file, at any depth of it, and the text of what runs."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        if isinstance(error, SyntaxError) and error.filename:
            raise
        # What Python makes of a null byte doesn't say where.
        raise SyntaxError(str(error), (str(path), 1, None, None)) from error
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return imports, repr(_without_docstrings(tree))


def _look(path: Path) -> tuple[list[ast.Import | ast.ImportFrom], str]:
    """Read a file once: every rule asks for most of them."""
    return _read(path, path.stat().st_mtime_ns)


def _imported_names(path: Path, package: _Name) -> Iterable[_Name]:
    """Yield every dotted name in the import statements of a file."""
    for node in _look(path)[0]:
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        else:
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = above + tuple((node.module or "").split(".") if node.module else ())
            yield base
            yield from ((*base, alias.name) for alias in node.names)


def _closure(start: _Name, root: Path) -> dict[_Name, Path]:
    """Map each module under ``root`` that importing ``start`` runs to its file."""
    reached: dict[_Name, Path] = {}
    pending = [start[:depth] for depth in range(1, len(start) + 1)]
    while pending:
        name = pending.pop()
        file = _module_file(root, name)
        if file is None or name in reached:
            continue
        reached[name] = file
        package = name if file.name == "__init__.py" else name[:-1]
        for imported in _imported_names(file, package):
            # `import a.b.c` runs a and a.b as well.
            pending += [imported[:depth] for depth in range(1, len(imported) + 1)]
    return reached


def _without_docstrings(node: ast.AST) -> Any:
    """Return the shape of a syntax tree: what runs, not how it is laid out or described.

    Empty fields are left out: Python versions differ in whether a tree holds them.
    """
    if isinstance(node, ast.AST):
        fields = dict(ast.iter_fields(node))
        body = fields.get("body")
        if isinstance(body, list) and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            described = ast.get_docstring(node, clean=False) is not None
            fields["body"] = body[1:] if described else body
        return (
            type(node).__name__,
            *((k, _without_docstrings(v)) for k, v in fields.items() if v not in (None, [])),
        )
    if isinstance(node, list):
        return [_without_docstrings(item) for item in node]
    return repr(node)


def _digest(files: dict[_Name, Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(files):
        digest.update(f"{name} {_look(files[name])[1]}".encode())
    return digest.hexdigest()


def code_digest(module: str) -> str:
    """Hash the source of ``module`` and of every ``trak_core`` module it reaches by import.

    Comments, layout and docstrings don't count, nor does the version of Python. Imports inside
    functions do. Versions of other packages don't: they are in each artifact's ``provenance``.

    Args:
        module: Dotted name, e.g. ``"trak_core.stages.compute_features"``.

    Returns:
        16 hexadecimal digits.

    Raises:
        ModuleNotFoundError: If there is no such module.
    """
    name = tuple(module.split("."))
    files = _closure(name, _REPOSITORY)
    if name not in files:
        raise ModuleNotFoundError(f"no module {module!r} under {_REPOSITORY}")
    return _digest(files)


def study_digest(study: Path) -> str:
    """Hash a study's Python file and the modules beside it that it imports.

    Same rules as ``code_digest``; installed packages don't count.

    Args:
        study: Path of the study's Python file.

    Returns:
        16 hexadecimal digits.

    Raises:
        InputError: If there is no such file, or if its name doesn't end with ``.py``.
    """
    name = (study.stem,)
    files = _closure(name, study.parent)
    if files.get(name) != study:
        found = "a file of another kind" if study.is_file() else "nothing there"
        raise InputError(
            f"{study}: the study's Python file must exist, with a name that ends with .py; paths "
            f"are relative to the folder that Snakemake runs in. Found {found}."
        )
    return _digest(files)


def ids_digest(ids: Sequence[int | str]) -> str:
    """Hash ids by their text, in order: 32 hexadecimal digits for any number of them."""
    text = json.dumps([str(i) for i in ids])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def parameters_digest(shapes: Mapping[str, Sequence[int]]) -> str:
    """Hash the names and shapes of parameters, in order: 32 hexadecimal digits."""
    text = "\n".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def stat_signature(path: Path) -> str:
    """Return a string that changes when a file, or any file of a folder, is replaced.

    Made of sizes and modification times, so it also notices an older file put in place of a newer
    one, and never reads a byte of a large checkpoint.

    Args:
        path: A file or a folder.

    Returns:
        16 hexadecimal digits.
    """
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    text = "\n".join(
        f"{file.relative_to(path)} {(stat := file.stat()).st_size} {stat.st_mtime_ns}"
        for file in files
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
