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
from trak_core.reached import reached, reflects

# Where trak_core lies: a checkout, or the folder of all installed packages.
_ROOT = Path(__file__).parents[1]
_PACKAGE = "trak_core"
# What code reads beside its modules: templates and styles of the report.
_BESIDE = (".j2", ".css")
_DESCRIBED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_Name = tuple[str, ...]


def _module_file(root: Path, name: _Name) -> Path | None:
    stem = root.joinpath(*name)
    # Not with_suffix: a study's own name may hold a dot.
    files = (stem.with_name(f"{stem.name}.py"), stem / "__init__.py") if name else ()
    return next((path for path in files if path.is_file()), None)


@cache
def _parsed(path: Path, mtime_ns: int) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        if isinstance(error, SyntaxError) and error.filename:
            raise
        # What Python makes of a null byte doesn't say where.
        raise SyntaxError(str(error), (str(path), 1, None, None)) from error
    except (RecursionError, MemoryError) as error:
        raise InputError(
            f"{path}: Python must be able to read the code. Found an expression that is nested "
            f"too deeply for it ({error}). Cut the longest one into parts."
        ) from error


@cache
def _read(
    path: Path, mtime_ns: int, called: frozenset[str] | None
) -> tuple[list[ast.Import | ast.ImportFrom], str]:
    """Return the import statements of a file, at any depth of it, and the text of what runs."""
    tree = _parsed(path, mtime_ns)
    return _what_runs(tree if called is None else reached(tree, called))


def _look(
    path: Path, called: frozenset[str] | None = None
) -> tuple[list[ast.Import | ast.ImportFrom], str]:
    """Read a file once: every rule asks for most of them."""
    return _read(path, path.stat().st_mtime_ns, called)


def _imported_names(
    path: Path, package: _Name, called: frozenset[str] | None = None
) -> Iterable[_Name]:
    """Yield every dotted name in the import statements of a file."""
    for node in _look(path, called)[0]:
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        else:
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = above + tuple((node.module or "").split(".") if node.module else ())
            yield base
            yield from ((*base, alias.name) for alias in node.names)


def _is_package(file: Path) -> bool:
    return file.name == "__init__.py"


def _closure(
    start: _Name, root: Path, package: str | None = None, called: frozenset[str] | None = None
) -> dict[_Name, Path]:
    """Map each module under ``root``, or in one ``package`` there, that runs to its file."""
    # With `called`, of `start` what is reached from these functions.
    found: dict[_Name, Path] = {}
    pending = [start[:depth] for depth in range(1, len(start) + 1)]
    while pending:
        name = pending.pop()
        if name in found or (package and name[:1] != (package,)):
            continue
        file = _module_file(root, name)
        if file is None:
            continue
        found[name] = file
        of = called if name == start else None
        for imported in _imported_names(file, name if _is_package(file) else name[:-1], of):
            # `import a.b.c` runs a and a.b as well.
            pending += [imported[:depth] for depth in range(1, len(imported) + 1)]
    return found


def _what_runs(tree: ast.Module) -> tuple[list[ast.Import | ast.ImportFrom], str]:
    """Find a tree's imports, and write as text what runs, not how it is laid out or described.

    A loop, since the tree of a sum is as deep as the sum has terms. Python versions differ in
    whether a tree holds empty fields, and in which characters they print.

    Returns:
        The import statements; and each node and list before its parts, with their number; without
        empty fields; in ASCII.
    """
    imports: list[ast.Import | ast.ImportFrom] = []
    parts: list[str] = []
    pending: list[Any] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.AST):
            held = 0
            described = (
                isinstance(node, _DESCRIBED) and ast.get_docstring(node, clean=False) is not None
            )
            for name in reversed(node._fields):
                value: Any = getattr(node, name, None)
                if described and name == "body":
                    value = value[1:]
                if value is not None and value != []:
                    held += 1
                    pending += (value, name)
            parts.append(f"{type(node).__name__} {held}")
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports.append(node)
        elif isinstance(node, list):
            parts.append(f"list {len(node)}")
            pending += reversed(node)
        else:
            parts.append(ascii(node))
    return imports, "\n".join(parts)


def _texts_beside(folder: Path) -> Iterable[Path]:
    """Yield the templates and styles of a package, but not those of packages within it."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not (path / "__init__.py").exists():
            yield from _texts_beside(path)
        elif path.suffix in _BESIDE:
            yield path


def _digest(
    files: Mapping[_Name, Path], start: _Name = (), called: frozenset[str] | None = None
) -> Any:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(files):
        of = called if name == start else None
        digest.update(f"{name} {_look(files[name], of)[1]}".encode())
    return digest


def code_digest(module: str) -> str:
    """Hash the source of ``module`` and of every ``trak_core`` module it reaches by import.

    Comments, layout and docstrings don't count, nor does the version of Python. Imports inside
    functions do, and so do templates (``.j2``) and styles (``.css``) in the folder of a package
    reached. Versions of other packages don't: they are in each artifact's ``provenance``.

    Args:
        module: Dotted name, e.g. ``"trak_core.stages.compute_features"``.

    Returns:
        16 hexadecimal digits.

    Raises:
        ModuleNotFoundError: If there is no such module.
    """
    name = tuple(module.split("."))
    files = _closure(name, _ROOT, _PACKAGE)
    if name not in files:
        raise ModuleNotFoundError(f"no module {module!r} under {_ROOT}")
    digest = _digest(files)
    for package in sorted(file.parent for file in files.values() if _is_package(file)):
        for path in _texts_beside(package):
            digest.update(f"{path.relative_to(_ROOT)} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def study_modules(study: Path) -> dict[_Name, Path]:
    """Find a study's Python file, and the modules beside it that it imports.

    Returns:
        Names of modules, and their files.

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
    return files


def study_imports(study: Path) -> list[str]:
    """Find what a study imports whenever it is loaded, and doesn't lie beside it.

    Nothing where the study may change what an import does: by variables of its environment, or by
    where modules are looked for.

    Returns:
        Dotted names, sorted.

    Raises:
        InputError: See ``study_modules``.
    """
    files = study_modules(study)
    words = ("'environ'", "'putenv'", "'sys'", "'site'")
    if any(word in _look(path)[1] for path in files.values() for word in words):
        return []
    found: set[str] = set()
    for path in files.values():
        for node in _parsed(path, path.stat().st_mtime_ns).body:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
    beside = {name[0] for name in files}
    return sorted(name for name in found if name.split(".")[0] not in beside)


def study_digest(
    study: Path, data_files: Mapping[str, str] | None = None, called: Iterable[str] | None = None
) -> str:
    """Hash a study's Python file, the modules beside it that it imports, and its data files.

    Same rules as ``code_digest``; installed packages don't count. With ``called``, functions and
    constants of the file that nothing leads to from these don't (``trak_core.reached``), nor
    do modules that only they import; but everything does where the file, or a module beside it, may
    reach what it never names (``globals``, ``sys.modules``, ...), or imports the file back.

    Args:
        study: Path of the study's Python file.
        data_files: Digests of the data files that the config names, by their paths.
        called: Names of the study's functions that a job calls; None for all.

    Returns:
        16 hexadecimal digits.

    Raises:
        InputError: If there is no such file, or if its name doesn't end with ``.py``.
    """
    files, start, of = study_modules(study), (study.stem,), None
    if called is not None:
        others = [path for name, path in files.items() if name != start]
        back = any(
            name[:1] == start
            for own, path in files.items()
            for name in _imported_names(path, own if _is_package(path) else own[:-1])
        )
        if not back and not any(reflects(_parsed(p, p.stat().st_mtime_ns)) for p in others):
            of = frozenset(called)
            files = _closure(start, study.parent, called=of)
    digest = _digest(files, start, of)
    for path, content in sorted((data_files or {}).items()):
        digest.update(f"{path} {content}\n".encode())
    return digest.hexdigest()


def content_digest(*parts: Any) -> str:
    """Hash plain values by their JSON: 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


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
