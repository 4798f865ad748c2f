"""Translation of kernels from Python to LLVM IR.

A kernel is a function of numbers, NumPy arrays in C order, tables (arrays of records; see
:mod:`pipectl.arrays`) and named tuples of these. The types of a variable follow from the arguments
and never change. A kernel may contain assignments, ``if``, ``while``, ``for`` over ``range``
or over a tuple, arithmetic and comparisons, ``min``, ``max``, ``abs``, ``len``, ``int``, ``float``,
``bool``, ``np.ceil``, ``np.uint64``, indices and slices of arrays, attributes of records and named
tuples, calls of named tuples and of other kernels. Anything else is an error, as are variables that
may be unset when they are read, and a missing return.

The semantics are Python's with NumPy's numbers, without checks at run time: indices beyond the end
and shifts by 64 bits or more are undefined. Integers have 64 bits. Division by 0 gives infinity for
floats and 0 for integers; ``int`` of a number that is too large is the largest integer, and of NaN
0. Operations on two numbers use the larger of their types. Global numbers are constants.

Why not numba: it took ten seconds to compile kernels that take one here, and a second to load in
every process.

Every value is a list of LLVM operands: an array is its address and shape, a tuple its members.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np

from pipectl.compiled.expressions import Expressions, Value, constant, returned_type
from pipectl.compiled.types import INT, SCALARS, Type, operand_types


@dataclass
class Module:
    """An LLVM module, with one function for each kernel and types of arguments.

    Args:
        function_of: the Python function of a kernel; None for anything else.
    """

    function_of: Callable[[Any], FunctionType | None]
    functions: dict[tuple[Any, ...], tuple[str, Any] | None] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def call(self, function: FunctionType, kinds: Sequence[Type]) -> tuple[str, Any]:
        """The name of a function for arguments of some types, and the type of its result."""
        key = function, *kinds
        if key not in self.functions:
            name = f"@{function.__name__}.{len(self.functions)}"
            self.functions[key] = None  # until it is translated
            body = _Body(self, function, kinds, name)
            self.functions[key] = name, body.result
            self.texts.append(body.text)
        translated = self.functions[key]
        if translated is None:
            raise TypeError(f"{function.__name__}: kernels do not call themselves")
        return translated

    def translate(self, function: FunctionType, kinds: Sequence[Type], symbol: str) -> str:
        """Translate a function and all that it calls; exports only the function, as ``symbol``."""
        name, _ = self.call(function, kinds)
        *called, own = self.texts
        begin, rest = own.split(name, 1)
        own = f'{begin.replace("internal ", "")}@"{symbol}"{rest}'
        return "\n".join([_INTRINSICS, *called, own])


@cache
def _tree(function: FunctionType) -> ast.FunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(node, ast.FunctionDef) or node.name != function.__name__:
        raise TypeError(f"the file of {function.__module__}.{function.__name__} has changed")
    return node


_INTRINSICS = """
declare double @llvm.fabs.f64(double)
declare double @llvm.ceil.f64(double)
declare i64 @llvm.fptosi.sat.i64.f64(double)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
"""


class _Body(Expressions):
    """The translation of one function for arguments of some types.

    Attributes:
        result: the type of the result; None if there is none.
        text: the function in LLVM IR.
    """

    def __init__(
        self, module: Module, function: FunctionType, kinds: Sequence[Type], name: str
    ) -> None:
        tree = _tree(function)
        every = (each for each in ast.walk(tree) if isinstance(each, ast.Name))
        changed = {each.id for each in every if isinstance(each.ctx, ast.Store)}
        where = f"{function.__module__}.{function.__name__}"
        super().__init__(module, where, function.__globals__, changed)
        self._loops: list[tuple[str, str]] = []
        self.result: Any = None
        self._returns_nothing = False
        declared = tree.returns.id if isinstance(tree.returns, ast.Name) else ""
        self._declared = SCALARS.get(declared)
        parameters: list[str] = []
        if function.__code__.co_freevars:
            raise TypeError(f"{self._where}: kernels use no variables of other functions")
        if len(tree.args.args) != len(kinds):
            expected = len(tree.args.args)
            raise TypeError(f"{self._where} takes {expected} arguments, not {len(kinds)}")
        for argument, kind in zip(tree.args.args, kinds, strict=True):
            operands = tuple(self._new() for _ in operand_types(kind))
            parameters += map(" ".join, zip(operand_types(kind), operands, strict=True))
            if argument.arg in self._changed:
                self._bind(argument.arg, Value(kind, operands), argument)
            else:
                self._unchanged[argument.arg] = Value(kind, operands)
        self._block(tree.body)
        if self._open:
            self._return(ast.Return())
        if self._returns_nothing and (self._declared or self.result):
            raise TypeError(f"{self._where} may end without a result")
        returned = "void" if self.result is None else returned_type(self.result)
        self.text = "\n".join(
            [
                f"define internal {returned} {name}({', '.join(parameters)}) {{",
                *self._slots,
                *self._lines,
                "}",
            ]
        )

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
            self._returns_nothing = True
            self._end("ret void")
            return
        value = self._value(node.value)
        kind = self._declared or self.result or value.type
        value, self.result = self._as(kind, value, node), kind
        types, returned = operand_types(kind), returned_type(kind)
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
        if isinstance(node.target, ast.Name):
            value = self._compute(node.op, self._value_name(node.target), node.value, node)
            self._bind(node.target.id, value, node)
        else:
            dtype, address = self._place(node.target)
            old = self._read(dtype, address, node)
            self._write(dtype, address, self._compute(node.op, old, node.value, node), node)

    def _set(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Tuple):
            members = self._members(value, target, len(target.elts))
            if len(members) != len(target.elts):
                raise self._fail(target, f"there are {len(members)} values for this")
            for each, member in zip(target.elts, members, strict=True):
                self._set(each, member)
        elif isinstance(target, ast.Name):
            self._bind(target.id, value, target)
        else:
            self._write(*self._place(target), value, target)

    def _place(self, target: ast.expr) -> tuple[np.dtype[Any], str]:
        """The type and the address of a field or an element."""
        if isinstance(target, ast.Attribute):
            return self._field(self._value(target.value), target)
        if isinstance(target, ast.Subscript):
            array, address, *_ = self._element(target, self._value(target.value))
            if not array.dimensions:
                return array.dtype, address
        raise self._fail(target, "kernels set names, fields and single elements")

    def _if(self, node: ast.If) -> None:
        then, other, after = self._new(), self._new(), self._new()
        self._branch(node.test, then, other)
        before, ends = self._assigned, []
        for label, body in ((then, node.body), (other, node.orelse)):
            self._assigned = set(before)
            self._label(label)
            self._block(body)
            if self._open:
                ends.append(self._assigned)
                self._end(f"br label {after}")
        if ends:
            self._assigned = set.intersection(*ends)
            self._label(after)

    def _while(self, node: ast.While) -> None:
        test, body, after = self._new(), self._new(), self._new()
        self._label(test)
        endless = isinstance(node.test, ast.Constant) and node.test.value is True
        if not endless:
            self._branch(node.test, body, after)
            self._label(body)
        self._repeat(node, test, after)
        self._end(f"br label {test}")
        if not endless or any(isinstance(each, ast.Break) for each in ast.walk(node)):
            self._label(after)

    def _repeat(
        self, node: ast.While | ast.For, again: str, after: str, item: Value | None = None
    ) -> None:
        """Translate the body of a loop, with the labels of continue and break."""
        if node.orelse:
            raise self._fail(node, "loops of kernels have no else")
        before = set(self._assigned)
        if isinstance(node, ast.For) and item is not None:
            self._set(node.target, item)
        self._loops.append((again, after))
        self._block(node.body)
        self._loops.pop()
        self._assigned = before  # the body may not have run, or not all of it

    def _break(self, _: ast.Break) -> None:
        self._end(f"br label {self._loops[-1][1]}")

    def _continue(self, _: ast.Continue) -> None:
        self._end(f"br label {self._loops[-1][0]}")

    def _for(self, node: ast.For) -> None:
        after = self._new()
        if isinstance(node.iter, ast.Tuple):
            for item in list(map(self._value, node.iter.elts)):
                further = self._new()
                self._repeat(node, further, after, item)
                self._label(further)
            self._label(after)
            return
        if not (isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range"):
            raise self._fail(node.iter, "kernels repeat over ranges and tuples")
        arguments = node.iter.args
        step = self._literal(arguments[2]) if len(arguments) == 3 else 1
        if not 1 <= len(arguments) <= 3 or node.iter.keywords or not step:
            raise self._fail(node.iter, "no range")
        bounds = [self._as(INT, self._value(each), each) for each in arguments[:2]]
        begin, stop = bounds if len(bounds) == 2 else (constant(0), bounds[0])
        counter = self._slot(INT)
        self._store(counter, begin, node)
        test, body, further = (self._new() for _ in range(3))
        self._label(test)
        (now,) = self._load(counter).operands
        compared = "slt" if step > 0 else "sgt"
        truth = self._emit(f"icmp {compared} i64 {now}, {stop.operands[0]}")
        self._end(f"br i1 {truth}, label {body}, label {after}")
        self._label(body)
        self._repeat(node, further, after, Value(INT, (now,)))
        self._label(further)
        (now,) = self._load(counter).operands
        self._store(counter, Value(INT, (self._emit(f"add i64 {now}, {step}"),)), node)
        self._end(f"br label {test}")
        self._label(after)
