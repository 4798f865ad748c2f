"""Checks of values, which a graph leaves out: ``assert``, and ``raise`` under an ``if``.

A graph contains no branch on values. If one side of a branch only raises an exception, every step
that continues has taken the other side, so only that side is captured. Models check themselves like
this (``assert not x.isnan().any()``), and ``torch.distributions`` checks its arguments. The source
of the code that asks shows which sides raise; the source of its callers shows whether the model
catches what they raise. From 2.15 on, torch exports its own checks as asynchronous asserts; such an
operator counts as a check.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import operator
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx

from pipectl.capture.step import Step
from pipectl.torch_api import ASSERT_METADATA, get_proxy_mode, get_proxy_slot

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_HAS_COLUMNS = sys.version_info >= (3, 11)
"""Whether Python says where in a line an instruction is."""
_TRY = (ast.Try, ast.TryStar) if _HAS_COLUMNS else (ast.Try,)
_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Import, ast.ImportFrom, ast.Pass)
_UNCAUGHT = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
"""Where the code lies that catches no exception of a model for good."""
_KEY = "pipectl_condition"
"""Of the type of what is cast, which an export leaves before the cast."""


def mark_condition(condition: Any) -> None:
    """Mark the operator that computes a condition: nobody else has asked for it."""
    mode = get_proxy_mode()
    slot: Any = None
    if mode is not None and isinstance(condition, Tensor):
        slot = get_proxy_slot(condition, mode.tracer, None)
    if slot is not None:
        slot.proxy.node.meta[_KEY] = True


def drop_conditions(graph: fx.Graph) -> None:
    """Drop the operators that only compute conditions of checks that were left out."""
    unread = {node for node in graph.nodes if _KEY in node.meta}
    for node in reversed(graph.nodes):
        if node.target is ASSERT_METADATA and unread.issuperset(node.all_input_nodes):
            graph.erase_node(node)
        elif node in unread and not (node.users or node.op != "call_function" or _acts(node)):
            unread.update(node.all_input_nodes)
            graph.erase_node(node)


def _acts(node: fx.Node) -> bool:
    """Return whether an operator does more than compute a value."""
    schema = getattr(node.target, "_schema", None)
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if schema is None:
        return node.target is not operator.getitem
    return schema.is_mutable or draws or "running_mean" in str(schema)


def passing_answer(frame: FrameType) -> bool | None:
    """Return the answer with which a frame that asks continues; None if it continues with both."""
    path = _path(frame.f_code, frame.f_lasti)
    node = path[-1]
    if dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL"):
        function = getattr(node, "func", None)
        if not (isinstance(function, ast.Name) and function.id == "bool"):
            return None  # all([...]) asks, say, and answers something else
    if not (_HAS_COLUMNS or _asks_once(node)):
        return None  # it may be one of several operands
    raises = [_leads_to_raise(path, answer) for answer in (True, False)]
    if raises[0] is raises[1] or _catches(frame, path) or is_caught(frame.f_back):
        return None
    return raises[1]


def is_caught(frame: FrameType | None) -> bool:
    """Return whether the model catches an exception from a frame or from what it calls.

    The handlers of torch and of pipectl, which every call of a module passes, raise it again.
    """
    while frame is not None and frame.f_code is not Step.forward.__code__:
        is_users = not frame.f_code.co_filename.startswith(_UNCAUGHT)
        if is_users and _catches(frame, _path(frame.f_code, frame.f_lasti)):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=1024)
def _path(code: CodeType, offset: int) -> list[ast.AST]:
    """Return the syntax nodes around an instruction, from its function to the innermost node."""
    position = _position(code, offset)
    path: list[ast.AST] = [_tree(code.co_filename)]
    while (inner := _holding(path[-1], position)) is not None:
        path.append(inner)
    first = max((i for i, node in enumerate(path) if isinstance(node, _FUNCTIONS)), default=0)
    return path[first:]


def _position(code: CodeType, offset: int) -> tuple[int | None, ...]:
    """Return the first and last line of an instruction, and its first and last column.

    Python 3.10 knows the line only; the last three are None.
    """
    if _HAS_COLUMNS:
        return list(code.co_positions())[offset // 2]
    return next(line for start, end, line in code.co_lines() if start <= offset < end), *[None] * 3


@lru_cache(maxsize=64)
def _tree(filename: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ast.Module([], [])


def _holding(node: ast.AST, position: tuple[Any, ...]) -> ast.AST | None:
    """Return the child of a node that contains a position; without columns, the statement."""
    line, last_line, column, last_column = position
    if not _HAS_COLUMNS and line is not None:
        kinds = (ast.stmt, ast.ExceptHandler, ast.match_case)
        inner = (child for child in ast.iter_child_nodes(node) if isinstance(child, kinds))
        return next((child for child in inner if _is_in_lines(child, line)), None)
    if None in position:
        return None
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr | ast.stmt | ast.ExceptHandler):
            start, end = (child.lineno, child.col_offset), (child.end_lineno, child.end_col_offset)
            holds = start <= (line, column) and (last_line, last_column) <= end
        else:  # such as an item of a with
            holds = _holding(child, position) is not None
        if holds:
            return child
    return None


def _is_in_lines(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.match_case):
        return any(_is_in_lines(statement, line) for statement in node.body)
    return isinstance(node, ast.stmt | ast.ExceptHandler) and (
        node.lineno <= line <= (node.end_lineno or node.lineno)
    )


def _asks_once(statement: ast.AST) -> bool:
    """Return whether it is an ``if`` or ``assert`` that asks for a truth value in one place."""
    if not isinstance(statement, ast.If | ast.Assert):
        return False
    nodes = ast.walk(statement if isinstance(statement, ast.Assert) else statement.test)
    return not any(
        isinstance(node, ast.BoolOp | ast.IfExp | ast.Lambda | ast.comprehension)
        or (isinstance(node, ast.Compare) and len(node.ops) > 1)
        for node in nodes
    )


def _leads_to_raise(path: Sequence[ast.AST], answer: bool) -> bool:
    """Return whether an answer to an ``if`` or ``assert`` always leads to a raise."""
    node = path[-1]
    if isinstance(node, ast.If | ast.Assert):  # Python 3.11 asks at the place of the statement
        above = [*path, node.test]
        while isinstance(above[-1], ast.UnaryOp) and isinstance(above[-1].op, ast.Not):
            above.append(above[-1].operand)
    else:
        above = [*path]
    if isinstance(above[-1], ast.Compare) and len(above[-1].ops) > 1 and answer:
        return False  # the next comparison decides
    for inner, outer in pairwise(reversed(above)):
        if isinstance(outer, ast.UnaryOp) and isinstance(outer.op, ast.Not):
            answer = not answer
        elif isinstance(outer, ast.BoolOp):
            if answer is not isinstance(outer.op, ast.Or) and inner is not outer.values[-1]:
                return False  # the next operand decides
        elif isinstance(outer, ast.Assert):
            return inner is outer.test and not answer
        elif isinstance(outer, ast.If) and inner is outer.test:
            side = outer.body if answer else outer.orelse
            return _raises([*side, *_following(above[above.index(outer) - 1], outer)])
        else:
            return False
    return False


def _following(block: ast.AST, statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements after a statement in the same block."""
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(block, name, None)
        if isinstance(statements, list) and statement in statements:
            return statements[statements.index(statement) + 1 :]
    return []


def _raises(statements: Iterable[ast.stmt]) -> bool:
    """Return whether statements, run in order, always end in a raise of their own."""
    for statement in statements:
        if isinstance(statement, ast.Assert):
            if isinstance(statement.test, ast.Constant) and not statement.test.value:
                return True
        elif not isinstance(statement, _SIMPLE):
            return isinstance(statement, ast.Raise)
    return False


def _catches(frame: FrameType, path: Sequence[ast.AST]) -> bool:
    """Return whether a frame may continue after an exception at the end of a path."""
    if len(path) == 1:  # its source is not known
        if _HAS_COLUMNS:
            return bool(frame.f_code.co_exceptiontable)
        blocks = {"SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH"}
        return any(each.opname in blocks for each in dis.get_instructions(frame.f_code))
    for outer, inner in pairwise(path):
        if isinstance(outer, _TRY) and inner in outer.body:
            leaves = any(isinstance(n, ast.Return) for s in outer.finalbody for n in ast.walk(s))
            catches = leaves or not all(_raises(handler.body) for handler in outer.handlers)
        elif isinstance(outer, ast.With | ast.AsyncWith) and inner in outer.body:
            catches = not all(_lets_pass(frame, item.context_expr) for item in outer.items)
        else:
            catches = False
        if catches:
            return True
    return False


def _lets_pass(frame: FrameType, manager: ast.expr) -> bool:
    """Return whether the context manager of a ``with`` is known to catch nothing, like torch's."""
    expression = manager.func if isinstance(manager, ast.Call) else manager
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        names.insert(0, expression.attr)
        expression = expression.value
    if not isinstance(expression, ast.Name):
        return False
    known = {**frame.f_builtins, **frame.f_globals, **frame.f_locals}
    value = known.get(expression.id)
    for name in names:
        value = inspect.getattr_static(value, name, None)
    return value is nullcontext or str(getattr(value, "__module__", "")).startswith("torch.")
