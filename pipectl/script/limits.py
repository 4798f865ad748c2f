"""Counts by which a script ends its loops: ``while epoch < 3``, ``if step >= max_steps: break``."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pipectl.faults import is_user_code
from pipectl.script.loops import (
    Around,
    Frame,
    Loop,
    function_at,
    loops_at,
    statements_in,
    tree_of,
)
from pipectl.script.values import UnknownError, evaluated, number, value_of

_SETTINGS = {"args", "opt", "opts", "config", "cfg", "conf", "hparams", "flags"}
"""Names of what a script is told once, with all that it holds."""


class End(NamedTuple):
    """What ends a loop once the optimizer has made a number of steps.

    Args:
        steps: of the whole script.
        before: whether it is looked at before the steps of a round, and not after them.
        is_exact: whether it ends the loop at this number alone, and not at larger ones.
        of_batches: whether the script counts batches, several of which are a step.
        line: of the ``while``, or of what ends the loop.
    """

    steps: int
    before: bool
    is_exact: bool
    of_batches: bool
    line: int

    def is_met(self, done: float) -> bool:
        """Whether it ends the loop after a number of steps."""
        return done == self.steps if self.is_exact else done >= self.steps


class _Test(NamedTuple):
    """A comparison by which a loop ends.

    Args:
        node: the ``if`` or ``while``.
        variable, limit: that are compared.
        over: 1 if the loop ends when the variable is larger than the limit, 0 if when it is equal.
        end: the line from which on the comparison counts.
        is_exact: see :class:`End`.
        line: of the ``while``, or of what ends the loop.
    """

    node: ast.If | ast.While
    variable: ast.expr
    limit: ast.expr
    over: int
    end: int
    is_exact: bool
    line: int


def end_of(
    frames: Iterable[Frame], loops: Sequence[Around], loop: Around, line: int, accumulation: int
) -> End | None:
    """Return after how many optimizer steps the statement of a line ends a loop, where it says so:
    ``if step >= max_steps: break``, or ``while step < max_steps:``, with a variable that counts
    the steps of the whole script (``step += 1`` after the step).

    Args:
        frames: of the stack at the first step.
        loops: around the step, that keep the optimizer, innermost first.
        loop: that the statement ends.
        line: of a ``break``, a ``return`` or a ``while``.
        accumulation: batches in a step, if the variable counts these.
    """
    inner: list[ast.AST] = []
    for code, scope, own, stepped in frames:
        if not is_user_code(code.co_filename):
            continue
        place, names = (code.co_filename, stepped), {**scope, **own}
        is_outermost = bool(loops) and place == (loops[-1].file, loops[-1].line)
        if not is_outermost:
            inner.append(function_at(place))
        if code.co_filename == loop.file:
            tree = tree_of(loop.file)
            for test in _tests_of(ast.walk(tree), line, names):
                local = own if own is not scope and not is_outermost else {}
                is_kept = _root(test.variable) not in {*local} - {"self", *code.co_freevars}
                found = _end(tree, test, loop, stepped, names, accumulation)
                if found is not None and (is_kept or isinstance(test.variable, ast.Attribute)):
                    again = [*inner, *(each.node for each in loops)]
                    return found if _stores(again, test.variable) == 1 else None
        if loops_at(place):
            return None  # what is further out counts rounds of them
    return None


def is_never(loop: Around, line: int) -> bool:
    """Whether a statement of a loop is in an ``if`` that what the script was told turns off:
    ``if args.dry_run: break``.
    """
    for each in statements_in(loop.node.body):
        if isinstance(each, ast.If):
            end = each.body[-1].end_lineno or each.body[-1].lineno
            if each.body[0].lineno <= line <= end and any(
                _told(part, loop.file, loop.names) is False for part in _parts(each.test)
            ):
                return True
    return False


def rounds_of_while(loop: Around) -> tuple[int, int] | None:
    """Return how often a ``while`` runs whose every round counts, and the line that ends it:
    ``while epoch < 3:`` with ``epoch += 1`` at the end of its body. None if that is not known.
    """
    node, names = loop.node, loop.names
    statements = list(statements_in(node.body))
    ends = [each.lineno for each in statements if isinstance(each, ast.Break)]
    found = []
    for line in (node.lineno, *ends):
        for test in _tests_of([node, *node.body], line, names):
            limit, value = number(test.limit, names), number(test.variable, names)
            count = _count_of(test, node)
            if limit is None or value is None or count is None or count not in node.body:
                continue
            if loop.line < count.lineno < test.end and _stores([node], test.variable) == 1:
                found.append((max(limit + test.over - value, 1), test.line))
    return min(found, default=None)


def _count_of(test: _Test, node: ast.AST) -> ast.stmt | None:
    """The only statement that counts a variable of a test."""
    text = f"{ast.unparse(test.variable)} += 1"
    found = [each for each in ast.walk(node) if isinstance(each, ast.AugAssign)]
    found = [each for each in found if ast.unparse(each) == text]
    return found[0] if len(found) == 1 else None


def _stores(parts: Iterable[ast.AST], variable: ast.expr) -> int:
    """How many statements in parts of a script set a variable, or what it is an attribute of."""
    nodes = {id(node): node for part in parts for node in ast.walk(part)}.values()
    stored = [each for each in nodes if isinstance(getattr(each, "ctx", None), ast.Store)]
    if isinstance(variable, ast.Attribute):
        own = [x for x in stored if isinstance(x, ast.Attribute) and x.attr == variable.attr]
    else:
        own = []
    root = _root(variable)
    return len(own) + sum(isinstance(each, ast.Name) and each.id == root for each in stored)


def _root(node: ast.expr) -> str:
    """The name of the variable that an expression is, or is an attribute of."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _tests_of(nodes: Iterable[ast.AST], line: int, names: Mapping[str, Any]) -> Iterator[_Test]:
    """Yield the comparisons of a variable with a limit by which a line ends a loop."""
    for node in nodes:
        if not isinstance(node, ast.If | ast.While):
            continue
        is_while = isinstance(node, ast.While)
        kinds = (ast.Lt, ast.LtE) if is_while else (ast.GtE, ast.Eq, ast.Gt)
        lines = [node.lineno] if is_while else [each.lineno for each in node.body]
        for compared in _compared(node.test, names) if line in lines else ():
            left, (kind, *more) = compared.left, compared.ops
            if isinstance(kind, kinds) and isinstance(left, ast.Name | ast.Attribute) and not more:
                end = (node.end_lineno or line) + 1 if is_while else node.lineno
                over, is_exact = int(isinstance(kind, ast.Gt | ast.LtE)), isinstance(kind, ast.Eq)
                yield _Test(node, left, compared.comparators[0], over, end, is_exact, line)


def _compared(test: ast.expr, names: Mapping[str, Any]) -> Iterator[ast.Compare]:
    """Yield the comparison in a test, which may ask for settings, too:
    ``n is not None and i >= n``.
    """
    others = [
        each
        for each in _parts(test)
        if "is not None" not in ast.unparse(each) and _told(each, None, names) is not True
    ]
    if len(others) == 1 and isinstance(others[0], ast.Compare):
        yield others[0]


def _parts(test: ast.expr) -> list[ast.expr]:
    """What must all be true for a test to be."""
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _told(part: ast.expr, file: str | None, names: Mapping[str, Any]) -> bool | None:
    """Whether a part of a test is true in all of a script, since it asks only for what this was
    told; None if it asks for anything else.

    Args:
        file: that may set a variable of its module once, which is told then, too.
    """
    nodes = list(ast.walk(part))
    held = {id(x.value) for x in nodes if isinstance(x, ast.Attribute)}
    for each in nodes:
        if isinstance(each, ast.Call):
            return None
        if isinstance(each, ast.Attribute) and id(each) not in held:
            owner = value_of(each.value, names)
            name = ast.unparse(each.value).rpartition(".")[2].lower()
            if not (isinstance(owner, argparse.Namespace) or name in _SETTINGS):
                return None
        if isinstance(each, ast.Name) and id(each) not in held and not _is_set_once(each, file):
            return None
    with suppress(UnknownError):
        return bool(evaluated(part, names))
    return None


def _is_set_once(name: ast.Name, file: str | None) -> bool:
    """Whether a file sets a variable in its outermost block, and nowhere else."""
    tree = tree_of(file) if file else ast.Module([], [])
    is_argument = any(isinstance(x, ast.arg) and x.arg == name.id for x in ast.walk(tree))
    outermost = [each for each in tree.body if isinstance(each, ast.Assign)]
    return not is_argument and _stores([tree], name) == 1 == _stores(outermost, name)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block


def _holds(node: ast.AST, line: int) -> bool:
    first: int = getattr(node, "lineno", 0)
    return first <= line <= (getattr(node, "end_lineno", None) or first)


def _end(
    tree: ast.AST,
    test: _Test,
    loop: Around,
    stepped: int,
    names: Mapping[str, Any],
    accumulation: int,
) -> End | None:
    """Return after how many steps a test ends a loop, by a variable that counts steps or batches.

    Args:
        stepped: the line of the step in the function that counts, or of what leads to it.
    """
    limit, count = number(test.limit, names), _count_of(test, tree)
    value = number(test.variable, names)
    if limit is None or count is None or value is None:
        return None
    blocks = list(_blocks(tree))
    block = next(each for each in blocks if count in each)
    around, counts_steps = _counted(block, blocks, stepped)
    if around is None or not stepped < count.lineno:
        return None
    inner = list(ast.walk(around))
    if any(isinstance(node, Loop) and _holds(node, stepped) for node in inner):
        return None  # it counts the rounds of a loop around that one
    before = isinstance(test.node, ast.While)
    if isinstance(test.node, ast.If):
        # Any other condition around it may let it never be looked at.
        ways = [each for each in blocks if any(_holds(node, loop.line) for node in each)]
        if not any(test.node in each for each in (block, *ways)):
            return None
        before = test.node.lineno < loop.line
        if not before and not count.lineno < test.end and loop.line == stepped:
            return None
    is_within = any(isinstance(node, ast.If) and _holds(node, stepped) for node in inner)
    is_within |= isinstance(around, ast.With) and "accumulate" in ast.unparse(around.items[0])
    total = limit + test.over
    if counts_steps or not is_within:
        is_counted = value == 0 or (accumulation == 1 and not counts_steps)
        of_batches = False
        total -= value
    else:
        is_counted = value == accumulation - 1
        of_batches = accumulation > 1
        total //= accumulation
    if not is_counted:
        return None
    return End(total, before, test.is_exact, of_batches, test.line)


def _counted(
    block: list[ast.stmt], blocks: list[list[ast.stmt]], stepped: int
) -> tuple[ast.stmt | None, bool]:
    """Return the statement with the step in the block that counts; and whether it is in the block
    around this one, an ``if`` that is met whenever the optimizer has stepped.
    """
    for around in block:
        if _holds(around, stepped):
            return around, False
    node = next(
        (x for each in blocks for x in each if isinstance(x, ast.If) and x.body is block), None
    )
    outer = next((each for each in blocks if node in each), [])
    for around in outer:
        if node is not None and _holds(around, stepped):
            text = ast.unparse(node.test)
            asked = [ast.unparse(x.test) for x in ast.walk(around) if isinstance(x, ast.If)]
            if text.endswith("sync_gradients") or text in asked:
                return around, True
    return None, False
