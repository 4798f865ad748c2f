"""What a script does in some epochs or after some steps only, and may draw random numbers."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

from torch.utils.data import DataLoader

from pipectl.faults import is_user_code
from pipectl.script.loops import Around, statements_in, tree_of
from pipectl.script.program import Place
from pipectl.script.values import value_of

_DRAWS = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "randperm",
        "random",
        "uniform",
        "normal",
        "shuffle",
        "choice",
        "choices",
        "sample",
        "multinomial",
        "bernoulli",
        "generate",
    ]
)
"""How functions are called that draw random numbers."""
_LOADERS = ("loader", "_dl")
"""In the names of what is a ``DataLoader``, if no value tells."""
_MAX_DEPTH = 3
"""Of calls of functions of the user."""


def draws_at_times(loops: Iterable[Around], training: Any) -> Place | None:
    """Return the first line in loops around the step that may draw random numbers in some of their
    rounds only: it has to do with a ``DataLoader``, or calls what draws; None if there is none.

    Args:
        training: the loader of the training data, which does not count.
    """
    for loop in loops:
        own = _changing(loop)
        for statement in _conditional(loop.node.body, own, loop.line):
            if _may_draw(statement, {**loop.names, **_no_loader(loop, training)}, _MAX_DEPTH):
                return loop.file, statement.lineno
    return None


def _no_loader(loop: Around, training: Any) -> dict[str, Any]:
    return {name: True for name, value in loop.names.items() if value is training}


def _conditional(body: Sequence[ast.stmt], own: set[str], step: int) -> Iterator[ast.stmt]:
    """Yield the statements of a loop that follow from what changes from round to round, and not
    those around the step.
    """
    for number, node in enumerate(body):
        holds_step = node.lineno <= step <= (node.end_lineno or node.lineno)
        if isinstance(node, ast.If) and _names_in(node.test) & own and not holds_step:
            yield from (*node.body, *node.orelse)
            if any(isinstance(each, ast.Continue) for each in statements_in([node])):
                yield from body[number + 1 :]
        elif not isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.ClassDef):
            for part in ("body", "orelse", "finalbody"):
                yield from _conditional(getattr(node, part, []), own, step)


def _changing(loop: Around) -> set[str]:
    """The names of variables and attributes that a loop sets in its rounds."""
    stored = (x for x in ast.walk(loop.node) if isinstance(getattr(x, "ctx", None), ast.Store))
    return {ast.unparse(x) for x in stored if isinstance(x, ast.Name | ast.Attribute)}


def _names_in(test: ast.expr) -> set[str]:
    return {ast.unparse(x) for x in ast.walk(test) if isinstance(x, ast.Name | ast.Attribute)}


def _may_draw(node: ast.AST, names: dict[str, Any], depth: int) -> bool:
    """Whether statements read a ``DataLoader``, or call a function that draws random numbers."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute | ast.Subscript):
            if isinstance(value_of(each, names), DataLoader):
                return True
        elif isinstance(each, ast.For | ast.comprehension):
            if _is_called_loader(each.iter, names):
                return True
        elif isinstance(each, ast.Call) and (
            ast.unparse(each.func).rpartition(".")[2] in _DRAWS
            or (depth and _draws_inside(value_of(each.func, names), depth - 1))
        ):
            return True
    return False


def _is_called_loader(node: ast.expr, names: dict[str, Any]) -> bool:
    parts = [x for x in ast.walk(node) if isinstance(x, ast.Name | ast.Attribute)]
    unknown = (ast.unparse(each).lower() for each in parts if value_of(each, names) is None)
    return any(word in each for each in unknown for word in _LOADERS)


def _draws_inside(function: Any, depth: int) -> bool:
    """Whether a function of the user may draw, by its text."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or not is_user_code(code.co_filename):
        return False
    names = {**getattr(function, "__globals__", {}), **dict.fromkeys(code.co_varnames)}
    if (owner := getattr(function, "__self__", None)) is not None:
        names["self"] = owner
    return any(
        _may_draw(node, names, depth)
        for node in ast.walk(tree_of(code.co_filename))
        if isinstance(node, ast.FunctionDef) and _begins(node, code)
    )


def _begins(node: ast.FunctionDef, code: CodeType) -> bool:
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return node.name == code.co_name and first <= code.co_firstlineno <= node.lineno
