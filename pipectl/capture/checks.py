"""Checks of values, which a graph leaves out: ``assert``, and ``raise`` under an ``if``.

A graph contains no branch on values. If one side of a branch only raises an exception, every step
that continues has taken the other side, so only that side is captured. Models check themselves like
this (``assert not x.isnan().any()``), and ``torch.distributions`` checks its arguments. The source
of the statement that asks shows which side raises; the source of its callers shows whether the
model catches what it raises. Only the line that asks is known, so a check counts if all of its
conditions pass with the same answer (``assert a and b``, not ``assert a and not b``). A submodule
with any other branch on values is kept whole. From 2.15 on, torch exports its own checks as
asynchronous asserts; such an operator counts as a check.
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
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from pipectl.capture.model_with_loss import ModelWithLoss
from pipectl.torch_api import ASSERT_METADATA, get_proxy_mode, get_proxy_slot

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NESTED_CODE = {"<lambda>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"}
_HAS_GROUPS = sys.version_info >= (3, 11)
"""Whether Python has ``except*``, and tables of exceptions in code."""
_TRY = (ast.Try, ast.TryStar) if _HAS_GROUPS else (ast.Try,)
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
    path = _path(frame.f_code.co_filename, frame.f_lineno)
    statement, *above = reversed(path)
    block = above[0] if above else None
    if frame.f_code.co_name in _NESTED_CODE or _share_line(block, frame.f_lineno):
        return None  # which code of the line asks is not known
    if isinstance(statement, ast.Assert):
        answers = _passing_answers(statement.test, True)
    elif isinstance(statement, ast.If) and _raises(statement.body) is not _raises(statement.orelse):
        answers = _passing_answers(statement.test, not _raises(statement.body))
    else:
        return None
    asks_in_call = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")
    if asks_in_call and not _calls_only_bool(statement.test):
        return None  # all([...]) asks, say, and answers something else
    if len(answers) != 1 or _catches(frame, path) or is_caught(frame.f_back):
        return None
    return answers.pop()


def is_caught(frame: FrameType | None) -> bool:
    """Return whether the model catches an exception from a frame or from what it calls.

    The handlers of torch and of pipectl, which every call of a module passes, raise it again.
    """
    while frame is not None and frame.f_code is not ModelWithLoss.forward.__code__:
        is_users = not frame.f_code.co_filename.startswith(_UNCAUGHT)
        if is_users and _catches(frame, _path(frame.f_code.co_filename, frame.f_lineno)):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=1024)
def _path(filename: str, line: int) -> list[ast.AST]:
    """Return the function around a line, and in it all that is around the line, down to the
    innermost statement."""
    path: list[ast.AST] = [_tree(filename)]
    while inner := _in_line(path[-1], line):
        path.append(inner[0])
    first = max((i for i, node in enumerate(path) if isinstance(node, _FUNCTIONS)), default=0)
    return path[first:]


@lru_cache(maxsize=64)
def _tree(filename: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ast.Module([], [])


def _in_line(node: ast.AST, line: int) -> list[ast.AST]:
    """Return the statements, handlers and cases right within a node that contain a line; none if
    the line is that of its condition."""
    test = getattr(node, "test", None)
    if isinstance(test, ast.expr) and test.lineno <= line <= (test.end_lineno or test.lineno):
        return []
    kinds = (ast.stmt, ast.ExceptHandler, ast.match_case)
    inner = (child for child in ast.iter_child_nodes(node) if isinstance(child, kinds))
    return [child for child in inner if _contains(child, line)]


def _contains(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.match_case):
        return any(_contains(statement, line) for statement in node.body)
    return isinstance(node, ast.stmt | ast.ExceptHandler) and (
        node.lineno <= line <= (node.end_lineno or node.lineno)
    )


def _share_line(block: ast.AST | None, line: int) -> bool:
    """Return whether a line has several statements of a block, or one and the head of the block."""
    headed = ast.With, ast.AsyncWith, ast.For
    is_head = isinstance(block, headed) and block.lineno == line
    return block is not None and (is_head or len(_in_line(block, line)) > 1)


def _passing_answers(test: ast.expr, passing: bool) -> set[bool]:
    """Return the answers with which each operand of a condition lets a check pass.

    Args:
        passing: value of the condition with which the check passes.

    Returns:
        No answers if an operand does not decide by itself.
    """
    nothing = set[bool]()
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _passing_answers(test.operand, not passing)
    if isinstance(test, ast.BoolOp):
        if passing is not isinstance(test.op, ast.And):
            return nothing
        of_each = [_passing_answers(operand, passing) for operand in test.values]
        return set().union(*of_each) if all(of_each) else nothing
    if isinstance(test, ast.Compare) and len(test.ops) > 1:
        parts, is_chain = [test.left, *test.comparators], True
    else:
        parts, is_chain = [test], False
    if any(_asks_within(part) for part in parts) or (is_chain and not passing):
        return nothing
    return {passing}


def _asks_within(expression: ast.expr) -> bool:
    """Return whether computing an expression may ask for the truth value of a part of it."""
    asking = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.comprehension, ast.Not, ast.In, ast.NotIn)
    nodes = [*ast.walk(expression)]
    return any(
        isinstance(node, asking) or (isinstance(node, ast.Compare) and len(node.ops) > 1)
        for node in nodes
    )


def _calls_only_bool(test: ast.expr) -> bool:
    """Return whether ``bool`` is the only function, besides methods, that a condition calls."""
    calls = (node.func for node in ast.walk(test) if isinstance(node, ast.Call))
    return all(name.id == "bool" for name in calls if isinstance(name, ast.Name))


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
        if _HAS_GROUPS:
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
