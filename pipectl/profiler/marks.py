"""Timing operators where they run: inside the forward and backward of a stage.

An operator measured alone finds other caches, another allocator and other neighbours than in a
stage, and misses what autograd does between operators. So marks are set into the stage's own code:

    mark  conv2d  mark  batch_norm  mark  relu  mark

A mark notes the time and how many autograd nodes exist by then; thus every node of the backward
belongs to the operator that made it, and a hook before each node notes when its turn comes. What
lies between two such times is the operator's, gradient accumulation included.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from pipectl.capture.randomness import SEEDERS
from pipectl.capture.stage import StageCode
from pipectl.profiler.machine import Clock

_OUTSIDE = -1
_TRIALS = 15
_CHAIN = 200
_count_nodes: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Cost:
    """What measuring itself costs, in seconds: of a mark, and of a hook of the backward."""

    mark_s: float
    hook_s: float


@dataclass(frozen=True)
class Spent:
    """Where the time of one forward and one backward went, in seconds by operator."""

    forward_s: dict[str, float]
    backward_s: dict[str, float]


class Marked:
    """A stage's code with marks; called in its place, it notes when every operator begins.

    Args:
        operators: names of the captured operators; other calls belong to one of them.
        clock: in seconds, when everything before is done.
        cost: of measuring, taken off every figure.
    """

    def __init__(
        self, code: StageCode, operators: Container[str], clock: Clock, cost: Cost
    ) -> None:
        self._clock, self._cost = clock, cost
        self._begins: list[float] = []
        self._nodes: list[int] = []
        self._turns: list[tuple[int, float]] = []
        self._roots: list[Any] = []
        assert isinstance(code.module, fx.GraphModule), "the code has marks already"
        begins, nodes = self._begins, self._nodes

        def mark() -> None:
            nodes.append(_count_nodes())
            begins.append(clock())

        self._module, self._owners = _with_marks(code.module, operators, mark)

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """What the stage's code returns."""
        self._begins.clear()
        self._nodes.clear()
        results: tuple[Tensor, ...] = self._module(*arguments)
        self._roots = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
        return results

    def watch_backward(self) -> None:
        """Set the hooks for the backward of the call that was just made."""
        self._turns.clear()
        visited = set(self._roots)
        waiting = list(visited)
        while waiting:
            node = waiting.pop()
            if "AccumulateGrad" not in type(node).__name__:
                node.register_prehook(self._hook(node))
            for later, _ in node.next_functions:
                if later is not None and later not in visited:
                    visited.add(later)
                    waiting.append(later)
        self._roots = []

    def spent(self, end: float) -> Spent:
        """The times of the call and of its backward, which was over at ``end``."""
        begins, turns, cost = self._begins, self._turns, self._cost
        forward = {
            owner: max(0.0, begins[index + 1] - begins[index] - cost.mark_s)
            for index, owner in enumerate(self._owners)
        }
        backward: dict[str, float] = dict.fromkeys(self._owners, 0.0)
        for (index, begin), (_, over) in pairwise([*turns, (_OUTSIDE, end)]):
            if index != _OUTSIDE:
                backward[self._owners[index]] += max(0.0, over - begin - cost.hook_s)
        return Spent(forward, backward)

    def _hook(self, node: Any) -> Callable[[Any], None]:
        number = node._sequence_nr()
        within = self._nodes[0] <= number < self._nodes[-1]
        index = bisect_right(self._nodes, number) - 1 if within else _OUTSIDE
        turns, clock = self._turns, self._clock

        def turn(_: Any) -> None:
            turns.append((index, clock()))

        return turn


def cost_of_measuring(clock: Clock) -> Cost:
    """What a mark and a hook take on this machine: the medians of some trials."""
    marks, hooks = [], []
    for _ in range(_TRIALS):
        numbers: list[int] = []
        begins: list[float] = []
        start = time.perf_counter()
        for _ in range(_CHAIN):
            numbers.append(_count_nodes())
            begins.append(clock())
        marks.append((time.perf_counter() - start) / _CHAIN)
        plain_s = _backward_s(None)
        hooks.append((_backward_s(clock) - plain_s) / _CHAIN)
    return Cost(statistics.median(marks), max(0.0, statistics.median(hooks)))


def _backward_s(clock: Clock | None) -> float:
    """Time of the backward of a chain of small operators, with a hook at each or without."""
    value = torch.ones(1, requires_grad=True)
    turns: list[float] = []
    for _ in range(_CHAIN):
        value = -value
        if clock is not None:
            assert value.grad_fn is not None
            value.grad_fn.register_prehook(lambda _, clock=clock: turns.append(clock()))
    start = time.perf_counter()
    value.backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - start


def _with_marks(
    module: fx.GraphModule, operators: Container[str], mark: Callable[[], None]
) -> tuple[fx.GraphModule, list[str]]:
    """The code with a mark before every operator and one after the last; whose each part is."""
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    owner_of = dict(zip(calls, _owners(calls, operators), strict=True))
    graph, owners = fx.Graph(), [""]
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        owner = owner_of.get(node)
        if node.op == "output" or (owner is not None and owner != owners[-1]):
            graph.call_function(mark)
            owners.append(owner or "")
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph), owners[1:-1]


def _owners(calls: Sequence[fx.Node], operators: Container[str]) -> list[str]:
    """The operator each call belongs to: a seed to the next one, a fork to the one before."""
    owners: list[str] = []
    waiting = 0
    for call in calls:
        if call.name in operators:
            owners += [call.name] * (waiting + 1)
            waiting = 0
        elif call.target in SEEDERS or not owners:
            waiting += 1
        else:
            owners.append(owners[-1])
    return owners
