"""What expressions in a script's text are worth, without a call of anything that the user wrote."""

from __future__ import annotations

import ast
import builtins
import operator
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda x, y: x in _plain(y),
    ast.NotIn: lambda x, y: x not in _plain(y),
}
_CONTAINERS: tuple[type[Any], ...] = (
    str,
    bytes,
    list,
    tuple,
    dict,
    set,
    frozenset,
    range,
    type({}.keys()),
    type({}.values()),
)
_CALLED: tuple[Any, ...] = (
    int, float, bool, str, round, abs, min, max, divmod, len, range, vars, getattr, os.getenv,
)  # fmt: skip
"""Functions that change nothing."""
_OF_MAPPINGS = {"get", "keys", "values", "items"}


class UnknownError(Exception):
    """An expression has no value, or one that only the user's code can compute."""


def _plain(held: Any) -> Any:
    """A container of Python: to go through another one may end nowhere, or use it up."""
    if type(held) not in _CONTAINERS:
        raise UnknownError
    return held


def evaluated(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression.

    Raises:
        UnknownError: see there.
    """
    try:
        return _evaluated(node, names)
    except UnknownError:
        raise
    except Exception as error:  # of an attribute that the user computes, say
        raise UnknownError from error


def number(node: ast.expr, names: Mapping[str, Any]) -> int | None:
    """The value of an expression, if it is a whole number."""
    with suppress(UnknownError, TypeError, ValueError, OverflowError):
        value = evaluated(node, names)
        if isinstance(value, int | float | np.number) and value == int(value):
            return int(value)
    return None


def _evaluated(node: ast.expr, names: Mapping[str, Any]) -> Any:
    rule = _RULES.get(type(node))
    if rule is None:
        raise UnknownError
    return rule(node, names, lambda part: _evaluated(part, names))


def _name(node: Any, names: Mapping[str, Any], _: Any) -> Any:
    return names[node.id] if node.id in names else getattr(builtins, node.id)


def _of_several(node: Any, _: Any, value: Callable[[ast.expr], Any]) -> Any:
    """The value of ``a and b``, or of ``a or b``."""
    found = value(node.values[0])
    for part in node.values[1:]:
        if bool(found) is isinstance(node.op, ast.Or):
            break
        found = value(part)
    return found


def _comparison(node: Any, _: Any, value: Callable[[ast.expr], Any]) -> Any:
    left = value(node.left)
    for kind, part in zip(node.ops, node.comparators, strict=True):
        right = value(part)
        if not _OPERATORS[type(kind)](left, right):
            return False
        left = right
    return True


def _result(node: Any, names: Mapping[str, Any], value: Callable[[ast.expr], Any]) -> Any:
    keywords = {key.arg: value(key.value) for key in node.keywords if key.arg}
    function, given = _function(node.func, names), [value(each) for each in node.args]
    if function in (min, max) and len(given) == 1:
        _plain(given[0])
    return function(*given, **keywords)


_RULES: dict[type[ast.expr], Callable[[Any, Any, Any], Any]] = {
    ast.Constant: lambda node, _, __: node.value,
    ast.Name: _name,
    ast.NamedExpr: lambda node, _, value: value(node.value),
    ast.Attribute: lambda node, _, value: getattr(value(node.value), node.attr),
    ast.Subscript: lambda node, _, value: value(node.value)[value(node.slice)],
    ast.List: lambda node, _, value: [value(each) for each in node.elts],
    ast.Tuple: lambda node, _, value: tuple(value(each) for each in node.elts),
    ast.UnaryOp: lambda node, _, value: _OPERATORS[type(node.op)](value(node.operand)),
    ast.BinOp: lambda node, _, value: _OPERATORS[type(node.op)](
        value(node.left), value(node.right)
    ),
    ast.BoolOp: _of_several,
    ast.IfExp: lambda node, _, value: value(node.body if value(node.test) else node.orelse),
    ast.Compare: _comparison,
    ast.Call: _result,
}


def _function(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a call calls, if that changes nothing."""
    if isinstance(node, ast.Name) and node.id == "len":  # pipectl replaces it
        return len
    found = _evaluated(node, names)
    owner = getattr(found, "__self__", None)
    is_known = any(found is each for each in _CALLED) or isinstance(found, np.ufunc)
    is_known = is_known or getattr(found, "__module__", None) == "math"
    if is_known or (isinstance(owner, Mapping) and found.__name__ in _OF_MAPPINGS):
        return found
    raise UnknownError


def named(text: str, names: Mapping[str, Any]) -> Any:
    """The value of a variable, or of a part of one: ``loaders['val']``; None if there is none."""
    with suppress(SyntaxError, ValueError):
        return value_of(ast.parse(text, mode="eval").body, names)
    return None


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a name, or of an attribute or an entry of one; None if there is none."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        with suppress(Exception):  # of the user's code
            return getattr(value_of(node.value, names), node.attr, None)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        with suppress(Exception):
            return value_of(node.value, names)[node.slice.value]
    return None
