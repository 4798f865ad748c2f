"""What a script trains after its first training, by its text: a job is the first one alone.

The script is stopped in its first step, so nothing of the later ones is seen. But the stack says
where it is: what follows the job's loops, in the function that has them and in those that have
called it, is searched for calls that lead to ``backward()`` and ``step()``.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

from pipectl.faults import is_user_code
from pipectl.script.loops import Around, Frame, Loop, begins_anew, tree_of
from pipectl.script.program import Place
from pipectl.script.values import value_of

_BLOCKS = "body", "orelse", "finalbody"
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_TRAINS = {"fit", "train"}
"""Methods of the trainers of libraries."""
_MAX_DEPTH = 6
"""Of functions that call each other."""


def later_trainings(frames: Iterable[Frame], made: Collection[Place]) -> list[Place]:
    """Return the lines that train again once the job's training is over.

    Args:
        frames: of the stack at the first step, innermost first.
        made: the lines that made the optimizer.
    """
    own = [frame for frame in frames if is_user_code(frame[0].co_filename)]
    found: list[Place] = []
    outermost = max((i for i, f in enumerate(own) if _job_loops(f, made)), default=0)
    for frame in own[outermost:]:
        code, scope, local, _ = frame
        names = {**scope, **local}
        file = code.co_filename
        found += [
            (file, _line_of(statement, file, names))
            for statement in _following(frame, made)
            if _trains(statement, file, names, set())
        ]
    return list(dict.fromkeys(found))


def _holds(node: ast.AST, line: int) -> bool:
    first: int = getattr(node, "lineno", 0)
    return first <= line <= (getattr(node, "end_lineno", None) or first)


def _path_to(code: CodeType, line: int) -> list[tuple[ast.stmt, list[ast.stmt]]]:
    """Return the statements of a function that hold a line, outermost first, each with the
    statements that follow it in its block.
    """
    tree = tree_of(code.co_filename)
    path: list[tuple[ast.stmt, list[ast.stmt]]] = []
    blocks: list[list[ast.stmt]] = [tree.body]
    while blocks:
        block = blocks.pop()
        for index, statement in reversed([*enumerate(block)]):  # several may be on one line
            if _holds(statement, line):
                path.append((statement, block[index + 1 :]))
                if isinstance(statement, _FUNCTIONS | ast.ClassDef):
                    path.clear()  # what follows a definition does not follow in time
                blocks = [list(each) for each in _blocks_of(statement)]
                break
    return path


def _blocks_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in _BLOCKS:
        yield getattr(statement, name, None) or []
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _job_loops(frame: Frame, made: Collection[Place]) -> list[ast.stmt]:
    """Return the loops of a frame that repeat the step with the same optimizer."""
    code, scope, local, line = frame
    names = {**scope, **local}
    return [
        statement
        for statement, _ in _path_to(code, line)
        if isinstance(statement, Loop)
        and not begins_anew(Around(code.co_filename, statement, names, line), made)
    ]


def _following(frame: Frame, made: Collection[Place]) -> Iterator[ast.stmt]:
    """Yield the statements that follow the job's loops in a function, or the line of a frame."""
    loops = [loop.lineno for loop in _job_loops(frame, made)]
    for statement, others in _path_to(frame[0], frame[3]):
        yield from others
        if statement.lineno in loops[:1]:
            return


def _line_of(statement: ast.stmt, file: str, names: Mapping[str, Any]) -> int:
    """The line within a statement that trains: that of the innermost statement that does."""
    for block in _blocks_of(statement):
        for inner in block:
            if _trains(inner, file, names, set()):
                return _line_of(inner, file, names)
    return statement.lineno


def _trains(node: ast.AST, file: str, names: Mapping[str, Any], known: set[str]) -> bool:
    """Whether code computes gradients and updates parameters, itself or in what it calls."""
    reached = set(_reached(node, file, names, known, 0))
    return {"backward", "step"} <= reached


def _reached(
    node: ast.AST, file: str, names: Mapping[str, Any], known: set[str], depth: int
) -> Iterator[str]:
    """Yield ``backward`` and ``step`` if code calls a method of this name."""
    if isinstance(node, _FUNCTIONS | ast.ClassDef):
        return  # defined, not called
    for call in _calls_in(node):
        name = ast.unparse(call.func).rpartition(".")[2]
        is_method = isinstance(call.func, ast.Attribute)
        if is_method and name in ("backward", "step"):
            yield name
        elif is_method and name in _TRAINS and _is_trainer(call.func, file, names):
            yield from ("backward", "step")
        elif depth < _MAX_DEPTH:
            for function, where, inner in _functions_of(call.func, file, names):
                key = f"{where}:{function.lineno}"
                if key not in known:
                    known.add(key)
                    for statement in function.body:
                        yield from _reached(statement, where, inner, known, depth + 1)


def _calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of a statement, without those of functions that it only defines."""
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _FUNCTIONS | ast.ClassDef | ast.Lambda):
            yield from _calls_in(child)


def _is_trainer(func: ast.expr, file: str, names: Mapping[str, Any]) -> bool:
    """Whether a method belongs to the trainer of a library: ``Trainer(...)``, or a variable."""
    assert isinstance(func, ast.Attribute)
    owner = func.value
    kinds = (kind.__name__ for kind in type(value_of(owner, names)).__mro__)
    if any(kind.endswith("Trainer") for kind in kinds):
        return True
    made = [owner] if isinstance(owner, ast.Call) else _assigned(ast.unparse(owner), file)
    return any(
        isinstance(each, ast.Call) and ast.unparse(each.func).endswith("Trainer") for each in made
    )


def _assigned(name: str, file: str) -> Iterator[ast.expr]:
    """Yield what a file assigns to a variable."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            yield node.value


def _functions_of(
    func: ast.expr, file: str, names: Mapping[str, Any]
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str, Mapping[str, Any]]]:
    """Yield the functions of the user that a call may call, with their files and names."""
    value = inspect.unwrap(found) if callable(found := value_of(func, names)) else None
    if inspect.isclass(value):
        value = value.__init__
    code = getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        if is_user_code(code.co_filename):
            inner = getattr(value, "__globals__", names)
            for node in ast.walk(tree_of(code.co_filename)):
                if isinstance(node, _FUNCTIONS) and code.co_firstlineno in _first_lines(node):
                    yield node, code.co_filename, inner
    elif value is None and isinstance(func, ast.Attribute):  # of what is made only later
        for node in ast.walk(tree_of(file)):
            if isinstance(node, _FUNCTIONS) and node.name == func.attr:
                yield node, file, names


def _first_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[int]:
    return {node.lineno, *(each.lineno for each in node.decorator_list)}
