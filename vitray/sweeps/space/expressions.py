"""Expressions over named values, such as "depth * branches == 36": a small language that cannot call anything."""

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from vitray.config.parsing import short
from vitray.config.sections import MOST_NUMBER
from vitray.errors import ConfigError

LANGUAGE = "numbers, 'texts', lists, names, + - * / // %, comparisons, in, and, or, not"
LONGEST, DEEPEST = 1000, 50  # characters and levels of an expression; evaluation recurses
ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
ORDERINGS = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, **ORDERINGS,
    ast.In: lambda part, whole: part in whole, ast.NotIn: lambda part, whole: part not in whole,
}  # fmt: skip
ALLOWED_NODES = (
    ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub,
    ast.BinOp, ast.Compare, *ARITHMETIC, *COMPARISONS,
)  # fmt: skip


def names_in(expression: str) -> frozenset[str]:
    """Return the names in an expression."""
    return frozenset(node.id for node in ast.walk(_parsed(expression)) if isinstance(node, ast.Name))


def evaluate(expression: str, values: Mapping[str, Any]) -> bool:
    """Whether an expression holds for these values."""
    try:
        result = _value(_parsed(expression), values)
    except (TypeError, ArithmeticError, RecursionError) as error:
        given = " ".join(f"{name}={short(value)}" for name, value in values.items())
        raise ConfigError(f"{short(expression)}: cannot be computed for {given}: {error}") from None
    if not isinstance(result, bool):
        raise ConfigError(f"{short(expression)}: is {short(result)}, expected a comparison, which is true or false")
    return result


@cache
def _parsed(expression: str) -> ast.expr:
    if len(expression) > LONGEST:
        raise ConfigError(f"{short(expression)}: got {len(expression):,} characters, expected at most {LONGEST:,}")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"{short(expression)}: not an expression, expected {LANGUAGE}") from None
    level, depth = [tree], 0
    while level:
        level, depth = [child for node in level for child in ast.iter_child_nodes(node)], depth + 1
        if depth > DEEPEST:
            raise ConfigError(f"{short(expression)}: expected at most {DEEPEST} levels of operators and brackets")
    for node in ast.walk(tree):
        is_constant = isinstance(node, ast.Constant)
        if not isinstance(node, ALLOWED_NODES) or (
            is_constant and not isinstance(node.value, str | int | float | None)
        ):
            got = type(node).__name__.lower()
            raise ConfigError(f"{short(expression)}: {got} is not part of the language, expected {LANGUAGE}")
        if is_constant and isinstance(node.value, int | float) and abs(node.value) > MOST_NUMBER:
            raise ConfigError(f"{short(expression)}: expected numbers of at most {MOST_NUMBER:g}")
    return tree


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return values[node.id]
        case ast.List() | ast.Tuple():
            return [_value(item, values) for item in node.elts]
        case ast.BoolOp():
            join = all if isinstance(node.op, ast.And) else any
            return join(_truth(_value(part, values)) for part in node.values)
        case ast.UnaryOp(op=ast.Not()):
            return not _truth(_value(node.operand, values))
        case ast.UnaryOp():
            return -_number(_value(node.operand, values))
        case ast.BinOp():
            left, right = _number(_value(node.left, values)), _number(_value(node.right, values))
            return _number(ARITHMETIC[type(node.op)](left, right))
        case ast.Compare():
            sides = pairwise(_value(side, values) for side in (node.left, *node.comparators))
            return all(_compare(type(op), *pair) for op, pair in zip(node.ops, sides, strict=True))
        case _:
            raise AssertionError(f"{node} is part of the language but not handled")


def _compare(kind: type[ast.cmpop], left: Any, right: Any) -> bool:
    for value in (left, right):
        if kind in ORDERINGS and isinstance(value, bool | list):
            raise TypeError(f"{short(value)} is neither a number nor a text")
    return COMPARISONS[kind](left, right)


def _number(value: Any) -> int | float:
    # * and % on texts and lists could fill the memory, and so could products without end.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{short(value)} is not a number")
    if not -MOST_NUMBER <= value <= MOST_NUMBER:
        raise ArithmeticError(f"a number is beyond {MOST_NUMBER:g}")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{short(value)} is not true or false")
    return value
