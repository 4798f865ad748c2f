"""Expressions of kernels as LLVM IR, and the instructions and variables of a function."""

from __future__ import annotations

import ast
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipectl.compiled.types import (
    BOOL,
    FLOAT,
    INT,
    SCALARS,
    STORED,
    WORD,
    Array,
    Group,
    Row,
    Scalar,
    Type,
    operand_types,
    type_of,
)


class Value(NamedTuple):
    """The value of an expression: its type and LLVM operands."""

    type: Any
    operands: tuple[str, ...]


def returned_type(kind: Type) -> str:
    """LLVM's type of a result: a structure if it has several operands."""
    types = operand_types(kind)
    return types[0] if len(types) == 1 else f"{{{', '.join(types)}}}"


def constant(value: float) -> Value:
    """A number that is known at compile time."""
    kind = type_of(value)
    if kind is FLOAT:
        return Value(kind, (f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}",))
    return Value(kind, (str(int(value)),))


_COMPARED = {
    ast.Lt: ("slt", "olt"),
    ast.LtE: ("sle", "ole"),
    ast.Gt: ("sgt", "ogt"),
    ast.GtE: ("sge", "oge"),
    ast.Eq: ("eq", "oeq"),
    ast.NotEq: ("ne", "une"),
}
_FLOATS = {"abs": "fabs", "np.ceil": "ceil"}
_OF_BITS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift, ast.RShift)
_OF_BOOLS = (ast.BitAnd, ast.BitOr, ast.BitXor)
_COMPUTED = {
    ast.Add: ("add", "fadd"),
    ast.Sub: ("sub", "fsub"),
    ast.Mult: ("mul", "fmul"),
    ast.Div: ("", "fdiv"),
    ast.BitAnd: ("and", ""),
    ast.BitOr: ("or", ""),
    ast.BitXor: ("xor", ""),
    ast.LShift: ("shl", ""),
    ast.RShift: ("ashr", ""),
}


class Callees(Protocol):
    """The kernels that a function may call."""

    @property
    def function_of(self) -> Callable[[Any], FunctionType | None]:
        """The Python function of a kernel; None for anything else."""

    def call(self, function: FunctionType, kinds: Sequence[Type]) -> tuple[str, Any]:
        """The name of a function for arguments of some types, and the type of its result."""


class Expressions:
    """The instructions of one function so far.

    Args:
        callees: the kernels that it may call.
        where: name of the function, for errors.
        names: its global names.
        changed: its local names that are assigned.
    """

    def __init__(
        self, callees: Callees, where: str, names: dict[str, Any], changed: set[str]
    ) -> None:
        self._callees, self._where, self._globals, self._names = callees, where, names, 0
        self._slots: list[str] = []
        self._lines: list[str] = []
        self._open = True  # whether the current block has no terminator yet
        self._variables: dict[str, Value] = {}
        self._assigned: set[str] = set()  # the variables that have a value here
        self._changed = changed
        self._unchanged: dict[str, Value] = {}

    def _fail(self, node: ast.AST, why: str) -> TypeError:
        line = getattr(node, "lineno", 0)
        return TypeError(f"{self._where}, line {line} of it: {why}: {ast.unparse(node)}")

    # Lines, blocks and variables.

    def _new(self) -> str:
        self._names += 1
        return f"%v{self._names}"

    def _emit(self, line: str) -> str:
        """Add an instruction; returns the name of its result."""
        name = self._new()
        self._do(f"{name} = {line}")
        return name

    def _do(self, line: str) -> None:
        if not self._open:  # after return, break or continue
            self._label(self._new())
        self._lines.append(f"  {line}")

    def _end(self, line: str) -> None:
        """Add the terminator of a block."""
        if self._open:
            self._lines.append(f"  {line}")
        self._open = False

    def _label(self, label: str) -> None:
        """Start a block."""
        self._end(f"br label {label}")
        self._lines.append(f"{label[1:]}:")
        self._open = True

    def _slot(self, kind: Type) -> Value:
        operands = []
        for each in operand_types(kind):
            operands.append(self._new())
            self._slots.append(f"  {operands[-1]} = alloca {each}")
        return Value(kind, tuple(operands))

    def _load(self, slot: Value) -> Value:
        pairs = zip(operand_types(slot.type), slot.operands, strict=True)
        return Value(slot.type, tuple(self._emit(f"load {each}, ptr {at}") for each, at in pairs))

    def _store(self, slot: Value, value: Value, node: ast.AST) -> None:
        value = self._as(slot.type, value, node)
        rows = zip(operand_types(slot.type), value.operands, slot.operands, strict=True)
        for kind, operand, at in rows:
            self._do(f"store {kind} {operand}, ptr {at}")

    def _bind(self, name: str, value: Value, node: ast.AST) -> None:
        if name not in self._variables:
            self._variables[name] = self._slot(value.type)
        self._store(self._variables[name], value, node)
        self._assigned.add(name)

    def _as(self, kind: Type, value: Value, node: ast.AST) -> Value:
        """Convert a value to another type: bool to integer, integer to float."""
        if value.type == kind:
            return value
        (operand,) = value.operands if isinstance(value.type, Scalar) else ("",)
        if kind is INT and value.type is BOOL:
            return Value(INT, (self._emit(f"zext i1 {operand} to i64"),))
        if kind is FLOAT and value.type is INT:
            return Value(FLOAT, (self._emit(f"sitofp i64 {operand} to double"),))
        if kind is FLOAT and value.type is BOOL:
            return self._as(FLOAT, self._as(INT, value, node), node)
        raise self._fail(node, f"{value.type} is not {kind}")

    # Expressions.

    def _value(self, node: ast.expr) -> Value:
        method = getattr(self, f"_value_{type(node).__name__.lower()}", None)
        if method is None:
            raise self._fail(node, "kernels have no such expression")
        value: Value = method(node)
        return value

    def _value_constant(self, node: ast.Constant) -> Value:
        return self._constant(node.value, node)

    def _constant(self, value: Any, node: ast.AST) -> Value:
        """A literal, or the value of a global name."""
        if not isinstance(value, float | int | np.generic):
            raise self._fail(node, "no number")
        return constant(value)  # type: ignore[arg-type]

    def _literal(self, node: ast.expr) -> int:
        with suppress(ValueError):
            value = ast.literal_eval(node)
            if isinstance(value, int):
                return value
        raise self._fail(node, "no literal integer")

    def _value_tuple(self, node: ast.Tuple) -> Value:
        values = list(map(self._value, node.elts))
        operands = chain.from_iterable(each.operands for each in values)
        return Value(Group(tuple(each.type for each in values)), tuple(operands))

    def _value_name(self, node: ast.Name) -> Value:
        if node.id in self._unchanged:
            return self._unchanged[node.id]
        if node.id in self._assigned:
            return self._load(self._variables[node.id])
        if node.id in self._changed:
            raise self._fail(node, "this may have no value yet")
        return self._constant(self._globals.get(node.id), node)

    def _value_attribute(self, node: ast.Attribute) -> Value:
        name = node.value.id if isinstance(node.value, ast.Name) else None
        if name and name not in self._unchanged and name not in self._changed:
            return self._constant(getattr(self._globals.get(name), node.attr, None), node)
        value = self._value(node.value)
        if isinstance(value.type, Array) and node.attr == "shape":
            shape = value.operands[1:]
            return Value(Group((INT,) * len(shape)), shape)
        if isinstance(value.type, Group) and node.attr in value.type.names:
            return self._members(value, node)[value.type.names.index(node.attr)]
        return self._read(*self._field(value, node), node)

    def _field(self, value: Value, node: ast.Attribute) -> tuple[np.dtype[Any], str]:
        fields: Any = value.type.dtype.fields if isinstance(value.type, Row) else {}
        if node.attr not in fields:
            raise self._fail(node, f"{value.type} has no such attribute")
        dtype, offset = fields[node.attr][:2]
        return dtype, self._emit(f"getelementptr i8, ptr {value.operands[0]}, i64 {offset}")

    def _stored(self, dtype: np.dtype[Any], node: ast.AST) -> tuple[str, Scalar]:
        if dtype not in STORED:
            raise self._fail(node, f"kernels do not know elements of type {dtype}")
        return STORED[dtype]

    def _read(self, dtype: np.dtype[Any], address: str, node: ast.AST) -> Value:
        """Load the value at an address."""
        if dtype.fields:
            return Value(Row(dtype), (address,))
        stored, kind = self._stored(dtype, node)
        operand = self._emit(f"load {stored}, ptr {address}")
        if stored == "i32":
            operand = self._emit(f"sext i32 {operand} to i64")
        return Value(kind, (operand,))

    def _write(self, dtype: np.dtype[Any], address: str, value: Value, node: ast.AST) -> None:
        stored, kind = self._stored(dtype, node)
        (operand,) = self._as(kind, value, node).operands
        if stored == "i32":
            operand = self._emit(f"trunc i64 {operand} to i32")
        self._do(f"store {stored} {operand}, ptr {address}")

    def _value_subscript(self, node: ast.Subscript) -> Value:
        value = self._value(node.value)
        if isinstance(value.type, Group):
            place = self._literal(node.slice)
            if not -len(value.type.members) <= place < len(value.type.members):
                raise self._fail(node, "the tuple has no such member")
            return self._members(value, node)[place]
        array, address, *shape = self._element(node, value)
        if array.dimensions:
            return Value(array, (address, *shape))
        return self._read(array.dtype, address, node)

    def _element(self, node: ast.Subscript, value: Value) -> Any:
        """The type, the address and the shape of a part of an array."""
        places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        dimensions = value.type.dimensions if isinstance(value.type, Array) else 0
        if len(places) > dimensions:
            raise self._fail(node, f"{value.type} has no such elements")
        address, *shape = value.operands
        offset, rest = "0", shape[len(places) :]
        for dimension, place in enumerate(places):
            size = shape[dimension]
            if isinstance(place, ast.Slice):
                if place.step is not None or dimension != dimensions - 1:
                    raise self._fail(node, "kernels slice the last dimension, without steps")
                at = "0" if place.lower is None else self._bound(place.lower, size)
                end = size if place.upper is None else self._bound(place.upper, size)
                rest = [self._larger(self._emit(f"sub i64 {end}, {at}"), "0")]
            else:
                at = self._index(place, size)
            if dimension:
                offset = self._emit(f"mul i64 {offset}, {size}")
            offset = self._emit(f"add i64 {offset}, {at}")
        for size in shape[len(places) :]:
            offset = self._emit(f"mul i64 {offset}, {size}")
        offset = self._emit(f"mul i64 {offset}, {value.type.dtype.itemsize}")
        part = self._emit(f"getelementptr i8, ptr {address}, i64 {offset}")
        return (Array(value.type.dtype, len(rest)), part, *rest)

    def _index(self, node: ast.expr, size: str) -> str:
        """An index; negative ones count from the end."""
        value = self._value(node)
        if value.type is not INT:
            raise self._fail(node, "no integer")
        (place,) = value.operands
        if place.isdigit():
            return place
        below = self._emit(f"icmp slt i64 {place}, 0")
        ahead = self._emit(f"add i64 {place}, {size}")
        return self._emit(f"select i1 {below}, i64 {ahead}, i64 {place}")

    def _bound(self, node: ast.expr, size: str) -> str:
        """A bound of a slice, clipped to the array."""
        place = self._larger(self._index(node, size), "0")
        return self._emit(f"call i64 @llvm.smin.i64(i64 {place}, i64 {size})")

    def _larger(self, one: str, two: str) -> str:
        return self._emit(f"call i64 @llvm.smax.i64(i64 {one}, i64 {two})")

    def _value_binop(self, node: ast.BinOp) -> Value:
        return self._compute(node.op, self._value(node.left), node.right, node)

    def _compute(
        self, operator: ast.operator, left: Value, other: ast.expr, node: ast.AST
    ) -> Value:
        right = self._value(other)
        of_bits = isinstance(operator, _OF_BITS)
        least = BOOL if isinstance(operator, _OF_BOOLS) else INT
        if isinstance(operator, ast.Div):
            least = FLOAT
        kind, one, two = self._alike(left, right, node, least, words=of_bits)
        if isinstance(operator, ast.FloorDiv | ast.Mod) and kind is INT:
            return self._divide(one, two, floor=isinstance(operator, ast.FloorDiv))
        name = _COMPUTED.get(type(operator), ("", ""))[kind is FLOAT]
        if not name:
            raise self._fail(node, f"kernels do not compute this with a {kind.name}")
        if kind is WORD and name == "ashr":
            name = "lshr"
        return Value(kind, (self._emit(f"{name} {kind.llvm} {one}, {two}"),))

    def _alike(
        self, left: Value, right: Value, node: ast.AST, least: Scalar, *, words: bool = False
    ) -> tuple[Scalar, str, str]:
        """Two numbers converted to the larger type; or two words, if words are allowed."""
        if words and left.type is right.type is WORD:
            return WORD, left.operands[0], right.operands[0]
        order = list(SCALARS.values())
        for each in (left, right):
            if each.type not in order:
                raise self._fail(node, f"{each.type} is no number")
        kind = max(left.type, right.type, least, key=order.index)
        pair = [self._as(kind, each, node).operands[0] for each in (left, right)]
        return kind, pair[0], pair[1]

    def _divide(self, one: str, two: str, *, floor: bool) -> Value:
        """The floor quotient of integers, or the remainder; 0 if the divisor is 0, as in NumPy."""
        zero = self._emit(f"icmp eq i64 {two}, 0")
        one = self._emit(f"select i1 {zero}, i64 0, i64 {one}")
        divisor = self._emit(f"select i1 {zero}, i64 1, i64 {two}")
        quotient = self._emit(f"sdiv i64 {one}, {divisor}")
        rest = self._emit(f"srem i64 {one}, {divisor}")
        signs = self._emit(f"xor i64 {rest}, {two}")
        differ = self._emit(f"icmp slt i64 {signs}, 0")
        uneven = self._emit(f"icmp ne i64 {rest}, 0")
        both = self._emit(f"and i1 {differ}, {uneven}")
        change = self._emit(f"select i1 {both}, i64 {'-1' if floor else two}, i64 0")
        return Value(INT, (self._emit(f"add i64 {quotient if floor else rest}, {change}"),))

    def _value_unaryop(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            (operand,) = self._truth(node.operand).operands
            return Value(BOOL, (self._emit(f"xor i1 {operand}, true"),))
        value = self._value(node.operand)
        if isinstance(node.op, ast.Invert) and value.type in (INT, WORD):
            return Value(value.type, (self._emit(f"xor i64 {value.operands[0]}, -1"),))
        if isinstance(node.op, ast.USub) and value.type is FLOAT:
            return Value(FLOAT, (self._emit(f"fneg double {value.operands[0]}"),))
        if isinstance(node.op, ast.USub) and value.type is INT:
            return Value(INT, (self._emit(f"sub i64 0, {value.operands[0]}"),))
        raise self._fail(node, "kernels do not compute this")

    def _truth(self, node: ast.expr) -> Value:
        """The truth of a condition, which may be any number."""
        if isinstance(node, ast.BoolOp):
            return self._value_boolop(node, self._truth)
        value = self._value(node)
        if value.type in (INT, WORD):
            return Value(BOOL, (self._emit(f"icmp ne i64 {value.operands[0]}, 0"),))
        if value.type is FLOAT:
            return Value(BOOL, (self._emit(f"fcmp une double {value.operands[0]}, 0.0"),))
        return self._as(BOOL, value, node)

    def _value_compare(self, node: ast.Compare) -> Value:
        def compare() -> Iterator[Value]:
            left = self._value(node.left)
            for operator, other in zip(node.ops, node.comparators, strict=True):
                right = self._value(other)
                words = isinstance(operator, ast.Eq | ast.NotEq)
                kind, one, two = self._alike(left, right, node, INT, words=words)
                if type(operator) not in _COMPARED:
                    raise self._fail(node, "kernels do not compare so")
                names = _COMPARED[type(operator)]
                compared = f"fcmp {names[1]}" if kind is FLOAT else f"icmp {names[0]}"
                yield Value(BOOL, (self._emit(f"{compared} {kind.llvm} {one}, {two}"),))
                left = right

        return next(compare()) if len(node.ops) == 1 else self._decide(compare(), last=False)

    def _value_boolop(
        self, node: ast.BoolOp, read: Callable[[ast.expr], Value] | None = None
    ) -> Value:
        """``and`` and ``or`` of bools; in a condition, of the results of ``read``."""
        truths = (
            read(each) if read else self._as(BOOL, self._value(each), each) for each in node.values
        )
        return self._decide(truths, last=isinstance(node.op, ast.Or))

    def _decide(self, truths: Iterable[Value], *, last: bool) -> Value:
        """The first of some truths that equals ``last``, or else the last one (short circuit)."""
        slot, after = self._slot(BOOL), self._new()
        for truth in truths:  # translated one by one
            further = self._new()
            (operand,) = truth.operands
            self._do(f"store i1 {operand}, ptr {slot.operands[0]}")
            ends = (after, further) if last else (further, after)
            self._end(f"br i1 {operand}, label {ends[0]}, label {ends[1]}")
            self._label(further)
        self._label(after)
        return self._load(slot)

    def _value_ifexp(self, node: ast.IfExp) -> Value:
        then, other, after = self._new(), self._new(), self._new()
        self._branch(node.test, then, other)
        self._label(then)
        value = self._value(node.body)
        slot = self._slot(value.type)
        self._store(slot, value, node)
        self._end(f"br label {after}")
        self._label(other)
        self._store(slot, self._value(node.orelse), node)
        self._end(f"br label {after}")
        self._label(after)
        return self._load(slot)

    def _value_call(self, node: ast.Call) -> Value:
        name = ast.unparse(node.func)
        if node.keywords:
            raise self._fail(node, "kernels take and give arguments by position")
        if name == "bool" and len(node.args) == 1:
            return self._truth(node.args[0])
        values = list(map(self._value, node.args))
        kinds = [each.type for each in values]
        called: Any = self._globals.get(name)
        if name in ("min", "max") and len(values) > 1:
            return self._extreme(name, values, node)
        if function := self._callees.function_of(called):
            return self._call(function, values)
        if getattr(called, "_fields", None) and len(called._fields) == len(values):
            operands = chain.from_iterable(each.operands for each in values)
            return Value(Group(tuple(kinds), called._fields), tuple(operands))
        if len(values) == 1:
            return self._apply(name, values[0], node)
        raise self._fail(node, "kernels do not call this")

    def _apply(self, name: str, value: Value, node: ast.Call) -> Value:
        """Call a function of one value."""
        if name == "int" and value.type is FLOAT:
            operand = self._emit(f"call i64 @llvm.fptosi.sat.i64.f64(double {value.operands[0]})")
            return Value(INT, (operand,))
        if name == "int":
            return self._as(INT, value, node)
        if name == "float":
            return self._as(FLOAT, value, node)
        if name == "np.uint64" and value.type is INT:
            return Value(WORD, value.operands)
        if name == "len" and isinstance(value.type, Group):
            return constant(len(value.type.members))
        if name == "len" and isinstance(value.type, Array) and value.type.dimensions:
            return Value(INT, (value.operands[1],))
        if name in _FLOATS and value.type is FLOAT:
            called = f"double @llvm.{_FLOATS[name]}.f64"
            return Value(FLOAT, (self._emit(f"call {called}(double {value.operands[0]})"),))
        raise self._fail(node, "kernels do not call this")

    def _call(self, function: FunctionType, values: Sequence[Value]) -> Value:
        kinds = [each.type for each in values]
        name, result = self._callees.call(function, kinds)
        types = chain.from_iterable(map(operand_types, kinds))
        operands = chain.from_iterable(each.operands for each in values)
        given = ", ".join(map(" ".join, zip(types, operands, strict=True)))
        if result is None:
            self._do(f"call void {name}({given})")
            return Value(Group(()), ())
        returned, members = returned_type(result), range(len(operand_types(result)))
        whole = self._emit(f"call {returned} {name}({given})")
        if len(members) == 1:
            return Value(result, (whole,))
        parts = (self._emit(f"extractvalue {returned} {whole}, {each}") for each in members)
        return Value(result, tuple(parts))

    def _extreme(self, name: str, values: Sequence[Value], node: ast.Call) -> Value:
        """The minimum or maximum of several values; in ties, the first."""
        best = values[0]
        for value in values[1:]:
            kind, one, two = self._alike(best, value, node, INT)
            compared = {"min": ("icmp slt", "fcmp olt"), "max": ("icmp sgt", "fcmp ogt")}[name]
            better = self._emit(f"{compared[kind is FLOAT]} {kind.llvm} {two}, {one}")
            chosen = self._emit(f"select i1 {better}, {kind.llvm} {two}, {kind.llvm} {one}")
            best = Value(kind, (chosen,))
        return best

    def _members(self, value: Value, node: ast.AST, count: int = 0) -> list[Value]:
        """The members of a tuple, or the first ``count`` of an array with one dimension."""
        if isinstance(value.type, Array) and value.type.dimensions == 1:
            size, address = value.type.dtype.itemsize, value.operands[0]
            places = [f"getelementptr i8, ptr {address}, i64 {size * n}" for n in range(count)]
            return [self._read(value.type.dtype, self._emit(place), node) for place in places]
        if not isinstance(value.type, Group):
            raise self._fail(node, f"{value.type} is no tuple")
        operands = iter(value.operands)
        return [
            Value(kind, tuple(islice(operands, len(operand_types(kind)))))
            for kind in value.type.members
        ]

    def _branch(self, test: ast.expr, then: str, other: str) -> None:
        (truth,) = self._truth(test).operands
        self._end(f"br i1 {truth}, label {then}, label {other}")
