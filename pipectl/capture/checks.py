"""Checks of values, which a graph leaves out: ``assert``, and a ``raise`` that an ``if`` guards.

A graph holds no branch on values. Where one side of such a branch only raises an exception, the
other side is what every step that goes on has taken, so that side alone is captured. This is how
models guard themselves (``assert not x.isnan().any()``) and how ``torch.distributions`` checks
arguments. Which sides raise is read from the bytecode of the code that asks, and whether the model
catches what they raise from that of its callers. From 2.15 on, torch asserts asynchronously where
it exports its own checks; such an operator counts as one of them.
"""

from __future__ import annotations

import dis
import inspect
import operator
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from pipectl.capture.step import Step

_JUMPS_ON = {"FALSE": False, "TRUE": True}
_LOADS = ("LOAD_GLOBAL", "LOAD_FAST", "LOAD_DEREF", "LOAD_NAME")
_MAX_INSTRUCTIONS = 1000
_UNCAUGHT = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
"""Where the code lies that catches no exception of a model for good."""
_KEY = "pipectl_condition"
_GUARD = torch.ops.aten._assert_tensor_metadata.default
"""Of the type of what is cast, which an export leaves before the cast."""


def mark_condition(condition: Any) -> None:
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
        if node.target is _GUARD and unread.issuperset(node.all_input_nodes):
            graph.erase_node(node)
        elif node in unread and not (node.users or node.op != "call_function" or _acts(node)):
            unread.update(node.all_input_nodes)
            graph.erase_node(node)


def _acts(node: fx.Node) -> bool:
    """Whether an operator does more than give a value."""
    schema = getattr(node.target, "_schema", None)
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if schema is None:
        return node.target is not operator.getitem
    return schema.is_mutable or draws or "running_mean" in str(schema)


def passing_answer(frame: FrameType) -> bool | None:
    """The answer with which a frame that asks goes on; None if it goes on with both."""
    body = _body(frame.f_code)
    sides = body.sides(frame.f_lasti)
    if sides is None:
        return None
    raises = [
        offset is not None and not _catches(frame, offset)
        for offset in map(body.raise_from, sides.values())
    ]
    if raises[0] is raises[1] or is_caught(frame.f_back):
        return None
    return list(sides)[raises.index(False)]


def is_caught(frame: FrameType | None) -> bool:
    """Whether the model catches an exception that leaves what a frame of it calls.

    The handlers of torch and of pipectl, which every call of a module passes, raise it again.
    """
    while frame is not None and frame.f_code is not Step.forward.__code__:
        if not frame.f_code.co_filename.startswith(_UNCAUGHT) and _catches(frame, frame.f_lasti):
            return True
        frame = frame.f_back
    return False


def _catches(frame: FrameType, offset: int) -> bool:
    """Whether a frame may go on after an exception at an instruction."""
    body = _body(frame.f_code)
    waiting = [offset]
    seen: set[int] = set()
    while waiting:
        offset = waiting.pop()
        handler = body.handler_of(offset)
        if handler is None or handler in seen:
            continue
        seen.add(handler)
        manager = body.manager_at(handler)
        catches, raises = body.handling(handler)
        if catches and not (manager and _lets_pass(frame, manager)):
            return True
        waiting += raises
    return False


def _lets_pass(frame: FrameType, manager: tuple[str, ...]) -> bool:
    """Whether the context manager of a ``with`` is known to catch nothing, as those of torch."""
    name, *attributes = manager
    known = {**frame.f_builtins, **frame.f_globals, **frame.f_locals}
    value = known.get(name)
    for attribute in attributes:
        value = inspect.getattr_static(value, attribute, None)
    return value is nullcontext or str(getattr(value, "__module__", "")).startswith("torch.")


class _Body:
    """The instructions of a function, by offset."""

    def __init__(self, code: CodeType) -> None:
        bytecode: Any = dis.Bytecode(code)
        self._at: dict[int, dis.Instruction] = {each.offset: each for each in bytecode}
        self._following = dict(zip(self._at, list(self._at)[1:], strict=False))
        self._handlers = [(e.start, e.end, e.target) for e in bytecode.exception_entries]

    def sides(self, offset: int) -> dict[bool, int] | None:
        """Where a question leads, by its answer; None if it is no question of an ``if``."""
        if self._at[offset].opname == "TO_BOOL":  # Python 3.13 asks before it jumps
            offset = self._following[offset]
        jump = self._at[offset]
        answer = _JUMPS_ON.get(jump.opname.rpartition("_")[2])
        if "POP_JUMP" not in jump.opname or answer is None:
            return None
        return {answer: jump.argval, not answer: self._following[offset]}

    def raise_from(self, offset: int) -> int | None:
        """Where all that runs from an instruction on ends in a ``raise``; None if it may not."""
        for _ in range(_MAX_INSTRUCTIONS):
            name = self._at[offset].opname
            if name == "RAISE_VARARGS":
                return offset
            if name.startswith("RETURN") and name != "RETURN_GENERATOR":
                return None
            if name.startswith("JUMP_FORWARD"):
                offset = self._at[offset].argval
            elif "JUMP" in name or name in ("FOR_ITER", "SEND", "YIELD_VALUE"):
                return None
            else:
                offset = self._following.get(offset, -1)
                if offset < 0:
                    return None
        return None

    def handler_of(self, offset: int) -> int | None:
        """Where an exception at an instruction leads; None if out of the function."""
        targets = (target for start, end, target in self._handlers if start <= offset < end)
        return next(targets, None)

    def handling(self, handler: int) -> tuple[bool, list[int]]:
        """Whether some way through a handler ends the exception, and where others raise again."""
        waiting, seen, raises = [handler], {handler}, []
        catches = False
        while waiting:
            offset = waiting.pop()
            following = self._following.get(offset, offset)
            name = self._at[offset].opname
            if name in ("RERAISE", "RAISE_VARARGS"):
                raises.append(offset)
            elif name == "POP_EXCEPT" and self._at[following].opname != "RERAISE":
                catches = True
            else:
                ways = [] if name.startswith("JUMP") else [following]
                if "JUMP" in name or name in ("FOR_ITER", "SEND"):
                    ways.append(self._at[offset].argval)
                waiting += [way for way in ways if way not in seen]
                seen.update(ways)
        return catches, raises

    def manager_at(self, handler: int) -> tuple[str, ...]:
        """The name that gives the context manager of a ``with``; empty if nothing so plain does."""
        if self._at[self._following.get(handler, handler)].opname != "WITH_EXCEPT_START":
            return ()
        start = min(start for start, _, target in self._handlers if target == handler)
        before = [each for each in self._at.values() if each.offset < start]
        while before and before.pop().opname not in ("BEFORE_WITH", "COPY"):
            pass
        place = before[-1].positions if before else None
        spans = [each for each in before if _lies_in(each.positions, place)]
        names: list[str] = []
        for each in spans:
            plain = each.opname.startswith(("LOAD_ATTR", "LOAD_METHOD") if names else _LOADS)
            if plain and isinstance(each.argval, str):
                names.append(each.argval)
            elif each.opname != "PUSH_NULL":
                break
        return () if any("JUMP" in each.opname for each in spans) else tuple(names)


@lru_cache(maxsize=1024)
def _body(code: CodeType) -> _Body:
    return _Body(code)


def _lies_in(inner: Any, outer: Any) -> bool:
    """Whether one stretch of source text lies in another."""
    if not inner or not outer or None in inner or None in outer:
        return False
    (first, last, left, right), (start, end, begin, stop) = inner, outer
    return bool((start, begin) <= (first, left) and (last, right) <= (end, stop))
