"""A description of targets by their columns, such as ``label == 3 and prediction != label``.

Nothing of it is run as Python: it is parsed into comparisons, and anything else is refused.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

from trak_core.errors import InputError

# What a description may compare beside the study's own columns.
TARGET_COLUMNS = ("id", "label", "prediction", "output", "output_sd")
# Targets that a description may match.
MOST_TARGETS = 2000
_LONGEST = 1000
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
    """Comparisons of columns with each other and with constants, joined by and, or, not.

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
        """Return the description in a text; refuse what is no comparison."""
        shown = text if len(text) <= _LONGEST else f"{text[:40]}..., {len(text)} characters"
        try:
            tree = ast.parse(text.strip(), mode="eval").body if shown is text else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            tree = None
        if tree is None:
            raise _refusal(shown)
        _check(tree)
        return cls(text, tree)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are compared, sorted."""
        return sorted({node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)})

    def check_columns(self, own: Mapping[str, Any] | Any) -> None:
        """Refuse a column that targets don't have, whose ``own`` columns come from the study."""
        known = [*TARGET_COLUMNS, *own]
        for name in self.columns:
            if name not in known:
                raise InputError(
                    f"experiments: `where: {self.text}` must compare columns of the targets: "
                    f"{', '.join(known)}. Found {name}. A text stands in quotes; the study's "
                    "target_columns() can bring more columns.",
                    code="spec.condition_column",
                )

    def holds(self, table: Mapping[str, Any]) -> Any:
        """Return where the description is true, shape (n,), bool.

        ``table`` has the columns: NumPy arrays of numbers, or of dtype object for texts.
        """
        return self._holds(self.tree, table)

    def _holds(self, node: ast.expr, table: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.BoolOp):
            join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
            return reduce(join, (self._holds(value, table) for value in node.values))
        if isinstance(node, ast.UnaryOp):
            return ~self._holds(node.operand, table)
        assert isinstance(node, ast.Compare)
        sides = [node.left, *node.comparators]
        pairs = zip(sides, node.ops, sides[1:], strict=False)
        return reduce(operator.and_, (self._compared(*pair, table) for pair in pairs))

    def _compared(
        self, left: ast.expr, how: ast.cmpop, right: ast.expr, table: Mapping[str, Any]
    ) -> Any:
        if isinstance(right, ast.List | ast.Tuple | ast.Set):
            each = [self._compared(left, ast.Eq(), value, table) for value in right.elts]
            is_among = reduce(operator.or_, each)
            return ~is_among if isinstance(how, ast.NotIn) else is_among
        values = [table[s.id] if isinstance(s, ast.Name) else _constant(s) for s in (left, right)]
        kinds = ["texts" if _is_text(value) else "numbers" for value in values]
        if kinds[0] != kinds[1]:
            raise InputError(
                f"experiments: `where: {self.text}` must compare texts with texts and numbers with "
                f"numbers. Found {ast.unparse(left)}, which is {kinds[0]}, beside "
                f"{ast.unparse(right)}, which is {kinds[1]}.",
                code="spec.condition_kinds",
            )
        return _COMPARISONS[type(how)](*values)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or getattr(getattr(value, "dtype", None), "kind", "") in {
        *("O", "U", "S")
    }


def _constant(node: ast.expr) -> Any:
    """Return a number or a text; None for what is neither."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _constant(node.operand)
        return -number if isinstance(number, int | float) else None
    if isinstance(node, ast.Constant) and type(node.value) in {int, float, str}:
        return node.value
    return None


def _refusal(piece: str) -> InputError:
    return InputError(
        "experiments: `where` must be comparisons of columns (==, !=, <, <=, >, >=, in, not in) "
        "with each other, with numbers or with quoted texts, joined by `and`, `or` and `not`, such "
        f"as `label == 3 and prediction != label`. Found {piece!r}.",
        code="spec.condition",
    )


def _check(node: ast.expr) -> None:
    """Refuse all but comparisons, naming the piece that is none."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            _check(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _check(node.operand)
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        if not any(isinstance(side, ast.Name) for side in sides):
            raise _refusal(ast.unparse(node))
        for how, left, right in zip(node.ops, sides, sides[1:], strict=False):
            values = [right]
            if isinstance(how, ast.In | ast.NotIn):
                values = right.elts if isinstance(right, ast.List | ast.Tuple | ast.Set) else []
            is_known = isinstance(how, (ast.In, ast.NotIn, *_COMPARISONS))
            if not (is_known and values and all(map(_is_side, [left, *values]))):
                raise _refusal(ast.unparse(node))
    else:
        raise _refusal(ast.unparse(node))


def _is_side(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or _constant(node) is not None
