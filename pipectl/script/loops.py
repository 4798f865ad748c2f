"""The loops around the optimizer's step: those of the script, by its text, and of libraries.

Loops of libraries are recognised by name when the script has imported them. Most need nothing of
their own: the ``Trainer`` of transformers and of TRL, accelerate and Lightning call modules,
``DataLoader``, ``backward`` and optimizers like any script.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch

import pipectl
from pipectl.faults import is_user_code
from pipectl.script.program import Place
from pipectl.script.rounds import names_loader, rounds_of
from pipectl.spec.code import read_source

Frame = tuple[CodeType, dict[str, Any], dict[str, Any], int]
"""Of the stack: its code, globals, locals and line."""

_WITHOUT_LOOPS = tuple(str(Path(each.__file__ or "").parent) for each in (torch, pipectl))
"""Packages whose loops around a step are over hooks."""
Loop = ast.For | ast.While
"""Of a script."""

Replacement = tuple[Any, str, Any]
"""An object, the name of its attribute, and what replaces it."""


def replacements() -> Iterator[Replacement]:
    """Yield what is to be replaced in libraries that are loaded by now."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is not None and hasattr(trainer, "get_batch_samples"):
        yield trainer, "get_batch_samples", _alone(trainer.get_batch_samples)


def _alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the loss of each accumulated batch depend on no other one.

    The trainer divides it by the number of tokens in all of them. That is the first one's times
    their number, if all have equally many.
    """

    def batches(self: Any, iterator: Any, count: int, *args: Any, **kwargs: Any) -> Any:
        found = original(self, iterator, count, *args, **kwargs)
        items = original(self, iter(found[0][:1]), 1, *args, **kwargs)[1]
        return found[0], items if items is None else items * len(found[0])

    return batches


def _trainer(frames: Iterable[Frame], module: str) -> Any:
    """Return the object that trains, of a class named Trainer in a module; None without one."""
    for _, _, own, _ in frames:
        for value in (own.get("self"), own.get("trainer")):
            kinds = ((kind.__module__, kind.__name__) for kind in type(value).__mro__)
            if any(name == "Trainer" and module in place for place, name in kinds):
                return value
    return None


def trains_itself(frames: Iterable[Frame]) -> bool:
    """Whether a trainer of transformers or Lightning makes the steps."""
    frames = list(frames)
    return any(_trainer(frames, name) is not None for name in ("transformers.trainer", "lightning"))


def leaves_out(frames: Iterable[Frame], batches: int | None) -> int | None:
    """Return how many batches of an epoch Lightning reads, where it leaves out others
    (``limit_train_batches``, ``overfit_batches``); None where it does not.

    Args:
        batches: of an epoch of the loader.
    """
    read = getattr(_trainer(list(frames), "lightning"), "num_training_batches", None)
    return int(read) if read is not None and batches is not None and read < batches else None


def steps_of_trainer(frames: Iterable[Frame], per_epoch: int | None) -> int | None:
    """Return the optimizer steps of a trainer; None if there is none, or it does not end.

    Args:
        frames: of the stack at the first step.
        per_epoch: steps of an epoch, if that is known.
    """
    frames = list(frames)
    steps: Any = None
    if (trainer := _trainer(frames, "transformers.trainer")) is not None:
        steps = trainer.state.max_steps
    elif (trainer := _trainer(frames, "lightning")) is not None:
        steps, epochs = trainer.max_steps, trainer.max_epochs
        if steps < 0 and epochs is not None and epochs > 0 and per_epoch is not None:
            steps = epochs * per_epoch
    return steps if isinstance(steps, int) and steps > 0 else None


def interval_of_trainer(
    frames: Iterable[Frame], schedule: Any, per_epoch: Callable[[], int]
) -> int | None:
    """Return the optimizer steps between two steps of a schedule; None without a trainer."""
    frames = list(frames)
    if _trainer(frames, "transformers.trainer") is not None:
        return 1
    for config in getattr(_trainer(frames, "lightning"), "lr_scheduler_configs", ()):
        if config.scheduler is schedule:
            steps = 1 if config.interval == "step" else per_epoch()
            return steps * int(config.frequency)
    return None


# Loops of the script.


class Around(NamedTuple):
    """A statement of the user around the optimizer's step.

    Args:
        node: a loop, or an ``if``.
        names: the variables at the first step.
        line: of the step, or of what leads to it, in this file.
    """

    file: str
    node: Any
    names: dict[str, Any]
    line: int


def comes_again(frames: Iterable[Frame], made: Collection[Place]) -> bool:
    """Whether the innermost loop around a step is within another one that may run it again.

    Args:
        made: the lines that made the optimizer.
    """
    frames = list(frames)
    if trains_itself(frames):
        return False
    outer = list(loops_around(frames))[1:]
    return any(
        isinstance(each.node, ast.While) or (rounds_of(each.node.iter, each.names) or 2) > 1
        for each in outer
        if not begins_anew(each, made)
    )


def begins_anew(loop: Around, made: Collection[Place]) -> bool:
    """Whether every round of a loop makes an optimizer of its own, as a loop over folds does.

    Args:
        made: the lines that made the optimizer.
    """
    node = loop.node
    end = node.end_lineno or node.lineno
    first = node.body[0].lineno  # that of the loop, if all is on one line
    return any(where == loop.file and first <= line <= end for where, line in made)


def statements_around(
    frames: Iterable[Frame], kinds: tuple[type[ast.AST], ...]
) -> Iterator[Around]:
    """Yield the statements of some kinds that hold the step, innermost first."""
    for code, scope, own, line in frames:
        if is_user_code(code.co_filename):
            for node in _around(code.co_filename, line, kinds):
                yield Around(code.co_filename, node, {**scope, **own}, line)


def loops_around(frames: Iterable[Frame]) -> Iterator[Around]:
    """Yield the loops around the step, innermost first."""
    return statements_around(frames, (ast.For, ast.While))


def loops_at(place: Place) -> list[Loop]:
    """The loops around a line, of the function that holds it, innermost first."""
    return list(_around(*place, (ast.For, ast.While)))


def function_at(place: Place) -> ast.AST:
    """The innermost function that holds a line; all statements of the file outside of any."""
    file, line = place
    return part_around(file, line, line, (ast.FunctionDef,))


def part_around(
    file: str,
    first: int,
    last: int,
    kinds: tuple[type[ast.AST], ...] = (ast.For, ast.While, ast.FunctionDef),
) -> ast.AST:
    """The innermost loop or function that holds some lines; all statements of the file outside of
    any.
    """
    tree = tree_of(file)
    around: list[Any] = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    around = [node for node in around if node.lineno <= first and last <= (node.end_lineno or 0)]
    part: ast.AST = max(around, key=lambda node: node.lineno, default=tree)
    return part


def _around(file: str, line: int, kinds: tuple[type[ast.AST], ...]) -> Iterator[Any]:
    """Yield the statements of the innermost function that hold a line, innermost first."""
    tree = tree_of(file)
    inside = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (*kinds, ast.FunctionDef))
        and node.lineno <= line <= (node.end_lineno or node.lineno)  # type: ignore[attr-defined]
    ]
    for node in sorted(inside, key=lambda node: -node.lineno):  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef):
            return
        yield node


def tree_of(file: str) -> ast.Module:
    """The statements of a file; none if it cannot be read."""
    with suppress(OSError, SyntaxError, ValueError):
        return _parsed(read_source(Path(file)))
    return ast.Module([], [])


@lru_cache(64)
def _parsed(source: bytes) -> ast.Module:
    return ast.parse(source)


def loop_of_library(frames: Iterable[Frame]) -> Place | None:
    """The line of a library that has a loop around the step, within all loops of the user."""
    for code, _, _, line in frames:
        place = code.co_filename, line
        if not place[0].startswith(_WITHOUT_LOOPS) and loops_at(place):
            return None if is_user_code(place[0]) else place
    return None


def is_over_data(loop: Around, data: Collection[Place]) -> bool:
    """Whether a loop is over the training data, or over what reads them.

    Args:
        data: the lines that were being run when the first batch was read.
    """
    node = loop.node
    if not isinstance(node, ast.For):
        return False
    if not any(_begins(loop, place) for place in data):
        return False
    is_apart = node.body[0].lineno > (node.iter.end_lineno or node.lineno)
    is_read_here = is_apart or rounds_of(node.iter, loop.names) is None
    return is_read_here or names_loader(node.iter, loop.names)


def batches_in(loop: Around, data: list[Place], batches: int | None) -> float | None:
    """How many batches a loop over the training data has; None if that is not known.

    Args:
        data: see :func:`is_over_data`; innermost first.
        batches: of the loader.
    """
    found = rounds_of(loop.node.iter, loop.names)
    if found is not None:
        return found
    calls = (each for each in ast.walk(loop.node.iter) if isinstance(each, ast.Call))
    if any(ast.unparse(each.func).endswith(("islice", "zip", "takewhile")) for each in calls):
        return None
    # A generator of the user's reads them: whatever else it does is not known.
    for place in data:
        if _begins(loop, place):
            return batches
        if not _passes_on(place):
            return None
    return batches


def _begins(loop: Around, place: Place) -> bool:
    """Whether a line is one of those that say what a ``for`` goes through."""
    return place[0] == loop.file and _begins_at(loop.node, place[1])


def _begins_at(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= (node.iter.end_lineno or node.lineno))


def _passes_on(place: Place) -> bool:
    """Whether the function that holds a line has one loop, which ends with what it goes through."""
    file, line = place
    functions = [
        node
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    for function in sorted(functions, key=lambda node: -node.lineno)[:1]:
        inner = list(ast.walk(function))
        loops = [node for node in inner if isinstance(node, Loop)]
        if any(isinstance(node, ast.Return | ast.Break | ast.While) for node in inner):
            return False
        return len(loops) < 2 and all(_begins_at(loop, line) for loop in loops)
    return False


def jumps(
    frames: Iterable[Frame], data: Collection[Place]
) -> Iterator[tuple[Around, int, str, bool]]:
    """Yield loop, line and statement of what ends a loop around the step, or a round of it, early:
    ``break``, ``continue``, or a ``return`` of the function; and whether that loop is over the
    data. A ``continue`` of other loops is left out.
    """
    for loop in loops_around(frames):
        over_data = is_over_data(loop, data)
        kinds = (ast.Break, ast.Return, *([ast.Continue] if over_data else []))
        for node in statements_in(loop.node.body):
            if isinstance(node, kinds):
                yield loop, node.lineno, type(node).__name__.lower(), over_data


def statements_in(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a loop, without those of loops and functions within it."""
    for node in body:
        yield node
        if not isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.ClassDef):
            for _, value in ast.iter_fields(node):
                if isinstance(value, list):
                    yield from statements_in(each for each in value if isinstance(each, ast.stmt))


def freezes(frames: Iterable[Frame]) -> list[tuple[str, int]]:
    """Return the places in loops around the step that set ``requires_grad``."""
    found = {
        (loop.file, node.lineno)
        for loop in loops_around(frames)
        for node in ast.walk(loop.node)
        if isinstance(node, ast.Attribute)
        and (
            node.attr == "requires_grad_"
            or (node.attr == "requires_grad" and isinstance(node.ctx, ast.Store))
        )
    }
    return sorted(found)


def hand_set(script: Path, option: str = "lr") -> list[tuple[str, int]]:
    """Return the places where a script, or a file in its directory that it has imported, sets an
    option of its optimizer by hand, as ``group["lr"] = rate`` does.
    """
    found = []
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    for file in dict.fromkeys((str(script), *files)):
        if file and Path(file).is_relative_to(script.parent) and is_user_code(file):
            stored = (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Subscript))
            lines = sorted(node.lineno for node in stored if _sets(node, option))
            found += [(file, line) for line in lines]
    return found


def _sets(node: ast.Subscript, option: str) -> bool:
    is_set = isinstance(node.ctx, ast.Store)
    return is_set and isinstance(node.slice, ast.Constant) and node.slice.value == option


def names_of(value: Any, frames: Iterable[Frame]) -> Iterator[str]:
    """Yield the variables that are a value, or whose attribute or entry it is."""
    for _, scope, own, _ in frames:
        for name, item in (*own.items(), *scope.items()):
            if item is value:
                yield name
            elif isinstance(item, dict):
                yield from (f"{name}[{key!r}]" for key, each in item.items() if each is value)
            elif name == "self":
                inner = vars(item) if hasattr(item, "__dict__") else {}
                yield from (f"self.{key}" for key, each in inner.items() if each is value)
