"""Expressions over named values, such as "depth * branches == 36": a small language that cannot call anything."""

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import pairwise
from typing import Any

from vitray.errors import ConfigError

LANGUAGE = "numbers, 'texts', lists, names, + - * / // %, comparisons, in, and, or, not"
ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda part, whole: part in whole,
    ast.NotIn: lambda part, whole: part not in whole,
}
PARTS = (ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.BoolOp, ast.And, ast.Or)
SIGNS = (ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Compare)


def names_in(expression: str) -> frozenset[str]:
    """Return the names in an expression."""
    return frozenset(node.id for node in ast.walk(_parsed(expression)) if isinstance(node, ast.Name))


def evaluate(expression: str, values: Mapping[str, Any]) -> bool:
    """Whether an expression holds for these values."""
    try:
        result = _value(_parsed(expression), values)
    except (TypeError, ArithmeticError, RecursionError) as error:
        given = " ".join(f"{name}={value}" for name, value in values.items())
        raise ConfigError(f"{expression!r}: cannot be computed for {given}: {error}") from None
    if not isinstance(result, bool):
        raise ConfigError(f"{expression!r}: is {result!r}, wanted a comparison, which is true or false")
    return result


@cache
def _parsed(expression: str) -> ast.expr:
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"{expression!r}: not an expression, wanted {LANGUAGE}") from None
    for node in ast.walk(tree):
        legal = isinstance(node, (*PARTS, *SIGNS, *ARITHMETIC, *COMPARISONS))
        if not legal or (isinstance(node, ast.Constant) and not isinstance(node.value, str | int | float | None)):
            got = type(node).__name__.lower()
            raise ConfigError(f"{expression!r}: {got} is not part of the language, wanted {LANGUAGE}")
    return tree


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    value_of = partial(_value, values=values)
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return values[node.id]
        case ast.List() | ast.Tuple():
            return [value_of(item) for item in node.elts]
        case ast.BoolOp():
            join = all if isinstance(node.op, ast.And) else any
            return join(_truth(value_of(part)) for part in node.values)
        case ast.UnaryOp(op=ast.Not()):
            return not _truth(value_of(node.operand))
        case ast.UnaryOp():
            return -_number(value_of(node.operand))
        case ast.BinOp():
            return ARITHMETIC[type(node.op)](_number(value_of(node.left)), _number(value_of(node.right)))
        case ast.Compare():
            sides = pairwise(value_of(side) for side in (node.left, *node.comparators))
            return all(COMPARISONS[type(op)](*pair) for op, pair in zip(node.ops, sides, strict=True))
        case _:
            raise AssertionError(f"{node} is part of the language but not handled")


def _number(value: Any) -> int | float:
    # * and % on texts and lists could fill the memory.
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not true or false")
    return value
