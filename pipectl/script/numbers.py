"""Numbers that remember which entry of a recording computes them.

The size of a batch and ``tensor.item()`` leave torch as plain Python numbers. A
:class:`TracedInt` or :class:`TracedFloat` is such a number that still says where it is from, so
that a recording computes it anew for another batch, or refuses it. Arithmetic with ``+ - * / // %
**`` keeps this; what turns it into another kind of number (``math.exp``, ``round``) loses it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

Combine = Callable[[Callable[..., Any], tuple[Any, ...]], Any]
"""Records an operation on numbers and its operands; returns its entry, None if nothing records."""


class _Traced:
    """What both kinds share; ``ref`` is the entry, ``combine`` records operations."""

    ref: Any
    combine: Combine

    def __reduce__(self) -> Any:  # a copy in another process or file is a plain number
        plain = _plain(self)
        return type(plain), (plain,)


class TracedInt(_Traced, int):
    """An integer, such as the number of samples of a batch."""


class TracedFloat(_Traced, float):
    """A floating-point number, such as the value of a loss."""


def traced(value: Any, ref: Any, combine: Combine) -> Any:
    """Return an equal number that remembers its entry; anything else unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    number: Any = TracedInt(value) if isinstance(value, int) else TracedFloat(value)
    number.ref, number.combine = ref, combine
    return number


def _plain(value: Any) -> Any:
    if isinstance(value, TracedInt):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, TracedFloat) else value


def _operator(name: str, function: Callable[..., Any], *, is_swapped: bool = False) -> Any:
    def method(self: Any, *others: Any) -> Any:
        if others and not isinstance(others[0], int | float):
            return NotImplemented
        operands = (others[0], self) if is_swapped else (self, *others)
        result = function(*map(_plain, operands))
        ref = self.combine(function, operands)
        return result if ref is None else traced(result, ref, self.combine)

    method.__name__ = name
    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _function = getattr(operator, _name)
    for _kind in (TracedInt, TracedFloat):
        setattr(_kind, f"__{_name}__", _operator(_name, _function))
        setattr(_kind, f"__r{_name}__", _operator(_name, _function, is_swapped=True))
for _name in ("neg", "pos", "abs"):
    for _kind in (TracedInt, TracedFloat):
        setattr(_kind, f"__{_name}__", _operator(_name, getattr(operator, _name)))
