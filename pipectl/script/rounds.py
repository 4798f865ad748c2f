"""How often a ``for`` runs, by its text and the values of variables."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import CodeType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from pipectl.faults import is_user_code
from pipectl.script.values import UnknownError, evaluated, number, value_of

_SAME = {"enumerate", "reversed", "list", "tuple", "sorted", "iter", "track", "alive_it"}
"""Functions whose result has as many items as their first argument, with progress bars."""
_BARS = ("tqdm", "bar")
_WITH_START = 2
"""Arguments of a ``range`` or an ``islice`` that begins after 0."""


def rounds_of(node: ast.expr, names: Mapping[str, Any]) -> float | None:
    """Return the number of items that a loop goes through: infinite for one without an end, and
    None if it is not known.
    """
    if isinstance(node, ast.NamedExpr):
        node = node.value
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        (first, *more) = node.generators
        return None if more or first.ifs else rounds_of(first.iter, names)
    if isinstance(node, ast.Call):
        return _rounds_of_call(node, names)
    with suppress(UnknownError):
        return _length(evaluated(node, names))
    return None


def range_of(node: ast.expr, names: Mapping[str, Any]) -> range | None:
    """The ``range`` that a loop goes through, or a progress bar over one."""
    if isinstance(node, ast.NamedExpr):
        node = node.value
    if isinstance(node, ast.Call):
        name = _name_of(node)
        if name.endswith("range"):
            numbers = [number(each, names) for each in node.args]
            with suppress(TypeError, ValueError):
                return range(*numbers)  # type: ignore[arg-type]
        return range_of(node.args[0], names) if node.args and _is_same(name) else None
    with suppress(UnknownError):
        held = _unwrapped(evaluated(node, names))
        return held if isinstance(held, range) else None
    return None


def index_of_first(loop: ast.For, names: Mapping[str, Any]) -> int | None:
    """The number, from 0, of the round that a loop over a range is in."""
    target, node = loop.target, loop.iter
    passed = range_of(node, names)
    while isinstance(node, ast.Call) and _name_of(node) != "enumerate" and node.args:
        node = node.args[0]
    if isinstance(node, ast.Call) and isinstance(target, ast.Tuple):
        target = target.elts[1] if len(target.elts) > 1 else target
    inner = (each.target for each in ast.walk(loop) if isinstance(each, ast.For))
    if sum(bool(_names_in(target) & _names_in(each)) for each in inner) > 1:
        return None  # another loop has set the variable since
    value = value_of(target, names)
    if passed is not None and isinstance(value, int) and value in passed:
        return passed.index(value)
    return None


def _names_in(target: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}


def phases_of(node: ast.expr, names: Mapping[str, Any]) -> list[Any]:
    """The texts or truth values that a loop goes through, as ``["train", "val"]``, alone or with
    what belongs to each; empty if it goes through anything else.
    """
    while isinstance(node, ast.Call) and _is_same(_name_of(node)) and node.args:
        node = node.args[0]
    items: list[Any] = []
    with suppress(UnknownError, TypeError):
        value = evaluated(node, names)
        items = list(value) if isinstance(value, list | tuple | Mapping | type({}.items())) else []
    items = [each[0] if isinstance(each, tuple) and each else each for each in items]
    return items if all(isinstance(each, str | bool) for each in items) else []


def names_loader(node: ast.expr, names: Mapping[str, Any]) -> bool:
    """Whether a ``DataLoader`` is part of an expression."""
    parts = (x for x in ast.walk(node) if isinstance(x, ast.Name | ast.Attribute | ast.Subscript))
    return any(isinstance(value_of(each, names), DataLoader) for each in parts)


def batches_of(loader: DataLoader[Any]) -> int | None:
    """The batches of an epoch of a loader; None if they are not known before it ends."""
    data: Any = loader.dataset
    # Several processes may each read all of such data, or parts of any size.
    if isinstance(data, IterableDataset) and (
        loader.num_workers > 1 or not hasattr(data, "__len__")
    ):
        return None
    with suppress(TypeError, NotImplementedError, AttributeError):
        return len(loader)
    return None


def _rounds_of_call(call: ast.Call, names: Mapping[str, Any]) -> float | None:
    name = _name_of(call)
    code = getattr(value_of(call.func, names), "__code__", None)
    if isinstance(code, CodeType) and is_user_code(code.co_filename):
        return None
    if name.endswith("range"):
        passed = range_of(call, names)
        return None if passed is None else len(passed)
    if name in _RULES:
        return _RULES[name](call, names)
    if _is_same(name):
        given = [*call.args[:1], *(key.value for key in call.keywords if key.arg == "iterable")]
        return rounds_of(given[0], names) if given else None
    with suppress(UnknownError):
        return _length(evaluated(call, names))
    return None


def _islice(call: ast.Call, names: Mapping[str, Any]) -> float | None:
    if len(call.args) < _WITH_START or any(isinstance(x, ast.Starred) for x in call.args):
        return None
    whole = rounds_of(call.args[0], names)
    bounds = call.args[1:]
    start = number(bounds[0], names) if len(bounds) >= _WITH_START else 0
    end = bounds[min(1, len(bounds) - 1)]
    is_open = isinstance(end, ast.Constant) and end.value is None
    stop = math.inf if is_open else number(end, names)
    step = number(bounds[_WITH_START], names) if len(bounds) > _WITH_START else 1
    if stop is None or start is None or not step or (whole is None and is_open):
        return None
    stop = stop if whole is None else min(whole, stop)
    return stop if math.isinf(stop) else max(math.ceil((stop - start) / step), 0)


def _repeat(call: ast.Call, names: Mapping[str, Any]) -> float | None:
    times = [*call.args[1:], *(key.value for key in call.keywords)]
    return number(times[0], names) if times else math.inf


def _all(combined: Callable[[list[float]], float]) -> Callable[..., float | None]:
    def rounds(call: ast.Call, names: Mapping[str, Any]) -> float | None:
        known = [n for n in _each(call, names) if n is not None]
        return combined(known) if len(known) == len(call.args) else None

    return rounds


def _each(call: ast.Call, names: Mapping[str, Any]) -> list[float | None]:
    return [rounds_of(each, names) for each in call.args]


_RULES: dict[str, Callable[[ast.Call, Mapping[str, Any]], float | None]] = {
    "islice": _islice,
    "zip": _all(lambda rounds: min(rounds, default=0)),
    "repeat": _repeat,
    "chain": _all(math.fsum),
    "product": _all(math.prod),
    "count": lambda *_: math.inf,
    "cycle": lambda *_: math.inf,
}


def _name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _is_same(name: str) -> bool:
    return name in _SAME or name.lower().endswith(_BARS)


def _unwrapped(held: Any) -> Any:
    while not isinstance(held, range) and hasattr(held, "iterable"):  # bar = tqdm(range(n))
        held = held.iterable
    return held


def _length(held: Any) -> int | None:
    held = _unwrapped(held)
    if isinstance(held, DataLoader):
        return batches_of(held)
    with suppress(Exception):  # of the user's code
        return len(held)
    is_bar = type(held).__module__.startswith("click.")  # click.progressbar(range(n))
    return getattr(held, "length", None) if is_bar else None
