"""Hash the code and files on which a job depends, so that Snakemake notices changes.

Snakemake imports this module whenever it starts. To be fast, the module imports only the standard
library.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trak_core.errors import InputError

_PACKAGE = Path(__file__).parent
_CODE = {".py", ".j2", ".css"}
# Folders of code that only some jobs run. ``stage_files`` returns those parts that a stage uses.
_NOT_SHARED = {"command", "compat", "queries", "report", "stages", "workflow"}
_STAGES_WITH_PAGES = {"draw_influences", "write_report"}
_Name = tuple[str, ...]


def _hashed(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _code_files(*parts: str) -> set[Path]:
    tops = [_PACKAGE / part for part in parts]
    tops = tops or [path for path in _PACKAGE.iterdir() if path.name not in _NOT_SHARED]
    return {file for top in tops for file in (top, *top.rglob("*")) if file.suffix in _CODE}


@cache
def code_digest(*parts: str) -> str:
    """Return a hash, as 16 hexadecimal digits, of the code in files and folders of ``trak_core``.

    Without ``parts``, all code that every job may run is hashed.
    """
    return _hashed((file.relative_to(_PACKAGE).as_posix(), file) for file in _code_files(*parts))


def stage_files(module: str) -> list[str]:
    """Return the files and folders of a stage's code that are not shared by all stages.

    They are not included in ``code_digest()``. ``module`` is the dotted name of the stage's module.
    """
    stage = module.rpartition(".")[2]
    return ["stages/_shared.py", f"stages/{stage}.py", *["report"] * (stage in _STAGES_WITH_PAGES)]


def stage_digest(module: str) -> str:
    """Return a hash of all code that a stage may run. ``module`` is its module's dotted name."""
    return content_digest(code_digest(), code_digest(*stage_files(module)))[:16]


def _imported(file: Path, name: _Name) -> Iterable[_Name]:
    """Yield the dotted name, split at the dots, of everything that the module ``name`` imports."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes(), filename=str(file))))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"{file}: the study must be valid Python code. Found: {error}.",
            code="provenance.python",
        ) from error
    package = name if file.name == "__init__.py" else name[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = (*above, *(node.module.split(".") if node.module else ()))
            yield from ((*base, alias.name) for alias in node.names)


def study_modules(study: Path, folders: Sequence[Path] = ()) -> dict[_Name, Path]:
    """Return the files of a study and of all local modules that it imports, by the module's name.

    Modules that are imported inside functions are included. Modules are searched for in
    ``folders``, or by default in the study's folder.
    """
    if study.suffix != ".py" or not study.is_file():
        kind = "a file with another ending" if study.is_file() else "no such file"
        raise InputError(
            f"{study}: the study's Python file must exist, and its name must end with .py. Found "
            f"{kind}. Paths are relative to {Path.cwd()}. For another folder, add --directory.",
            code="provenance.study_file",
        )
    modules: dict[_Name, Path] = {(study.stem,): study}
    pending = list(modules)
    while pending:
        name = pending.pop()
        for imported in _imported(modules[name], name):
            # `import a.b.c` also imports a and a.b.
            for depth in range(1, len(imported) + 1):
                part = imported[:depth]
                above = modules.get(part[:-1])
                if above is not None and above.name == "__init__.py":
                    parents = [above.parent]
                else:
                    parents = [root.joinpath(*part[:-1]) for root in folders or [study.parent]]
                names = (f"{part[-1]}/__init__.py", f"{part[-1]}.py")
                files = (parent / name for parent in parents for name in names)
                file = next((file for file in files if file.is_file()), None)
                if part not in modules and file is not None:
                    modules[part] = file
                    pending.append(part)
    return modules


def study_digest(
    study: Path, data_files: Mapping[str, str] | None = None, folders: Sequence[Path] = ()
) -> str:
    """Return a hash of a study's Python file, the local modules that it imports, and its data.

    ``data_files`` maps the paths of data files to their hashes. Modules are searched for in
    ``folders``, or by default in the study's folder.
    """
    code = _hashed((".".join(name), path) for name, path in study_modules(study, folders).items())
    return content_digest(code, sorted((data_files or {}).items()))[:16]


def mentions(study: Path, *names: str) -> bool:
    """Return whether a study or a local module that it imports may define one of ``names``.

    The text of the code is searched for the names. A star import may define any name.
    """
    words = re.compile(rf"\b({'|'.join(names)})\b|\bimport\s*\*".encode())
    return any(words.search(file.read_bytes()) for file in study_modules(study).values())


def content_digest(*parts: Any) -> str:
    """Return a hash, as 32 hexadecimal digits, of values that can be converted to JSON."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def parameters_digest(shapes: Mapping[str, Sequence[int]]) -> str:
    """Return a hash, as 32 hexadecimal digits, of parameters' names and shapes in their order."""
    text = "\n".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
