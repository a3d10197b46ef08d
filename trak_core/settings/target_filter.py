"""Select targets by conditions on their columns, such as ``label == 3 and prediction != label``.

A condition is never executed as Python code. It is parsed, and only comparisons are accepted.
"""

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

from trak_core.errors import InputError

# Columns of every target. A study can add other columns.
TARGET_COLUMNS = ("id", "label", "prediction", "output", "output_sd")
MOST_TARGETS = 2000  # the largest number of targets that a condition may select
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the columns of targets: comparisons joined by ``and``, ``or`` and ``not``.

    Example:
        >>> import numpy as np
        >>> condition = Condition.parse("label == 3 and prediction != label")
        >>> condition.holds({"label": np.array([3, 3, 1]), "prediction": np.array([3, 5, 2])})
        array([False,  True, False])
    """

    text: str
    tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the condition in a text. Raise an error if the text is not a valid condition."""
        if len(text) > 1000:
            raise _refusal(f"{text[:40]}..., {len(text)} characters")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise _refusal(text) from None
        _check(tree)
        return cls(text, tree)

    @property
    def columns(self) -> list[str]:
        """The sorted names of the columns that the condition compares."""
        return sorted({node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)})

    def check_columns(self, study_columns: Iterable[str]) -> None:
        """Raise an error for a column that is not in ``TARGET_COLUMNS`` or ``study_columns``."""
        known = [*TARGET_COLUMNS, *study_columns]
        if unknown := [name for name in self.columns if name not in known]:
            raise InputError(
                f"experiments: `where: {self.text}` may use only columns of the targets: "
                f"{', '.join(known)}. Found {unknown[0]}. If it is a text, put it in quotes. If it "
                "is a column, define it by target_columns() in the study.",
                code="spec.condition_column",
            )

    def holds(self, table: Mapping[str, Any]) -> Any:
        """Return whether the condition is true for each of n targets, as an array of shape (n,).

        ``table`` maps column names to NumPy arrays of shape (n,). Texts have dtype object.
        """
        return self._holds(self.tree, table)

    def _holds(self, node: ast.expr, table: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.BoolOp):
            join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
            return reduce(join, (self._holds(value, table) for value in node.values))
        if isinstance(node, ast.UnaryOp):
            return ~self._holds(node.operand, table)
        assert isinstance(node, ast.Compare)
        operands = [node.left, *node.comparators]
        comparisons = zip(operands, node.ops, operands[1:], strict=False)
        return reduce(operator.and_, (self._compare(*parts, table) for parts in comparisons))

    def _compare(
        self, left: ast.expr, comparison: ast.cmpop, right: ast.expr, table: Mapping[str, Any]
    ) -> Any:
        if isinstance(right, ast.List | ast.Tuple | ast.Set):
            equal = [self._compare(left, ast.Eq(), value, table) for value in right.elts]
            is_in = reduce(operator.or_, equal)
            return ~is_in if isinstance(comparison, ast.NotIn) else is_in
        values = [table[s.id] if isinstance(s, ast.Name) else _constant(s) for s in (left, right)]
        kinds = ["texts" if _is_text(value) else "numbers" for value in values]
        if kinds[0] != kinds[1]:
            raise InputError(
                f"experiments: `where: {self.text}` must compare texts with texts and numbers with "
                f"numbers. Found {ast.unparse(left)} ({kinds[0]}) and {ast.unparse(right)} "
                f"({kinds[1]}).",
                code="spec.condition_kinds",
            )
        return _COMPARISONS[type(comparison)](*values)


def _is_text(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return isinstance(value, str) or (dtype is not None and dtype.kind in "OUS")


def _constant(node: ast.expr) -> Any:
    """Return the value of a node that is a number or a text. Return None for any other node."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _constant(node.operand)
        return -number if isinstance(number, int | float) else None
    if isinstance(node, ast.Constant) and type(node.value) in {int, float, str}:
        return node.value
    return None


def _refusal(text: str) -> InputError:
    return InputError(
        "experiments: `where` must consist of comparisons (==, !=, <, <=, >, >=, in, not in), "
        "joined by `and`, `or` and `not`. Each comparison must have a column on one side, and a "
        "column, a number or a quoted text on the other, as in `label == 3 and prediction != "
        f"label`. Found {text!r}.",
        code="spec.condition",
    )


def _check(node: ast.expr) -> None:
    """Raise an error if a condition is not valid. The message quotes its first invalid part."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            _check(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _check(node.operand)
    elif isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        if not any(isinstance(operand, ast.Name) for operand in operands):
            raise _refusal(ast.unparse(node))
        for comparison, left, right in zip(node.ops, operands, operands[1:], strict=False):
            values = [right]
            if isinstance(comparison, ast.In | ast.NotIn):
                values = right.elts if isinstance(right, ast.List | ast.Tuple | ast.Set) else []
            is_known = isinstance(comparison, (ast.In, ast.NotIn, *_COMPARISONS))
            if not (is_known and values and all(map(_is_operand, [left, *values]))):
                raise _refusal(ast.unparse(node))
    else:
        raise _refusal(ast.unparse(node))


def _is_operand(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or _constant(node) is not None
