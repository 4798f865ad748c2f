"""Types of the values of kernels, and LLVM's types of their operands."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np


class Scalar(NamedTuple):
    """A number.

    Args:
        name: ``int``, ``float``, ``bool`` or ``word``.
        llvm: LLVM's name of the type.
    """

    name: str
    llvm: str


INT, FLOAT, BOOL = Scalar("int", "i64"), Scalar("float", "double"), Scalar("bool", "i1")
WORD = Scalar("word", "i64")
"""64 bits without a sign, for sets; supports only bitwise operators."""
SCALARS = {each.name: each for each in (BOOL, INT, FLOAT)}
STORED: dict[np.dtype[Any], tuple[str, Scalar]] = {
    np.dtype(np.int32): ("i32", INT),
    np.dtype(np.int64): ("i64", INT),
    np.dtype(np.uint64): ("i64", WORD),
    np.dtype(np.float64): ("double", FLOAT),
}
"""LLVM's type of the elements of an array, and the type of their values."""


class Array(NamedTuple):
    """Elements of a type, in C order."""

    dtype: np.dtype[Any]
    dimensions: int


class Row(NamedTuple):
    """One record of a table; its value is its address."""

    dtype: np.dtype[Any]


class Group(NamedTuple):
    """A tuple; a named one has names."""

    members: tuple[Any, ...]
    names: tuple[str, ...] = ()


Type = Scalar | Array | Row | Group
_PYTHON: tuple[tuple[Any, Scalar], ...] = (
    ((bool, np.bool_), BOOL),
    ((int, np.signedinteger), INT),
    (float, FLOAT),
    (np.uint64, WORD),
)


def operand_types(kind: Type) -> list[str]:
    """LLVM's types of the operands of a value."""
    if isinstance(kind, Scalar):
        return [kind.llvm]
    if isinstance(kind, Group):
        return list(chain.from_iterable(map(operand_types, kind.members)))
    return ["ptr", *["i64"] * (kind.dimensions if isinstance(kind, Array) else 0)]


def type_of(value: Any) -> Type:
    """The type of an argument.

    Raises:
        TypeError: kernels do not support it.
    """
    if isinstance(value, np.ndarray):
        if not value.flags.carray:
            raise TypeError("kernels take aligned arrays in C order that can be written")
        return Array(value.dtype, value.ndim)
    if isinstance(value, tuple):
        return Group(tuple(map(type_of, value)), getattr(value, "_fields", ()))
    if isinstance(value, int | np.signedinteger) and not -(1 << 63) <= value < 1 << 63:
        raise TypeError(f"kernels take integers of 64 bits, not {value}")
    for python, kind in _PYTHON:
        if isinstance(value, python):
            return kind
    raise TypeError(f"kernels do not take a {type(value).__name__}")
