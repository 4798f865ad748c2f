"""State that a model's code keeps outside of the model: in variables of modules (``global``), of
classes (``Net.calls += 1``) and of functions around functions (``nonlocal``), and in objects and
containers there.

Only the user's code is searched: what the classes of the model's modules and the loss refer to.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterator, MutableMapping
from functools import lru_cache, partial
from pathlib import Path
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from pipectl import faults
from pipectl.capture.randomness import GENERATORS
from pipectl.capture.tensors import tensors_in
from pipectl.objects import Holder
from pipectl.torch_api import CustomOpDef, FakeTensor, forward_hooks_of, function_behind

_MAX_HOLDERS = 2000
_MAX_ENTRIES = 1000
"""Of a container; a larger one is a table, or data."""
_PLAIN = (str, bytes, bool, int, float, complex, type(None), Tensor, nn.Module)
_SEQUENCES = (list, deque, tuple, set)
_CONTAINERS = (dict, *_SEQUENCES)
CachedFunction: Any = type(lru_cache(int))
"""What ``functools.lru_cache`` and ``functools.cache`` return."""


class _ClassVariables(MutableMapping[str, Any]):
    """The attributes of a class."""

    def __init__(self, owner: type) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return vars(self._owner)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter([*vars(self._owner)])

    def __len__(self) -> int:
        return len(vars(self._owner))


class _Cells(MutableMapping[str, Any]):
    """The variables of the functions around a function."""

    def __init__(self, function: FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells = dict(cells)

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, cell in self._cells.items() if _has_value(cell)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _has_value(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # it is not assigned yet
        return False
    return True


def outer_holders(wrapper: nn.Module) -> list[Holder]:
    """Return what has such state, the same objects at each call.

    Args:
        wrapper: the model and the loss.
    """
    found: list[Holder] = []
    seen, waiting = set[int](), list[tuple[str, Any]]()
    for module in wrapper.modules():
        hooks = forward_hooks_of(module)
        values = (type(module), *vars(module).values(), *hooks)
        waiting += [("", value) for value in values if type(value) not in (*_CONTAINERS, *_PLAIN)]
    while waiting and len(found) < _MAX_HOLDERS:
        name, value = waiting.pop()
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen.add(id(value))
        if isinstance(value, (CachedFunction, *GENERATORS)):
            found.append(Holder(value, name, None))
        for holder in _holders(name, value):
            found.append(holder)
            waiting += [(holder.name_of(key), item) for key, item in _inner(holder.value)]
        waiting += _behind(value)
    return found


def _inner(value: Any) -> list[tuple[Any, Any]]:
    return list(enumerate(value) if isinstance(value, _SEQUENCES) else value.items())


def clear_traced(cached: Any) -> None:
    """Empty the cache of a function if it has tensors of a trace, which have no values."""
    kept = gc.get_referents(cached)
    if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(kept)):
        cached.cache_clear()


def _holders(name: str, value: Any) -> Iterator[Holder]:
    """Yield what a value holds itself; its name is empty if the model holds it."""
    if isinstance(value, FunctionType):
        if _is_user_code(value.__code__.co_filename):
            yield Holder(_Cells(value), _own_name(value))
    elif isinstance(value, type):
        if _is_users(value):
            yield Holder(_ClassVariables(value), _own_name(value))
    elif name.endswith(":"):
        yield Holder(value, name)
    elif name and type(value) in _CONTAINERS:
        if len(value) <= _MAX_ENTRIES:
            yield Holder(value, name, None)
    elif name and (_is_of_users(value) or isinstance(value, SimpleNamespace)):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield Holder(attributes, name, type(value))


def _behind(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield code that a value refers to, and the variables of its modules, with their names."""
    if isinstance(value, FunctionType):
        yield from _variables(value.__code__.co_filename, value.__globals__)
        yield "", getattr(value, "__wrapped__", None)
        yield from _defaults(value)
    elif isinstance(value, CachedFunction):
        yield "", value.__wrapped__
    elif isinstance(value, ModuleType):
        yield from _variables(getattr(value, "__file__", None), vars(value))
    elif isinstance(value, type):
        yield from (("", base) for base in value.__bases__)
    elif isinstance(value, MethodType | staticmethod | classmethod | BuiltinMethodType):
        yield "", getattr(value, "__func__", None)
        yield "", getattr(value, "__self__", None)
    elif isinstance(value, CustomOpDef):
        yield "", function_behind(value)
    elif isinstance(value, property):
        yield "", value.fget
    elif isinstance(value, partial):
        yield "", value.func
        yield "partial.args", value.args
        yield "partial.keywords", value.keywords
    elif _is_of_users(value):
        yield "", type(value)


def _variables(file: str | None, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if file is not None and _is_user_code(file):
        yield f"{Path(file).name}:", values


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    if _is_user_code(function.__code__.co_filename):
        yield f"{_own_name(function)}.__defaults__", function.__defaults__
        yield f"{_own_name(function)}.__kwdefaults__", function.__kwdefaults__


def _own_name(value: Any) -> str:
    return str(value.__qualname__).replace("<locals>.", "")


def _is_of_users(value: Any) -> bool:
    owner: type = type(value)
    return _is_users(owner)


@lru_cache(maxsize=1000)
def _is_users(owner: type) -> bool:
    """Whether a class is in a file of the user."""
    module = sys.modules.get(owner.__module__)
    files = [getattr(module, "__file__", None) or "<"]
    files += [f.__code__.co_filename for f in vars(owner).values() if isinstance(f, FunctionType)]
    return any(map(_is_user_code, files))


@lru_cache(maxsize=10_000)
def _is_user_code(file: str) -> bool:
    return faults.is_user_code(file)
