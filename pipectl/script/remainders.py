"""Whether a script makes a step of the batches that are left at the end of an epoch, where these
are fewer than it accumulates.

It is stopped in its first step, so its text tells: ``if (i + 1) % n == 0 or i + 1 == len(loader)``.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch.optim.optimizer import Optimizer

from pipectl.script.loops import (
    Around,
    Frame,
    is_over_data,
    loops_around,
    part_around,
    statements_around,
    statements_in,
    trains_itself,
)
from pipectl.script.optimizers import unwrapped
from pipectl.script.program import Place
from pipectl.script.values import UnknownError, evaluated, number, value_of

_MAX_DEPTH = 8
"""Of variables that are computed from others."""


def steps_rest(
    frames: Iterable[Frame], data: Collection[Place], optimizer: Any, batches: int
) -> bool | None:
    """Return whether the batches that are left make a step; None if the text does not tell.

    Args:
        frames: of the stack at the first step.
        data: the lines that were being run when the first batch was read.
        optimizer: that stepped.
        batches: of an epoch.
    """
    frames = list(frames)
    if trains_itself(frames):
        return True
    for _, _, own, _ in frames:  # of accelerate
        state = getattr(own.get("self"), "gradient_state", None)
        if getattr(state, "num_steps", 1) > 1:
            return bool(state.sync_with_dataloader)  # type: ignore[union-attr]
    loop = next((each for each in loops_around(frames) if is_over_data(each, data)), None)
    if loop is None:
        return None
    others = (value_of(each, loop.names) for each in _stepped_after(loop))
    if any(isinstance(each, Optimizer) and unwrapped(each) is optimizer for each in others):
        return True
    return _is_true_at_last(loop, frames, batches)


def _stepped_after(loop: Around) -> Iterator[ast.expr]:
    """Yield what is stepped after a loop, before the same function ends or the loop comes again."""
    end: int = loop.node.end_lineno
    for node in ast.walk(part_around(loop.file, loop.node.lineno - 1, end)):
        if isinstance(node, ast.Call) and node.lineno > end:
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr == "step":
                yield from (function.value, *node.args)  # scaler.step(optimizer)


def _is_true_at_last(loop: Around, frames: list[Frame], batches: int) -> bool | None:
    """Whether the conditions of a step hold for the last batch, as far as they ask for its number;
    None if none does.
    """
    numbered = _number_of_batch(loop, batches)
    if numbered is None:
        return None
    variable, last = numbered
    made = _assigned(loop)
    found: bool | None = None
    for each in statements_around(frames, (ast.If, ast.For, ast.While)):
        if each.file == loop.file and each.node.lineno == loop.node.lineno:
            return found
        if isinstance(each.node, ast.If) and each.file == loop.file:
            test = _expanded(each.node.test, made, _MAX_DEPTH)
            if not any(isinstance(x, ast.Name) and x.id == variable for x in ast.walk(test)):
                continue
            with suppress(UnknownError):
                is_met = bool(evaluated(test, {**each.names, variable: last}))
                found = is_met if found is None else found and is_met
                continue
            return None
    return None


def _number_of_batch(loop: Around, batches: int) -> tuple[str, int] | None:
    """The variable that numbers the batches, and its value for the last one."""
    target = loop.node.target
    for call in ast.walk(loop.node.iter):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "enumerate":
            starts = [*call.args[1:], *(key.value for key in call.keywords)]
            start = number(starts[0], loop.names) if starts else 0
            is_pair = isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name)
            if is_pair and start is not None:
                return target.elts[0].id, start + batches - 1
    return None


def _assigned(loop: Around) -> dict[str, ast.expr]:
    """What a loop computes once in each round, by the names of the variables."""
    statements = list(statements_in(loop.node.body))
    stored = [
        name.id
        for name in ast.walk(loop.node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    ]
    return {
        each.targets[0].id: each.value
        for each in statements
        if isinstance(each, ast.Assign)
        and isinstance(each.targets[0], ast.Name)
        and stored.count(each.targets[0].id) == 1
    }


def _expanded(node: ast.expr, made: Mapping[str, ast.expr], depth: int) -> ast.expr:
    """An expression with what variables are computed from in their place."""

    class Expand(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            if depth and name.id in made:
                return _expanded(made[name.id], made, depth - 1)
            return name

    expanded: ast.expr = Expand().visit(ast.parse(ast.unparse(node), mode="eval").body)
    return expanded
