"""Checks of values, which a graph leaves out: ``assert``, and a ``raise`` that an ``if`` guards.

A graph holds no branch on values. Where one side of such a branch only raises an exception, the
other side is what every step that goes on has taken, so that side alone is captured. This is how
models guard themselves (``assert not x.isnan().any()``) and how ``torch.distributions`` checks
arguments. Which sides raise is read from the bytecode of the code that asks.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

_JUMPS_ON = {"FALSE": False, "TRUE": True}
_MAX_INSTRUCTIONS = 1000
_KEY = "pipectl_condition"


@contextmanager
def left_out_checks() -> Iterator[None]:
    """While a step is exported: let every check of values pass, and leave it out of the graph."""
    kinds: tuple[Any, ...] = (Tensor, torch.SymBool)
    untouched = [kind.__bool__ for kind in kinds]
    try:
        for kind, ask in zip(kinds, untouched, strict=True):
            kind.__bool__ = _passing(ask)
        yield
    finally:
        for kind, ask in zip(kinds, untouched, strict=True):
            kind.__bool__ = ask
        if "__bool__" in vars(Tensor):  # inherited until now
            del Tensor.__bool__


def _passing(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def boolean(value: Any) -> bool:
        if get_proxy_mode() is not None and _follows_from_values(value):
            answer = _passes_if(sys._getframe(1))
            if answer is not None:
                _mark(value)
                return answer
        return ask(value)

    return boolean


def _follows_from_values(value: Any) -> bool:
    """Whether an answer is unknown when a model is captured; that to a question of sizes is not."""
    if isinstance(value, Tensor):
        return True
    return bool(torch.fx.experimental.symbolic_shapes.free_unbacked_symbols(value))


def _mark(condition: Any) -> None:
    """Note at the operator that gives a condition that nobody else asked for it."""
    mode = get_proxy_mode()
    slot: Any = None
    if mode is not None and isinstance(condition, Tensor):
        slot = get_proxy_slot(condition, mode.tracer, None)
    if slot is not None:
        slot.proxy.node.meta[_KEY] = True


def drop_conditions(graph: fx.Graph) -> None:
    """Drop the operators that do nothing but give the conditions of checks that were left out."""
    unread = {node for node in graph.nodes if _KEY in node.meta}
    for node in reversed(graph.nodes):
        if node not in unread or node.users or node.op != "call_function" or _acts(node):
            continue
        unread.update(node.all_input_nodes)
        graph.erase_node(node)


def _acts(node: fx.Node) -> bool:
    """Whether an operator does more than give a value."""
    schema = getattr(node.target, "_schema", None)
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if schema is None:
        return node.target is not operator.getitem
    return schema.is_mutable or draws or "running_mean" in str(schema)


def _passes_if(frame: FrameType) -> bool | None:
    """The answer with which a frame that asks goes on; None if it goes on with both."""
    return _answer(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=1024)
def _answer(code: CodeType, offset: int) -> bool | None:
    found = {each.offset: each for each in dis.get_instructions(code)}
    following = dict(zip(found, list(found)[1:], strict=False))
    if found[offset].opname == "TO_BOOL":  # Python 3.13 asks before it jumps
        offset = following[offset]
    jump = found[offset]
    if "POP_JUMP" not in jump.opname:
        return None
    answer = _JUMPS_ON.get(jump.opname.rpartition("_")[2])
    if answer is None:
        return None
    body = _Body(code, found, following)
    raises = body.raises(jump.argval), body.raises(following[offset])
    if raises[0] is raises[1]:
        return None
    return not answer if raises[0] else answer


class _Body:
    """The instructions of a function, by offset."""

    def __init__(
        self, code: CodeType, at: Mapping[int, dis.Instruction], following: Mapping[int, int]
    ) -> None:
        self._at = at
        self._following = following
        entries: Any = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
        self._guarded = [(e.start, e.end) for e in entries if not self._leads_on(e.target)]

    def raises(self, offset: int) -> bool:
        """Whether whatever runs from an instruction on ends in an exception that leaves."""
        for _ in range(_MAX_INSTRUCTIONS):
            name = self._at[offset].opname
            if name == "RAISE_VARARGS":
                return not any(start <= offset < end for start, end in self._guarded)
            if name.startswith("RETURN") and name != "RETURN_GENERATOR":
                return False
            if name.startswith("JUMP_FORWARD"):
                offset = self._at[offset].argval
            elif "JUMP" in name or name in ("FOR_ITER", "SEND", "YIELD_VALUE"):
                return False
            else:
                offset = self._following.get(offset, -1)
                if offset < 0:
                    return False
        return False

    def _leads_on(self, handler: int) -> bool:
        """Whether a handler is that of a ``with``, or of what cleans up: it raises again."""
        names: list[str] = []
        offset: int | None = handler
        while offset is not None and len(names) < 3:
            names.append(self._at[offset].opname)
            offset = self._following.get(offset)
        return "WITH_EXCEPT_START" in names or "RERAISE" in names
