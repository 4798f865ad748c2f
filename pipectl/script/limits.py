"""Counts by which a script ends its loops: ``while epoch < 3``, ``if step >= max_steps: break``."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pipectl.faults import is_user_code
from pipectl.script.loops import Around, Frame, Loop, loops_at, statements_in, tree_of
from pipectl.script.values import number, value_of


class _Test(NamedTuple):
    """A comparison by which a loop ends.

    Args:
        variable, limit: that are compared.
        over: 1 if the loop ends when the variable is larger than the limit, 0 if when it is equal.
        end: the line from which on the comparison counts.
        line: of the ``while``, or of what ends the loop.
    """

    variable: ast.expr
    limit: ast.expr
    over: int
    end: int
    line: int


def limit_of(frames: Iterable[Frame], line: int, accumulation: int) -> int | None:
    """Return after how many optimizer steps the statement of a line ends a loop, where it says so:
    ``if step >= max_steps: break``, or ``while step < max_steps:``, with a variable that counts
    them from 0 (``step += 1`` after the step).

    Args:
        frames: of the stack at the first step.
        line: of a ``break``, a ``return`` or a ``while``.
        accumulation: batches in a step, if the variable counts these.
    """
    for code, scope, own, stepped in frames:
        if is_user_code(code.co_filename):
            tree = tree_of(code.co_filename)
            for test in _tests_of(ast.walk(tree), line):
                found = _limit(tree, test, stepped, {**scope, **own}, accumulation)
                if found is not None:
                    return found
            if loops_at((code.co_filename, stepped)):
                return None  # what is further out counts rounds of them
    return None


def rounds_of_while(loop: Around) -> tuple[int, int] | None:
    """Return how often a ``while`` runs whose every round counts, and the line that ends it:
    ``while epoch < 3:`` with ``epoch += 1`` at the end of its body. None if that is not known.
    """
    node, names = loop.node, loop.names
    statements = list(statements_in(node.body))
    ends = [each.lineno for each in statements if isinstance(each, ast.Break)]
    found = []
    for line in (node.lineno, *ends):
        for test in _tests_of([node, *statements], line):
            limit, value = number(test.limit, names), number(test.variable, names)
            count = _count_of(test, node)
            if limit is None or value is None or count is None or count not in node.body:
                continue
            if loop.line < count.lineno < test.end:
                found.append((max(limit + test.over - value, 1), test.line))
    return min(found, default=None)


def _count_of(test: _Test, node: ast.AST) -> ast.stmt | None:
    """The only statement that counts a variable of a test."""
    text = f"{ast.unparse(test.variable)} += 1"
    found = [each for each in ast.walk(node) if isinstance(each, ast.AugAssign)]
    found = [each for each in found if ast.unparse(each) == text]
    return found[0] if len(found) == 1 else None


def _tests_of(nodes: Iterable[ast.AST], line: int) -> Iterator[_Test]:
    """Yield the comparisons of a variable with a limit by which a line ends a loop."""
    for node in nodes:
        if not isinstance(node, ast.If | ast.While):
            continue
        is_while = isinstance(node, ast.While)
        kinds = (ast.Lt, ast.LtE) if is_while else (ast.GtE, ast.Eq, ast.Gt)
        lines = [node.lineno] if is_while else [each.lineno for each in node.body]
        for compared in _compared(node.test) if line in lines else ():
            left, (kind, *more) = compared.left, compared.ops
            if isinstance(kind, kinds) and isinstance(left, ast.Name | ast.Attribute) and not more:
                end = (node.end_lineno or line) + 1 if is_while else node.lineno
                over = int(isinstance(kind, ast.Gt | ast.LtE))
                yield _Test(left, compared.comparators[0], over, end, line)


def _compared(test: ast.expr) -> Iterator[ast.Compare]:
    """Yield the comparison in a test, which may ask for None, too: ``n is not None and i >= n``."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    others = [each for each in parts if "is not None" not in ast.unparse(each)]
    if len(others) == 1 and isinstance(others[0], ast.Compare):
        yield others[0]


def _limit(
    tree: ast.AST, test: _Test, stepped: int, names: Mapping[str, Any], accumulation: int
) -> int | None:
    """Return the steps until a variable that counts steps from 0, or batches, reaches a limit."""
    limit, count = number(test.limit, names), _count_of(test, tree)
    blocks = (
        block
        for node in ast.walk(tree)
        for field in ("body", "orelse")
        if isinstance(block := getattr(node, field, None), list)
    )
    block = next((each for each in blocks if count in each), [])
    around = [node for node in block if node.lineno <= stepped <= (node.end_lineno or stepped)]
    if limit is None or count is None or not around or not stepped < count.lineno < test.end:
        return None
    inner = (node for node in ast.walk(around[0]) if isinstance(node, Loop))
    if any(node.lineno <= stepped <= (node.end_lineno or stepped) for node in inner):
        return None  # it counts the rounds of a loop around that one
    before = value_of(test.variable, names)
    batches = {0: 1, accumulation - 1: accumulation}.get(before)
    return None if batches is None else (limit + test.over) // batches
