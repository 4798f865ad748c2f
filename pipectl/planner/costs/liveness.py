"""Peak memory that a stage allocates in a forward or backward, operator by operator.

In the forward, a value lives until its last reader in the stage is done, as in the code a stage
runs; values that autograd saves, and values that are sent, stay. The backward visits the operators
in reverse order, as autograd does (by descending sequence number). A gradient lives from the first
reader's backward to that of its producer, a saved value until the backward of the last operator
that saved it, and a received or sent value until the end.

Levels exclude memory held before the forward or backward begins. Each is a pair (bytes that grow
with the micro-batch, bytes that do not), so levels hold for any micro-batch size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from pipectl.profile_parts import Operator, OperatorMemory

Level = tuple[int, int]
_OUTSIDE = ""
"""Storage of gradients that other stages sent: owned by the message, not by the backward."""


@dataclass(frozen=True)
class Levels:
    """Highest levels of a stage.

    Args:
        forward: without received values.
        backward: if the parameters' gradients exist before.
        first_backward: if it creates them.
        left: bytes, growing with the micro-batch, of values that a forward drops after it has
            allocated what it keeps.
    """

    forward: tuple[Level, ...]
    backward: tuple[Level, ...]
    first_backward: tuple[Level, ...]
    left: int


@dataclass(frozen=True)
class Borders:
    """What crosses the borders of one stage.

    Args:
        stays: storages of received and sent values, which live until the end of the backward.
        returning: values whose gradients come from other stages.
        last_reader: for each value made in the stage, the index of its last reader in the stage.
        roots: operators whose backward starts without an incoming gradient: the loss.
    """

    stays: frozenset[str]
    returning: frozenset[str]
    last_reader: Mapping[str, int]
    roots: frozenset[str]


def peak_bytes(levels: Iterable[Level], scale: float) -> int:
    """The highest of some levels at ``scale`` times the profile's micro-batch size."""
    return max((ceil(scale * growing) + fixed for growing, fixed in levels), default=0)


def levels_of(operators: Sequence[Operator], borders: Borders) -> Levels:
    """The highest levels of a stage.

    Args:
        operators: of the stage, in graph order.
    """
    memory = [operator.allocations for operator in operators]
    backward = _Backward(operators, borders)
    for operator, own in zip(reversed(operators), reversed(memory), strict=True):
        backward.visit(operator, own)
    forward, left = _forward(operators, memory, borders)
    return Levels(_highest(forward), _highest(backward.later), _highest(backward.first), left)


def _forward(
    operators: Sequence[Operator], memory: Sequence[OperatorMemory], borders: Borders
) -> tuple[list[Level], int]:
    """The levels of the forward; and the most bytes of values that live when an operator allocates
    what stays, and do not stay themselves."""
    live = _inputs(operators, memory, borders)
    level = sum(live.values())
    ends = _ends(operators, memory, borders)
    kept = set(borders.stays) | {name for operator in operators for name, _ in operator.saved}
    staying, left = level, 0
    levels: list[Level] = [(level, 0)]
    for index, (operator, own) in enumerate(zip(operators, memory, strict=True)):
        levels.append((level + own.forward_bytes, 0))
        live[operator.id] = own.made_bytes
        saved = sum(size for name, size in operator.saved if operator.is_own(name))
        stays = saved + own.made_bytes * (own.storage in kept)
        level += own.made_bytes + saved
        staying += stays
        if stays:
            left = max(left, level - staying)
        level -= sum(live.pop(storage, 0) for storage in ends.get(index, set()) - kept)
    return levels, left


def evaluation_levels(operators: Sequence[Operator], borders: Borders) -> tuple[Level, ...]:
    """The highest levels of an evaluation, whose forward keeps nothing for a backward.

    Of what an operator saves of its own, only the largest part counts, and only while it runs: it
    may be needed anyway, as what a loss computes of its inputs is. The rest is of training, or of
    several operators within a submodule that is kept whole.
    """
    memory = [operator.allocations for operator in operators]
    live = _inputs(operators, memory, borders)
    level = sum(live.values())
    ends = _ends(operators, memory, borders)
    levels: list[Level] = [(level, 0)]
    for index, (operator, own) in enumerate(zip(operators, memory, strict=True)):
        saved = [size for name, size in operator.saved if operator.is_own(name)]
        running = own.forward_bytes - sum(saved) + max(saved, default=0)
        levels.append((level + max(running, own.made_bytes), 0))
        live[operator.id] = own.made_bytes
        level += own.made_bytes
        level -= sum(live.pop(each, 0) for each in ends.get(index, set()) - borders.stays)
    return _highest(levels)


def _inputs(
    operators: Sequence[Operator], memory: Sequence[OperatorMemory], borders: Borders
) -> dict[str, int]:
    """Tensors of the batch that operators save, which the stage neither computes nor receives."""
    known = borders.stays | {own.storage for own in memory}
    return {
        name: size
        for operator in operators
        for name, size in operator.saved
        if name not in known and not operator.is_own(name)
    }


def _ends(
    operators: Sequence[Operator], memory: Sequence[OperatorMemory], borders: Borders
) -> dict[int, set[str]]:
    """Storages by the operator after which none of their values is read."""
    last: dict[str, int] = {}
    for index, (operator, own) in enumerate(zip(operators, memory, strict=True)):
        used = max(index, borders.last_reader.get(operator.id, index))
        last[own.storage] = max(last.get(own.storage, 0), used)
    ends: dict[int, set[str]] = {}
    for storage, index in last.items():
        ends.setdefault(index, set()).add(storage)
    return ends


class _Backward:
    """The backward of a stage up to some operator.

    Attributes:
        later, first: levels with and without existing gradients of parameters.
    """

    def __init__(self, operators: Sequence[Operator], borders: Borders) -> None:
        self._savers = Counter(name for operator in operators for name, _ in operator.saved)
        self._tuples = {operator.id for operator in operators if not operator.output_bytes}
        self._borders = borders
        self._gradients = {name: [_OUTSIDE] for name in borders.returning}
        self._holders = Counter({_OUTSIDE: len(self._gradients)})
        self._sizes = {_OUTSIDE: 0}
        self._level = self._made = 0
        self.later: list[Level] = [(0, 0)]
        self.first: list[Level] = [(0, 0)]

    def visit(self, operator: Operator, memory: OperatorMemory) -> None:
        """The backward of one operator, the next in reverse order."""
        got = self._gradients.pop(operator.id, [])
        if got or operator.id in self._borders.roots:
            parameters = {name for name, _ in operator.parameters}
            fixed = sum(size for name, size in memory.gradients if name in parameters)
            self._note(memory.backward_bytes - fixed, fixed)
            self._made += fixed
            for name, size in memory.gradients:
                if name not in parameters:
                    self._give(f"{operator.id}>{name}", name, size, got)
        for storage in got:
            self._drop(storage)
        self._release(operator)

    def _give(self, new: str, name: str, size: int, got: Sequence[str]) -> None:
        """Store the gradient of one use of a value, or add it to those of earlier uses."""
        storage = got[-1] if got and not size else new
        before = self._gradients.setdefault(name, [])
        if not before or name in self._tuples:
            before.append(self._hold(storage, size))
        elif before[0] == _OUTSIDE or self._holders[before[0]] > 1:  # the sum is a new tensor
            size = size or self._sizes[before[0]]
            self._note(2 * size, 0)
            self._drop(before.pop())
            before.append(self._hold(f"{new}+", size))

    def _hold(self, storage: str, size: int) -> str:
        if storage not in self._sizes:
            self._sizes[storage] = size
            self._level += size
        self._holders[storage] += 1
        return storage

    def _drop(self, storage: str) -> None:
        self._holders[storage] -= 1
        if not self._holders[storage] and storage != _OUTSIDE:
            self._level -= self._sizes.pop(storage)

    def _release(self, operator: Operator) -> None:
        """Drop saved values that no earlier operator saves."""
        for name, size in operator.saved:
            self._savers[name] -= 1
            if not self._savers[name] and name not in self._borders.stays:
                self._level -= size

    def _note(self, growing: int, fixed: int) -> None:
        self.later.append((self._level + growing, fixed))
        self.first.append((self._level + growing, self._made + fixed))


def _highest(levels: Sequence[Level]) -> tuple[Level, ...]:
    """The levels that are highest at some micro-batch size: none exceeds them in both parts."""
    highest: list[Level] = []
    for level in sorted(set(levels), reverse=True):
        if not highest or level[1] > highest[-1][1]:
            highest.append(level)
    return tuple(highest)
