"""What of a study's code is reached from some of its functions; when in doubt, all of it.

Everything at the top of its file runs whenever it is loaded, and counts. But a function that is
only defined there, or a constant that is only written down, counts where what runs says its name.
"""

import ast
import re
from collections.abc import Collection, Iterable

# With these, code may reach what it never names.
_REFLECTS = {
    *("globals", "locals", "vars", "dir", "eval", "exec", "compile", "inspect", "_getframe"),
    *("modules", "import_module", "__import__", "__main__", "__dict__", "__getattr__"),
    *("__globals__", "f_globals", "__builtins__", "builtins", "runpy"),
    # Libraries that call what a file names.
    *("pickle", "cloudpickle", "dill", "joblib", "weights_only", "hydra", "instantiate"),
    *("pydoc", "pkgutil", "locate", "resolve_name", "run_path"),
}
_PLAIN = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.UnaryOp, ast.USub, ast.Load)


def _said(nodes: Iterable[ast.AST]) -> set[str]:
    """Return every name that code says, texts among them."""
    found: set[str] = set()
    for node in (below for top in nodes for below in ast.walk(top)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Global):
            found.update(node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"\w+", node.value))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(part for one in node.names for part in one.name.split("."))
            found.update((getattr(node, "module", None) or "").split("."))
    return found


def _is_plain(value: ast.AST) -> bool:
    return all(isinstance(node, _PLAIN) for node in ast.walk(value))


def _only_defines(statement: ast.stmt) -> str | None:
    """Return the name that a statement gives to a function or constant, if it does nothing else."""
    if isinstance(statement, ast.FunctionDef) and not statement.decorator_list:
        given = statement.args
        defaults = [*given.defaults, *filter(None, given.kw_defaults)]
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        types = [statement.returns, *(one.annotation for one in every if one)]
        called = [n for t in types if t for n in ast.walk(t) if isinstance(n, ast.Call)]
        return statement.name if all(map(_is_plain, defaults)) and not called else None
    if not (isinstance(statement, ast.Assign) and _is_plain(statement.value)):
        return None
    first, *others = statement.targets
    return first.id if isinstance(first, ast.Name) and not others else None


def reflects(tree: ast.AST) -> bool:
    """Return whether code may reach what it never names."""
    return bool(_said([tree]) & _REFLECTS)


def reached(tree: ast.Module, called: Collection[str]) -> ast.Module:
    """Return a file's code without the functions and constants that nothing reaches.

    Args:
        tree: Of the file.
        called: The functions that are called from elsewhere.

    Returns:
        The statements that run, and those that define what they or ``called`` lead to, by name and
        in their order; ``tree`` itself if it reflects on itself.
    """
    if reflects(tree):
        return tree
    names = [_only_defines(statement) for statement in tree.body]
    kept = [name is None for name in names]
    pending = set(called) | _said(s for s, runs in zip(tree.body, kept, strict=True) if runs)
    known: set[str] = set()
    while pending:
        known |= pending
        more = [i for i, name in enumerate(names) if not kept[i] and name in pending]
        for i in more:
            kept[i] = True
        pending = _said(tree.body[i] for i in more) - known
    body = [statement for statement, stays in zip(tree.body, kept, strict=True) if stays]
    return ast.Module(body=body, type_ignores=[])
