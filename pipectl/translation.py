"""Translation of kernels from Python to LLVM IR.

A kernel is a function of numbers, NumPy arrays in C order, tables (arrays of records; see
:mod:`pipectl.arrays`) and named tuples of these. The types of a variable follow from the arguments
and never change. What may stand in a kernel: assignments, ``if``, ``while``, ``for`` over ``range``
or over a tuple, arithmetic and comparisons, ``min``, ``max``, ``abs``, ``len``, ``int``, ``float``,
``bool``, ``np.ceil``, indices and slices of arrays, attributes of records and named tuples, calls
of named tuples and of other kernels. All of it means what it means in Python, except that nothing
is checked: an index beyond the end is the caller's fault, and integers have 64 bits.

Every value is some LLVM operands: an array is its address and its shape, a tuple its members.
"""

from __future__ import annotations

import ast
import inspect
import struct
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np


class Scalar(NamedTuple):
    """A number.

    Args:
        name: ``int``, ``float`` or ``bool``.
        llvm: how LLVM calls it.
    """

    name: str
    llvm: str


INT, FLOAT, BOOL = Scalar("int", "i64"), Scalar("float", "double"), Scalar("bool", "i1")
_SCALARS = {each.name: each for each in (BOOL, INT, FLOAT)}
_STORED = {"i4": "i32", "i8": "i64", "u8": "i64", "f8": "double"}


class Array(NamedTuple):
    """Elements of a type, in C order."""

    dtype: np.dtype[Any]
    dimensions: int


class Row(NamedTuple):
    """One record of a table; its value is its address."""

    dtype: np.dtype[Any]


class Group(NamedTuple):
    """A tuple; of a named one also the names."""

    members: tuple[Any, ...]
    names: tuple[str, ...] = ()


Type = Scalar | Array | Row | Group


class Value(NamedTuple):
    """What an expression is: its type, and operands of LLVM."""

    type: Any
    operands: tuple[str, ...]


def operand_types(kind: Type) -> list[str]:
    """LLVM's types of the operands of a value."""
    if isinstance(kind, Scalar):
        return [kind.llvm]
    if isinstance(kind, Group):
        return list(chain.from_iterable(map(operand_types, kind.members)))
    return ["ptr", *["i64"] * (kind.dimensions if isinstance(kind, Array) else 0)]


def _returned(kind: Type) -> str:
    """LLVM's type of what a function returns."""
    types = operand_types(kind)
    return types[0] if len(types) == 1 else f"{{{', '.join(types)}}}"


def type_of(value: Any) -> Type:
    """The type of an argument.

    Raises:
        TypeError: kernels do not know it.
    """
    if isinstance(value, np.ndarray):
        if not (value.flags.c_contiguous and value.dtype.isnative):
            raise TypeError("kernels take arrays in C order and in the machine's byte order")
        return Array(value.dtype, value.ndim)
    if isinstance(value, tuple):
        return Group(tuple(map(type_of, value)), getattr(value, "_fields", ()))
    for python, kind in (((bool, np.bool_), BOOL), ((int, np.integer), INT), (float, FLOAT)):
        if isinstance(value, python):
            return kind
    raise TypeError(f"kernels do not take a {type(value).__name__}")


def constant(value: float) -> Value:
    """A number that is known now."""
    kind = type_of(value)
    if kind is FLOAT:
        return Value(kind, (f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}",))
    return Value(kind, (str(int(value)),))


@dataclass
class Module:
    """Functions of LLVM that belong together, one for each kernel and types of arguments.

    Args:
        function_of: the Python function of a kernel; None for anything else.
    """

    function_of: Callable[[Any], FunctionType | None]
    functions: dict[tuple[Any, ...], tuple[str, Any]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def call(self, function: FunctionType, kinds: Sequence[Type]) -> tuple[str, Any]:
        """The name of a function for arguments of some types, and the type of its result."""
        key = function, *kinds
        if key not in self.functions:
            name = f"@{function.__name__}.{len(self.functions)}"
            self.functions[key] = name, None
            body = _Body(self, function, kinds, name)
            self.functions[key] = name, body.result
            self.texts.append(body.text)
        return self.functions[key]

    def translate(self, function: FunctionType, kinds: Sequence[Type], symbol: str) -> str:
        """A function with all that it calls, of which others see it alone, by its symbol."""
        name, _ = self.call(function, kinds)
        *called, own = self.texts
        begin, rest = own.split(name, 1)
        own = f'{begin.replace("internal ", "")}@"{symbol}"{rest}'
        intrinsics = "declare double @llvm.fabs.f64(double)\ndeclare double @llvm.ceil.f64(double)"
        return "\n".join([intrinsics, *called, own])


@cache
def _tree(function: FunctionType) -> ast.FunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


_COMPARED = {
    ast.Lt: ("slt", "olt"),
    ast.LtE: ("sle", "ole"),
    ast.Gt: ("sgt", "ogt"),
    ast.GtE: ("sge", "oge"),
    ast.Eq: ("eq", "oeq"),
    ast.NotEq: ("ne", "une"),
}
_COMPUTED = {
    ast.Add: ("add", "fadd"),
    ast.Sub: ("sub", "fsub"),
    ast.Mult: ("mul", "fmul"),
    ast.BitAnd: ("and", ""),
    ast.BitOr: ("or", ""),
    ast.BitXor: ("xor", ""),
    ast.LShift: ("shl", ""),
    ast.RShift: ("ashr", ""),
}


class _Body:
    """The translation of one function for arguments of some types.

    Attributes:
        result: the type of what it returns; None if that is nothing.
        text: the function in LLVM's language.
    """

    def __init__(
        self, module: Module, function: FunctionType, kinds: Sequence[Type], name: str
    ) -> None:
        tree = _tree(function)
        self._module, self._globals, self._names = module, function.__globals__, 0
        self._where = f"{function.__module__}.{function.__name__}"
        self._slots: list[str] = []
        self._lines: list[str] = []
        self._open = True  # whether the current block has no end yet
        self._variables: dict[str, Value] = {}
        self._loops: list[tuple[str, str]] = []
        self.result: Any = None
        declared = tree.returns.id if isinstance(tree.returns, ast.Name) else ""
        self._declared = _SCALARS.get(declared)
        parameters: list[str] = []
        every = (each for each in ast.walk(tree) if isinstance(each, ast.Name))
        changed = {each.id for each in every if isinstance(each.ctx, ast.Store)}
        self._unchanged: dict[str, Value] = {}
        for argument, kind in zip(tree.args.args, kinds, strict=True):
            operands = tuple(self._new() for _ in operand_types(kind))
            parameters += map(" ".join, zip(operand_types(kind), operands, strict=True))
            if argument.arg in changed:
                self._bind(argument.arg, Value(kind, operands))
            else:
                self._unchanged[argument.arg] = Value(kind, operands)
        self._block(tree.body)
        if self._open:
            self._end("ret void" if self.result is None else "unreachable")
        returned = "void" if self.result is None else _returned(self.result)
        self.text = "\n".join(
            [
                f"define internal {returned} {name}({', '.join(parameters)}) {{",
                *self._slots,
                *self._lines,
                "}",
            ]
        )

    def _fail(self, node: ast.AST, why: str) -> TypeError:
        line = getattr(node, "lineno", 0)
        return TypeError(f"{self._where}, line {line} of it: {why}: {ast.unparse(node)}")

    # Lines, blocks and variables.

    def _new(self) -> str:
        self._names += 1
        return f"%v{self._names}"

    def _emit(self, line: str) -> str:
        """A line that has a result; the name of that."""
        name = self._new()
        self._do(f"{name} = {line}")
        return name

    def _do(self, line: str) -> None:
        if not self._open:  # after return, break or continue
            self._label(self._new())
        self._lines.append(f"  {line}")

    def _end(self, line: str) -> None:
        """The end of a block."""
        if self._open:
            self._lines.append(f"  {line}")
        self._open = False

    def _label(self, label: str) -> None:
        """The begin of a block."""
        self._end(f"br label {label}")
        self._lines.append(f"{label[1:]}:")
        self._open = True

    def _slot(self, kind: Type) -> Value:
        """Room for a value."""
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

    def _bind(self, name: str, value: Value, node: ast.AST | None = None) -> None:
        if name not in self._variables:
            self._variables[name] = self._slot(value.type)
        self._store(self._variables[name], value, node or ast.Name(name))

    def _as(self, kind: Type, value: Value, node: ast.AST) -> Value:
        """A value as one of another type: bools count as integers, integers as floats."""
        if value.type == kind:
            return value
        (operand,) = value.operands if isinstance(value.type, Scalar) else ("",)
        if kind is INT and value.type is BOOL:
            return Value(INT, (self._emit(f"zext i1 {operand} to i64"),))
        if kind is FLOAT and value.type is INT:
            return Value(FLOAT, (self._emit(f"sitofp i64 {operand} to double"),))
        if kind is FLOAT and value.type is BOOL:
            return self._as(FLOAT, self._as(INT, value, node), node)
        if kind is BOOL and value.type is INT:
            return Value(BOOL, (self._emit(f"icmp ne i64 {operand}, 0"),))
        raise self._fail(node, f"{value.type} is not {kind}")

    # Statements.

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            method = getattr(self, f"_{type(node).__name__.lower()}", None)
            if method is None:
                raise self._fail(node, "kernels have no such statement")
            method(node)

    def _expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self._value(node.value)

    def _pass(self, _: ast.Pass) -> None:
        """Nothing."""

    def _return(self, node: ast.Return) -> None:
        if node.value is None:
            self._end("ret void")
            return
        value = self._value(node.value)
        kind = self._declared or self.result or value.type
        value, self.result = self._as(kind, value, node), kind
        types, returned = operand_types(kind), _returned(kind)
        whole = value.operands[0] if len(types) == 1 else "undef"
        for place, (each, operand) in enumerate(zip(types, value.operands, strict=True)):
            if len(types) > 1:
                whole = self._emit(f"insertvalue {returned} {whole}, {each} {operand}, {place}")
        self._end(f"ret {returned} {whole}")

    def _assign(self, node: ast.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            self._set(target, value)

    def _augassign(self, node: ast.AugAssign) -> None:
        place: Any = ast.copy_location(type(node.target)(**vars(node.target)), node)
        place.ctx = ast.Load()
        self._set(node.target, self._compute(node.op, self._value(place), node.value, node))

    def _set(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Tuple):
            for each, member in zip(
                target.elts, self._members(value, len(target.elts)), strict=True
            ):
                self._set(each, member)
        elif isinstance(target, ast.Name):
            self._bind(target.id, value, target)
        elif isinstance(target, ast.Attribute):
            dtype, address = self._field(self._value(target.value), target)
            self._write(dtype, address, value, target)
        elif isinstance(target, ast.Subscript):
            array, address = self._element(target)
            if array.dimensions:
                raise self._fail(target, "kernels set one element at a time")
            self._write(array.dtype, address, value, target)
        else:
            raise self._fail(target, "kernels do not set this")

    def _members(self, value: Value, count: int) -> Iterator[Value]:
        """Of a tuple, or of an array with one dimension."""
        if isinstance(value.type, Group):
            at = 0
            for kind in value.type.members:
                size = len(operand_types(kind))
                yield Value(kind, value.operands[at : at + size])
                at += size
            return
        dtype, (address, _) = value.type.dtype, value.operands
        for place in range(count):
            yield self._read(
                dtype,
                self._emit(f"getelementptr i8, ptr {address}, i64 {place * dtype.itemsize}"),
            )

    def _if(self, node: ast.If) -> None:
        then, other, after = self._new(), self._new(), self._new()
        self._branch(node.test, then, other)
        for label, body in ((then, node.body), (other, node.orelse)):
            self._label(label)
            self._block(body)
            self._end(f"br label {after}")
        self._label(after)

    def _branch(self, test: ast.expr, then: str, other: str) -> None:
        truth = self._as(BOOL, self._value(test), test).operands[0]
        self._do(f"br i1 {truth}, label {then}, label {other}")
        self._open = False

    def _while(self, node: ast.While) -> None:
        self._refuse_else(node)
        test, body, after = self._new(), self._new(), self._new()
        self._label(test)
        self._branch(node.test, body, after)
        self._label(body)
        self._repeat(node.body, test, after)
        self._end(f"br label {test}")
        self._label(after)

    def _repeat(self, body: Sequence[ast.stmt], again: str, after: str) -> None:
        """The body of a loop, with the labels that continue and break lead to."""
        self._loops.append((again, after))
        self._block(body)
        self._loops.pop()

    def _break(self, _: ast.Break) -> None:
        self._end(f"br label {self._loops[-1][1]}")

    def _continue(self, _: ast.Continue) -> None:
        self._end(f"br label {self._loops[-1][0]}")

    def _refuse_else(self, node: ast.While | ast.For) -> None:
        if node.orelse:
            raise self._fail(node, "loops of kernels have no else")

    def _for(self, node: ast.For) -> None:
        self._refuse_else(node)
        if isinstance(node.iter, ast.Tuple):
            for each in node.iter.elts:
                self._set(node.target, self._value(each))
                self._block(node.body)
            return
        if not (isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range"):
            raise self._fail(node.iter, "kernels repeat over ranges and tuples")
        bounds = [self._as(INT, self._value(each), each) for each in node.iter.args]
        begin, stop = (constant(0), bounds[0]) if len(bounds) == 1 else bounds[:2]
        step = ast.literal_eval(node.iter.args[2]) if len(bounds) == 3 else 1
        counter = self._slot(INT)
        self._store(counter, begin, node)
        test, body, further, after = (self._new() for _ in range(4))
        self._label(test)
        (now,) = self._load(counter).operands
        compared = "slt" if step > 0 else "sgt"
        truth = self._emit(f"icmp {compared} i64 {now}, {stop.operands[0]}")
        self._end(f"br i1 {truth}, label {body}, label {after}")
        self._label(body)
        self._set(node.target, Value(INT, (now,)))
        self._repeat(node.body, further, after)
        self._label(further)
        (now,) = self._load(counter).operands
        self._store(counter, Value(INT, (self._emit(f"add i64 {now}, {step}"),)), node)
        self._end(f"br label {test}")
        self._label(after)

    # Expressions.

    def _value(self, node: ast.expr) -> Value:
        method = getattr(self, f"_value_{type(node).__name__.lower()}", None)
        if method is None:
            raise self._fail(node, "kernels have no such expression")
        value: Value = method(node)
        return value

    def _value_constant(self, node: ast.Constant) -> Value:
        return constant(node.value)  # type: ignore[arg-type]

    def _value_tuple(self, node: ast.Tuple) -> Value:
        values = list(map(self._value, node.elts))
        operands = chain.from_iterable(each.operands for each in values)
        return Value(Group(tuple(each.type for each in values)), tuple(operands))

    def _value_name(self, node: ast.Name) -> Value:
        if node.id in self._unchanged:
            return self._unchanged[node.id]
        if node.id in self._variables:
            return self._load(self._variables[node.id])
        return constant(self._globals[node.id])

    def _value_attribute(self, node: ast.Attribute) -> Value:
        if isinstance(node.value, ast.Name) and not self._is_local(node.value.id):
            return constant(getattr(self._globals[node.value.id], node.attr))
        value = self._value(node.value)
        if isinstance(value.type, Array) and node.attr == "shape":
            shape = value.operands[1:]
            return Value(Group((INT,) * len(shape)), shape)
        if isinstance(value.type, Group):
            members = list(self._members(value, 0))
            return members[value.type.names.index(node.attr)]
        return self._read(*self._field(value, node))

    def _is_local(self, name: str) -> bool:
        return name in self._variables or name in self._unchanged

    def _field(self, value: Value, node: ast.Attribute) -> tuple[np.dtype[Any], str]:
        """The type and the address of a field of a record."""
        if not isinstance(value.type, Row):
            raise self._fail(node, f"{value.type} has no such attribute")
        fields: Any = value.type.dtype.fields
        dtype, offset = fields[node.attr][:2]
        return dtype, self._emit(f"getelementptr i8, ptr {value.operands[0]}, i64 {offset}")

    def _read(self, dtype: np.dtype[Any], address: str) -> Value:
        """What is at an address."""
        if dtype.fields:
            return Value(Row(dtype), (address,))
        stored = _STORED[dtype.str[1:]]
        operand = self._emit(f"load {stored}, ptr {address}")
        if stored == "i32":
            operand = self._emit(f"sext i32 {operand} to i64")
        return Value(FLOAT if stored == "double" else INT, (operand,))

    def _write(self, dtype: np.dtype[Any], address: str, value: Value, node: ast.AST) -> None:
        stored = _STORED[dtype.str[1:]]
        (operand,) = self._as(FLOAT if stored == "double" else INT, value, node).operands
        if stored == "i32":
            operand = self._emit(f"trunc i64 {operand} to i32")
        self._do(f"store {stored} {operand}, ptr {address}")

    def _value_subscript(self, node: ast.Subscript) -> Value:
        value = self._value(node.value)
        if isinstance(value.type, Group):
            place: int = ast.literal_eval(node.slice)
            return list(self._members(value, 0))[place]
        array, address, *shape = self._element(node, value)
        if array.dimensions:
            return Value(array, (address, *shape))
        return self._read(array.dtype, address)

    def _element(self, node: ast.Subscript, value: Value | None = None) -> Any:
        """The type, the address and the shape of a part of an array."""
        value = value or self._value(node.value)
        if not isinstance(value.type, Array):
            raise self._fail(node, f"{value.type} has no elements")
        places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        address, *shape = value.operands
        end: str | None = None
        offset = "0"
        for dimension, place in enumerate(places):
            begin: ast.expr | None = place
            if isinstance(place, ast.Slice):
                assert place.step is None
                assert dimension == value.type.dimensions - 1
                begin, end = place.lower, shape[dimension]
                if place.upper is not None:
                    end = self._index(place.upper, end)
            at = "0" if begin is None else self._index(begin, shape[dimension])
            if end is not None:
                end = self._emit(f"sub i64 {end}, {at}")
            if dimension:
                offset = self._emit(f"mul i64 {offset}, {shape[dimension]}")
            offset = self._emit(f"add i64 {offset}, {at}")
        rest = shape[len(places) :]
        for size in rest:
            offset = self._emit(f"mul i64 {offset}, {size}")
        offset = self._emit(f"mul i64 {offset}, {value.type.dtype.itemsize}")
        part = self._emit(f"getelementptr i8, ptr {address}, i64 {offset}")
        rest = rest if end is None else [end]
        return (Array(value.type.dtype, len(rest)), part, *rest)

    def _index(self, node: ast.expr, size: str) -> str:
        """A place; those below 0 count from the end."""
        (place,) = self._as(INT, self._value(node), node).operands
        if place.isdigit():
            return place
        below = self._emit(f"icmp slt i64 {place}, 0")
        ahead = self._emit(f"add i64 {place}, {size}")
        return self._emit(f"select i1 {below}, i64 {ahead}, i64 {place}")

    def _value_binop(self, node: ast.BinOp) -> Value:
        return self._compute(node.op, self._value(node.left), node.right, node)

    def _compute(
        self, operator: ast.operator, left: Value, other: ast.expr, node: ast.AST
    ) -> Value:
        right = self._value(other)
        if isinstance(operator, ast.Div):
            one, two = (self._as(FLOAT, each, node).operands[0] for each in (left, right))
            return Value(FLOAT, (self._emit(f"fdiv double {one}, {two}"),))
        is_bitwise = isinstance(operator, ast.BitAnd | ast.BitOr | ast.BitXor)
        kind, one, two = self._alike(left, right, node, least=BOOL if is_bitwise else INT)
        if isinstance(operator, ast.FloorDiv | ast.Mod) and kind is INT:
            return self._divide(one, two, floor=isinstance(operator, ast.FloorDiv))
        name = _COMPUTED.get(type(operator), ("", ""))[kind is FLOAT]
        if not name:
            raise self._fail(node, f"kernels do not compute this with a {kind.name}")
        return Value(kind, (self._emit(f"{name} {kind.llvm} {one}, {two}"),))

    def _alike(
        self, left: Value, right: Value, node: ast.AST, least: Scalar = BOOL
    ) -> tuple[Scalar, str, str]:
        """Two numbers as numbers of the larger type."""
        order = list(_SCALARS.values())
        for each in (left, right):
            if not isinstance(each.type, Scalar):
                raise self._fail(node, f"{each.type} is no number")
        kind = max(left.type, right.type, least, key=order.index)
        pair = [self._as(kind, each, node).operands[0] for each in (left, right)]
        return kind, pair[0], pair[1]

    def _divide(self, one: str, two: str, *, floor: bool) -> Value:
        """Integers; quotients are rounded down, as in Python."""
        quotient = self._emit(f"sdiv i64 {one}, {two}")
        rest = self._emit(f"srem i64 {one}, {two}")
        signs = self._emit(f"xor i64 {rest}, {two}")
        differ = self._emit(f"icmp slt i64 {signs}, 0")
        uneven = self._emit(f"icmp ne i64 {rest}, 0")
        both = self._emit(f"and i1 {differ}, {uneven}")
        change = self._emit(f"select i1 {both}, i64 {'-1' if floor else two}, i64 0")
        return Value(INT, (self._emit(f"add i64 {quotient if floor else rest}, {change}"),))

    def _value_unaryop(self, node: ast.UnaryOp) -> Value:
        value = self._value(node.operand)
        (operand,) = value.operands
        if isinstance(node.op, ast.Not):
            (operand,) = self._as(BOOL, value, node).operands
            return Value(BOOL, (self._emit(f"xor i1 {operand}, true"),))
        if isinstance(node.op, ast.Invert):
            return Value(INT, (self._emit(f"xor i64 {operand}, -1"),))
        if value.type is FLOAT:
            return Value(FLOAT, (self._emit(f"fneg double {operand}"),))
        return Value(INT, (self._emit(f"sub i64 0, {operand}"),))

    def _value_compare(self, node: ast.Compare) -> Value:
        left, truth = self._value(node.left), ""
        for operator, other in zip(node.ops, node.comparators, strict=True):
            right = self._value(other)
            kind, one, two = self._alike(left, right, node, least=INT)
            names = _COMPARED[type(operator)]
            compared = f"fcmp {names[1]}" if kind is FLOAT else f"icmp {names[0]}"
            fresh = self._emit(f"{compared} {kind.llvm} {one}, {two}")
            truth = self._emit(f"and i1 {truth}, {fresh}") if truth else fresh
            left = right
        return Value(BOOL, (truth,))

    def _value_boolop(self, node: ast.BoolOp) -> Value:
        """Operands after one that decides are not looked at."""
        slot, after = self._slot(BOOL), self._new()
        for number, each in enumerate(node.values):
            value = self._as(BOOL, self._value(each), each)
            self._store(slot, value, each)
            further = self._new() if number < len(node.values) - 1 else after
            ends = (further, after) if isinstance(node.op, ast.And) else (after, further)
            self._do(f"br i1 {value.operands[0]}, label {ends[0]}, label {ends[1]}")
            self._open = False
            self._label(further)
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
            raise self._fail(node, "kernels take arguments by position")
        values = list(map(self._value, node.args))
        if name in ("min", "max"):
            return self._extreme(name, values, node)
        if name in _SCALARS:
            return self._convert(_SCALARS[name], values[0], node)
        if name == "len":
            return Value(INT, (values[0].operands[1],))
        if name == "abs" and values[0].type is FLOAT:
            return self._intrinsic("fabs", values[0])
        if name == "np.ceil":
            return self._intrinsic("ceil", values[0])
        if name == "np.uint64":
            return values[0]
        called: Any = self._globals.get(name)
        function = self._module.function_of(called)
        operands = list(chain.from_iterable(each.operands for each in values))
        kinds = [each.type for each in values]
        if function is None and hasattr(called, "_fields"):  # a named tuple is made
            return Value(Group(tuple(kinds), called._fields), tuple(operands))
        if function is None:
            raise self._fail(node, "kernels do not call this")
        return self._call(function, kinds, operands)

    def _call(
        self, function: FunctionType, kinds: Sequence[Type], operands: Sequence[str]
    ) -> Value:
        """Call another kernel."""
        name, result = self._module.call(function, kinds)
        types = chain.from_iterable(map(operand_types, kinds))
        given = ", ".join(map(" ".join, zip(types, operands, strict=True)))
        if result is None:
            self._do(f"call void {name}({given})")
            return Value(Group(()), ())
        returned, members = _returned(result), range(len(operand_types(result)))
        whole = self._emit(f"call {returned} {name}({given})")
        if len(members) == 1:
            return Value(result, (whole,))
        parts = (self._emit(f"extractvalue {returned} {whole}, {each}") for each in members)
        return Value(result, tuple(parts))

    def _intrinsic(self, name: str, value: Value) -> Value:
        return Value(
            FLOAT, (self._emit(f"call double @llvm.{name}.f64(double {value.operands[0]})"),)
        )

    def _extreme(self, name: str, values: Sequence[Value], node: ast.Call) -> Value:
        """The first of several that none is below, or above."""
        best = values[0]
        for value in values[1:]:
            kind, one, two = self._alike(best, value, node, least=INT)
            compared = {"min": ("icmp slt", "fcmp olt"), "max": ("icmp sgt", "fcmp ogt")}[name]
            better = self._emit(f"{compared[kind is FLOAT]} {kind.llvm} {two}, {one}")
            chosen = self._emit(f"select i1 {better}, {kind.llvm} {two}, {kind.llvm} {one}")
            best = Value(kind, (chosen,))
        return best

    def _convert(self, kind: Scalar, value: Value, node: ast.Call) -> Value:
        if kind is INT and value.type is FLOAT:
            return Value(INT, (self._emit(f"fptosi double {value.operands[0]} to i64"),))
        return self._as(kind, value, node)
