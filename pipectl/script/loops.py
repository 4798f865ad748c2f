"""The loops around the optimizer's step: those of the script, by its text, and of libraries.

Loops of libraries are recognised by name when the script has imported them. Most need nothing of
their own: the ``Trainer`` of transformers and of TRL, accelerate and Lightning call modules,
``DataLoader``, ``backward`` and optimizers like any script.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from pipectl.faults import is_user_code
from pipectl.script.program import Place
from pipectl.spec.code import read_source

Frame = tuple[CodeType, dict[str, Any], dict[str, Any], int]
"""Of the stack: its code, globals, locals and line."""

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}

_ITEMS_AND_STOP = 2
"""Arguments of ``islice(loader, 10)``."""
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


def comes_again(frames: Iterable[Frame], made: Collection[Place]) -> bool:
    """Whether the innermost loop around a step is within another one that will run it again.

    Args:
        made: the lines that made the optimizer.
    """
    frames = list(frames)
    if any(_trainer(frames, name) is not None for name in ("transformers.trainer", "lightning")):
        return False
    outer = list(loops_around(frames))[1:]
    return any(
        isinstance(loop, ast.While) or (range_of(loop, names) or 0) > 1
        for file, loop, names in outer
        if not begins_anew(file, loop, made)
    )


def begins_anew(file: str, loop: Loop, made: Collection[Place]) -> bool:
    """Whether every round of a loop makes an optimizer of its own, as a loop over folds does.

    Args:
        made: the lines that made the optimizer.
    """
    end = loop.end_lineno or loop.lineno
    return any(where == file and loop.lineno < line <= end for where, line in made)


def loops_around(frames: Iterable[Frame]) -> Iterator[tuple[str, Loop, dict[str, Any]]]:
    """Yield the file of every loop around the step, the loop and its names, innermost
    first.
    """
    for code, scope, own, line in frames:
        if is_user_code(code.co_filename):
            with suppress(OSError, SyntaxError, ValueError):
                tree = ast.parse(read_source(Path(code.co_filename)))
                for loop in _loops_of_function(tree, line):
                    yield code.co_filename, loop, {**scope, **own}


def _loops_of_function(tree: ast.AST, line: int) -> Iterator[Loop]:
    """Yield the loops of the innermost function that hold a line, innermost first."""
    inside = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While | ast.FunctionDef)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    for node in sorted(inside, key=lambda node: -node.lineno):
        if isinstance(node, ast.FunctionDef):
            return
        yield node


def range_of(loop: ast.For, names: Mapping[str, Any]) -> int | None:
    """How often a loop over a range of known numbers runs, or over one that a variable holds."""
    call: ast.expr | None = loop.iter
    part = next((each for each in ast.walk(loop.iter) if _is_islice(each)), None)
    if isinstance(part, ast.Call) and len(part.args) == _ITEMS_AND_STOP:
        return _number(part.args[1], names)
    while isinstance(call, ast.Call) and not ast.unparse(call.func).endswith("range"):  # trange
        call = call.args[0] if call.args else None  # tqdm(range(n))
    if isinstance(call, ast.Name | ast.Attribute):
        held = value_of(call, names)
        while not isinstance(held, range) and hasattr(held, "iterable"):  # bar = tqdm(range(n))
            held = held.iterable
        return len(held) if isinstance(held, range) else None
    if not isinstance(call, ast.Call):
        return None
    numbers = [_number(arg, names) for arg in call.args]
    if not numbers or any(number is None for number in numbers):
        return None
    return len(range(*map(int, numbers)))  # type: ignore[arg-type]


def reads_a_part(loop: ast.For) -> bool:
    """Whether a loop is over the first items of something, by ``islice``."""
    return any(map(_is_islice, ast.walk(loop.iter)))


def _is_islice(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("islice")


def is_endless(loop: ast.For, names: Mapping[str, Any]) -> bool:
    """Whether a loop is over what a generator function of the user gives that may read the data
    several times, or in part: one with a ``while`` or a ``return``.
    """
    for call in ast.walk(loop.iter):
        value = value_of(call.func, names) if isinstance(call, ast.Call) else None
        code = getattr(value, "__code__", None)
        if isinstance(code, CodeType) and is_user_code(code.co_filename):
            with suppress(OSError, SyntaxError, ValueError):
                tree = ast.parse(read_source(Path(code.co_filename)))
                for node in ast.walk(tree):
                    if isinstance(node, ast.FunctionDef) and node.lineno == code.co_firstlineno:
                        return any(isinstance(x, ast.While | ast.Return) for x in ast.walk(node))
    return False


def _number(node: ast.expr, names: Mapping[str, Any]) -> int | None:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number(node.left, names), _number(node.right, names)
        if left is None or right is None or (isinstance(node.op, ast.FloorDiv) and not right):
            return None
        return _OPERATORS[type(node.op)](left, right)
    value = node.value if isinstance(node, ast.Constant) else value_of(node, names)
    return int(value) if isinstance(value, int | float) and value == int(value) else None


def jumps(frames: Iterable[Frame]) -> Iterator[tuple[str, int, str, bool]]:
    """Yield file, line and statement of what ends a loop around the step, or a round of it, early:
    ``break``, ``continue``, or a ``return`` of the function; and whether that loop is over the
    data. A ``continue`` of other loops is left out.
    """
    for file, loop, names in loops_around(frames):
        over_data = isinstance(loop, ast.For) and range_of(loop, names) is None
        kinds = (ast.Break, ast.Return, *([ast.Continue] if over_data else []))
        for node in _statements(loop.body):
            if isinstance(node, kinds):
                yield file, node.lineno, type(node).__name__.lower(), over_data


class _Test(NamedTuple):
    """A comparison by which a loop ends.

    Args:
        variable, limit: that are compared.
        over: 1 if the loop ends when the variable is larger than the limit, 0 if when it is equal.
        end: the line from which on the comparison counts.
    """

    variable: ast.expr
    limit: ast.expr
    over: int
    end: int


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
            with suppress(OSError, SyntaxError, ValueError):
                tree = ast.parse(read_source(Path(code.co_filename)))
                for test in _tests_of(tree, line):
                    found = _limit(tree, test, stepped, {**scope, **own}, accumulation)
                    if found is not None:
                        return found
    return None


def _tests_of(tree: ast.AST, line: int) -> Iterator[_Test]:
    """Yield the comparisons of a variable with a limit by which a line ends a loop."""
    for node in ast.walk(tree):
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
                yield _Test(left, compared.comparators[0], over, end)


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
    name, limit = ast.unparse(test.variable), _number(test.limit, names)
    blocks = [
        block
        for node in ast.walk(tree)
        for field in ("body", "orelse")
        if isinstance(block := getattr(node, field, None), list)
    ]
    counts = [
        (each, block)
        for block in blocks
        for each in block
        if isinstance(each, ast.AugAssign) and ast.unparse(each) == f"{name} += 1"
    ]
    if limit is None or len(counts) != 1:
        return None
    count, block = counts[0]
    around = [node for node in block if node.lineno <= stepped <= (node.end_lineno or stepped)]
    if not around or not stepped < count.lineno < test.end:
        return None
    batches = accumulation if isinstance(around[0], ast.If | ast.For | ast.While) else 1
    is_first = value_of(test.variable, names) == batches - 1
    return (limit + test.over) // batches if is_first else None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a loop, without those of loops and functions within it."""
    for node in body:
        yield node
        if not isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.ClassDef):
            for _, value in ast.iter_fields(node):
                if isinstance(value, list):
                    yield from _statements(each for each in value if isinstance(each, ast.stmt))


def freezes(frames: Iterable[Frame]) -> list[tuple[str, int]]:
    """Return the places in loops around the step that set ``requires_grad``."""
    found = {
        (file, node.lineno)
        for file, loop, _ in loops_around(frames)
        for node in ast.walk(loop)
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
            with suppress(OSError, SyntaxError, ValueError):
                tree = ast.parse(read_source(Path(file)))
                stored = (node for node in ast.walk(tree) if isinstance(node, ast.Subscript))
                lines = sorted(node.lineno for node in stored if _sets(node, option))
                found += [(file, line) for line in lines]
    return found


def _sets(node: ast.Subscript, option: str) -> bool:
    is_set = isinstance(node.ctx, ast.Store)
    return is_set and isinstance(node.slice, ast.Constant) and node.slice.value == option


def named(text: str, names: Mapping[str, Any]) -> Any:
    """The value of a variable, or of a part of one: ``loaders['val']``; None if there is none."""
    with suppress(SyntaxError, ValueError):
        return value_of(ast.parse(text, mode="eval").body, names)
    return None


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


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a name, or of an attribute or an entry of one; None if there is none."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(value_of(node.value, names), node.attr, None)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        with suppress(TypeError, LookupError):
            return value_of(node.value, names)[node.slice.value]
    return None
