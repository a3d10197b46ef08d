"""Digests of the source and the files that a job depends on, for Snakemake to compare.

Standard library only, because every start of Snakemake calls this.
"""

import ast
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from trak_core.errors import InputError

# Where trak_core lies: a checkout, or the folder of all installed packages.
_ROOT = Path(__file__).parents[1]
_PACKAGE = "trak_core"
# What code reads beside its modules: templates and styles of the report.
_BESIDE = (".j2", ".css")
_CODE = (".py", *_BESIDE)
_DESCRIBED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# With one of these words, code may reach what it never names.
_REFLECTS = {
    *("globals", "locals", "vars", "dir", "eval", "exec", "compile", "inspect", "sys", "gc"),
    *("import_module", "__import__", "__main__", "__dict__", "__getattr__", "__globals__"),
    *("f_globals", "f_locals", "__builtins__", "builtins", "runpy", "zipimport"),
    # Not importlib as such: to find a package, or its version, reaches no code.
    *("spec_from_file_location", "SourceFileLoader", "LazyLoader", "get_code", "entry_points"),
    *("module_from_spec", "load_module", "exec_module", "__loader__", "__spec__"),
    # Libraries that call what a file names.
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"),
    *("jsonpickle", "read_pickle", "weights_only", "allow_pickle", "hydra", "instantiate"),
    *("pydoc", "pkgutil", "locate", "resolve_name", "run_path"),
    # PyYAML's loaders that make objects. Its Loader is UnsafeLoader.
    *("Loader", "CLoader", "FullLoader", "CFullLoader", "UnsafeLoader", "CUnsafeLoader"),
    *("unsafe_load", "unsafe_load_all", "full_load", "full_load_all"),
}
# With one of these words, code may change what an import does: by variables, or by folders.
_CHANGES_IMPORTS = {"environ", "environb", "putenv", "unsetenv", "dotenv", "sys", "site"}
# What the types of arguments are made of, when they only name types.
_TYPE_NODES = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List),
    *(ast.BinOp, ast.BitOr, ast.Load),
)
_Name = tuple[str, ...]


class _Source(NamedTuple):
    """Code without its layout, comments and docstrings: ``text`` is what runs."""

    tree: ast.Module
    imports: list[ast.Import | ast.ImportFrom]  # at any depth
    words: set[str]  # of names and texts
    text: str


def _module_file(
    roots: Sequence[Path], name: _Name, known: dict[_Name, tuple[Path | None, Sequence[Path]]]
) -> Path | None:
    """Return the file that Python would import from folders, where the first counts most.

    ``known`` keeps what was looked for: the file of a name, and where what lies in it is.
    """
    if name not in known:
        above = _module_file(roots, name[:-1], known) if name[1:] else None
        within = known[name[:-1]][1] if name[1:] else roots
        known[name] = None, within
        # What a plain module has by a name is no module, unless the module says where to look.
        for root in within if above is None or _has_modules(above) else ():
            stem = root.joinpath(*name)
            # A package comes before a module. Not with_suffix: a name may hold a dot.
            files = (stem / "__init__.py", stem.with_name(f"{stem.name}.py"))
            file = next((path for path in files if path.is_file()), None)
            if file is not None:
                # A package is all in one place. A folder that is none may have parts in several.
                known[name] = file, [root]
                break
    return known[name][0]


@cache
def _read(path: Path, mtime_ns: int) -> _Source:
    try:
        return _source_of(ast.parse(path.read_bytes(), filename=str(path)))
    except (SyntaxError, ValueError) as error:
        if isinstance(error, SyntaxError) and error.filename:
            raise
        # Python's own message about a null byte doesn't say where.
        raise SyntaxError(str(error), (str(path), 1, None, None)) from error
    except (RecursionError, MemoryError) as error:
        raise InputError(
            f"{path}: Python must be able to read the code. Found an expression that is nested "
            f"too deeply for it ({error}). Cut the longest one into parts.",
            code="provenance.nesting",
        ) from error


def _source(path: Path) -> _Source:
    """Read a file once, because every rule depends on most of them."""
    return _read(path, path.stat().st_mtime_ns)


def _has_modules(path: Path) -> bool:
    """Return whether the module of a file may have others in it: a package, or one that says so."""
    return path.name == "__init__.py" or "__path__" in _source(path).words


def _imported_names(path: Path, name: _Name) -> Iterable[_Name]:
    """Return every dotted name in the import statements of a module's file, each once."""
    return _names_in(path, path.stat().st_mtime_ns, name)


@cache
def _names_in(path: Path, mtime_ns: int, name: _Name) -> tuple[_Name, ...]:
    names: dict[_Name, None] = {}
    for node in _read(path, mtime_ns).imports:
        if isinstance(node, ast.Import):
            names |= dict.fromkeys(tuple(alias.name.split(".")) for alias in node.names)
        else:
            base = _imported_from(path, name, node)
            names |= dict.fromkeys([base, *((*base, alias.name) for alias in node.names)])
    return tuple(names)


def _imported_from(path: Path, name: _Name, node: ast.ImportFrom) -> _Name:
    """Return what a ``from`` of a module's file imports from."""
    package = name if path.name == "__init__.py" else name[:-1]
    above = package[: len(package) - node.level + 1] if node.level else ()
    return above + (tuple(node.module.split(".")) if node.module else ())


def _closure(
    start: _Name, roots: Sequence[Path], package: str | None = None, file: Path | None = None
) -> dict[_Name, Path]:
    """Map each module in ``roots``, or in one ``package`` there, that runs to its file.

    The first root counts most. The module to ``start`` with may be a ``file`` that no root has.

    Returns:
        Files by the parts of their dotted names.
    """
    closure: dict[_Name, Path] = {}
    given = {start: file}
    pending = [start[:depth] for depth in range(1, len(start) + 1)]
    known: dict[_Name, tuple[Path | None, Sequence[Path]]] = {}
    seen: set[_Name] = set()
    while pending:
        name = pending.pop()
        if name in seen or (package and name[:1] != (package,)):
            continue
        seen.add(name)
        file = given.get(name) or _module_file(roots, name, known)
        if file is None:
            continue
        closure[name] = file
        for imported in _imported_names(file, name):
            # `import a.b.c` runs a and a.b as well.
            pending += [imported[:depth] for depth in range(1, len(imported) + 1)]
    return closure


def _source_of(tree: ast.Module) -> _Source:
    """Return what a tree runs, not how it is laid out or described.

    Its text names each node and list before its parts, with their number. It is ASCII without empty
    fields, because Python versions differ in both. A loop, because the tree of a sum is as deep as
    the sum has terms.
    """
    imports: list[ast.Import | ast.ImportFrom] = []
    texts: set[str] = set()
    parts: list[str] = []
    pending: list[Any] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.AST):
            n_fields = 0
            docstring = ast.get_docstring(node, False) if isinstance(node, _DESCRIBED) else None
            for name in reversed(node._fields):
                value: Any = getattr(node, name, None)
                if docstring is not None and name == "body":
                    value = value[1:]
                if value is not None and value != []:
                    n_fields += 1
                    pending += (value, name)
            parts.append(f"{type(node).__name__} {n_fields}")
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports.append(node)
        elif isinstance(node, list):
            parts.append(f"list {len(node)}")
            pending += reversed(node)
        else:
            parts.append(ascii(node))
            if isinstance(node, str):
                texts.add(node)
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    return _Source(tree, imports, words, "\n".join(parts))


def _texts_beside(folder: Path) -> Iterable[Path]:
    """Yield the templates and styles of a package, but not those of packages within it."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not (path / "__init__.py").exists():
            yield from _texts_beside(path)
        elif path.suffix in _BESIDE:
            yield path


def _digest(texts: Mapping[_Name, str]) -> Any:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(texts):
        digest.update(f"{name} {texts[name]}".encode())
    return digest


def code_digest(module: str) -> str:
    """Hash the source of ``module`` and of every ``trak_core`` module it reaches by import.

    Comments, layout and docstrings don't count, nor does the version of Python. Imports inside
    functions do, and so do templates (``.j2``) and styles (``.css``) in the folder of a package
    reached. Versions of other packages don't: they are in each artifact's ``provenance``.

    Returns:
        16 hexadecimal digits.

    Example:
        >>> digest = code_digest("trak_core.stages.compute_features")
        >>> len(digest), digest == code_digest("trak_core.stages.compute_scores")
        (16, False)
    """
    name = tuple(module.split("."))
    files = _closure(name, [_ROOT], _PACKAGE)
    if name not in files:
        raise ModuleNotFoundError(f"no module {module!r} under {_ROOT}")
    digest = _digest({name: _source(file).text for name, file in files.items()})
    for package in sorted(file.parent for file in files.values() if file.name == "__init__.py"):
        for path in _texts_beside(package):
            digest.update(f"{path.relative_to(_ROOT)} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def code_files() -> Iterable[Path]:
    """Yield all files that ``code_digest`` may read, in order."""
    for folder, folders, names in os.walk(_ROOT / _PACKAGE):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(_CODE))


def study_modules(study: Path, folders: Sequence[Path] = ()) -> dict[_Name, Path]:
    """Return a study's Python file, and the modules beside it that it imports, by their names.

    A job looks for modules in ``folders`` in place of the study's own, in the first one first.
    """
    if study.suffix != ".py" or not study.is_file():
        kind = "a file of another kind" if study.is_file() else "nothing there"
        raise InputError(
            f"{study}: the study's Python file must exist, with a name that ends with .py; paths "
            f"are relative to the folder that Snakemake runs in. Found {kind}.",
            code="provenance.study_file",
        )
    return _closure((study.stem,), folders or [study.parent], file=study)


def may_change_imports(path: Path) -> bool:
    """Return whether a Python file says words by which code changes what an import does."""
    return not _source(path).words.isdisjoint(_CHANGES_IMPORTS)


def study_imports(study: Path) -> list[str]:
    """Return dotted names of what a study always imports and doesn't lie beside it, sorted.

    None if the study may change what an import does, by variables of its environment or by the
    folders of modules.
    """
    files = study_modules(study)
    if any(may_change_imports(path) for path in files.values()):
        return []
    imported: set[str] = set()
    for path in files.values():
        for node in _source(path).tree.body:
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.update(f"{node.module}.{alias.name}" for alias in node.names)
    beside = {name[0] for name in files}
    return sorted(name for name in imported if name.split(".")[0] not in beside)


def _only_defines(statement: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    """Return whether a statement defines a function, and does nothing else."""
    if not isinstance(statement, ast.FunctionDef) or statement.decorator_list:
        return False
    given = statement.args
    defaults = [*given.defaults, *filter(None, given.kw_defaults)]
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    types = [statement.returns, *(argument.annotation for argument in arguments if argument)]
    return all(isinstance(default, ast.Constant) for default in defaults) and all(
        isinstance(node, _TYPE_NODES) for top in types if top for node in ast.walk(top)
    )


def _without(tree: ast.Module, names: Collection[str], beside: set[str]) -> ast.Module:
    """Return a study's code without those of some functions that the remaining code can't reach.

    ``beside`` holds all words of the modules beside it.
    """
    apart = [f for f in tree.body if _only_defines(f) and f.name in names]
    while True:
        kept = ast.Module([statement for statement in tree.body if statement not in apart], [])
        words = beside | _source_of(kept).words
        unsaid = [] if words & _REFLECTS else [f for f in apart if f.name not in words]
        if unsaid == apart:
            return kept
        apart = unsaid


def study_digest(
    study: Path,
    data_files: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    folders: Sequence[Path] = (),
) -> str:
    """Hash a study's Python file, the modules beside it that it imports, and its data files.

    Same rules as ``code_digest``; installed packages don't count. A function in ``without`` counts
    all the same in doubt: if code that counts says its name, as a name or in a text; if its
    definition has decorators, or defaults that are no constants; if code that counts may reach what
    it never names (``globals``, ``sys.modules``, ...); or if the file is imported back. Data files
    are those that the config names, digests by path. See ``study_modules`` for ``folders``.

    Returns:
        16 hexadecimal digits.
    """
    files, start = study_modules(study, folders), (study.stem,)
    texts = {name: _source(path).text for name, path in files.items()}
    imports_back = any(
        imported[:1] == start
        for name, path in files.items()
        for imported in _imported_names(path, name)
    )
    if without and not imports_back:
        beside = set().union(*(_source(files[name]).words for name in files if name != start))
        texts[start] = _source_of(_without(_source(study).tree, without, beside)).text
    digest = _digest(texts)
    for path, content in sorted((data_files or {}).items()):
        digest.update(f"{path} {content}\n".encode())
    return digest.hexdigest()


def mentions(study: Path, names: Collection[str]) -> bool:
    """Return whether a study may have one of some names.

    It, or a module beside it that it imports, says the name, or imports all of what lies elsewhere.
    """
    files = study_modules(study)
    return any(
        not _source(file).words.isdisjoint(names)
        or any(
            isinstance(node, ast.ImportFrom)
            and node.names[0].name == "*"
            and _imported_from(file, module, node) not in files
            for node in _source(file).imports
        )
        for module, file in files.items()
    )


def content_digest(*parts: Any) -> str:
    """Hash plain values by their JSON: 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def parameters_digest(shapes: Mapping[str, Sequence[int]]) -> str:
    """Hash the names and shapes of parameters, in order: 32 hexadecimal digits."""
    text = "\n".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def stat_signature(path: Path) -> str:
    """Return 16 hexadecimal digits that change when a file, or any file of a folder, is replaced.

    Made of sizes and modification times, so it also notices an older file put in place of a newer
    one, and never reads a byte of a large checkpoint.
    """
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    text = "\n".join(
        f"{file.relative_to(path)} {(stat := file.stat()).st_size} {stat.st_mtime_ns}"
        for file in files
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
