"""Partitions that fit into memory, for when the balanced ones do not.

Runs the dynamic programme over prefixes of topological orders with the memory of every stage:
for the smallest bottleneck within the limits, or for the smallest peak of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import isfinite

import numpy as np

from pipectl.planner.condense import Block
from pipectl.planner.dynamic import UNREACHED, Load, smallest_bottleneck
from pipectl.planner.ideals import prefix_downsets
from pipectl.planner.liveness import memory_of, parameter_gradients
from pipectl.planner.partition import PER_SECOND
from pipectl.planner.problem import Problem
from pipectl.planner.spans import Boundary, Integers, Items, Partition, Spans, States, spans_by_end

MOST_DOWNSETS = 1500


class Fitter:
    """Partitions of a problem's graph under memory limits."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def balanced(
        self, limits_bytes: Sequence[float], size: int, warm_up: Sequence[int]
    ) -> list[Partition]:
        """Partitions with small bottlenecks that fit, or nearly: the caller checks the exact peak.

        Args:
            limits_bytes: memory of every stage's rank.
            size: samples of a micro-batch.
            warm_up: micro-batches in flight in every stage.
        """
        limits = np.array(limits_bytes)

        def load(spans: Spans, memory: Integers) -> Integers:
            loads: Integers = np.where(memory <= limits, spans.compute[:, None], UNREACHED)
            return loads

        return self._search(load, size, warm_up)

    def smallest_peak(
        self, limits_bytes: Sequence[float], size: int, warm_up: Sequence[int]
    ) -> list[Partition]:
        """Partitions whose most demanding rank, relative to its limit, demands least."""
        finite = [limit if isfinite(limit) else 0 for limit in limits_bytes]
        allowed = np.array(finite, dtype=np.int64)
        spare = allowed.max() - allowed

        def load(_: Spans, memory: Integers) -> Integers:
            loads: Integers = memory + spare
            return loads

        return self._search(load, size, warm_up)

    def _search(
        self,
        load: Callable[[Spans, Integers], Integers],
        size: int,
        warm_up: Sequence[int],
    ) -> list[Partition]:
        """Once without messages and temporary values (too little), once with (too much)."""
        found = []
        for messages in (0, 1):
            memory = self._memory(self._problem.scale(size), warm_up, messages)
            chains = smallest_bottleneck(
                self._spans,
                len(warm_up),
                lambda spans, memory=memory: load(spans, memory(spans)),  # type: ignore[misc]
            )
            if chains.best(len(warm_up)) is not None:
                found.append(self._states.cut(chains.states(len(warm_up))))
        return list(dict.fromkeys(found))

    def _memory(self, scale: float, warm_up: Sequence[int], messages: int) -> Load:
        """Peak of each span by position, in bytes."""
        optimizer = self._problem.profile.optimizer
        state = optimizer.state_bytes_per_parameter_byte if optimizer is not None else 0.0
        room = messages * scale * self._temporary
        flying = scale * np.asarray(warm_up, dtype=float)

        def memory(spans: Spans) -> Integers:
            resident = self._problem.baseline_bytes + self._gradients[spans.end]
            resident = resident + (1 + state) * self._parameters[spans.end]
            kept = self._saved[spans.end] + messages * spans.crossing
            total: Integers = (room + resident[:, None] + kept[:, None] * flying).astype(np.int64)
            return total

        return memory

    @cached_property
    def _states(self) -> States:
        graph = self._problem.graph
        times = self._problem.block_times(self._problem.profile.micro_batch_size)
        compute = [round(time * PER_SECOND) for time in times]
        return States(graph, prefix_downsets(graph, MOST_DOWNSETS), compute)

    @cached_property
    def _spans(self) -> list[Spans]:
        values = self._problem.graph.values
        sizes = np.array([value.size_bytes for value in values], dtype=np.int64)
        messages = Boundary(self._states, Items([value.blocks for value in values], sizes))
        return spans_by_end(self._states, messages, int(self._states.compute[-1]))

    @cached_property
    def _parameters(self) -> list[Integers]:
        return self._touched(lambda block: block.parameters)

    @cached_property
    def _temporary(self) -> int:
        """The most that one operator allocates at once."""
        memory = [memory_of(operator) for operator in self._problem.profile.operators]
        return max(max(one.forward_bytes - one.made_bytes, one.backward_bytes) for one in memory)

    @cached_property
    def _gradients(self) -> list[Integers]:
        """Of parameters; one that several operators use has a gradient for each."""
        operators = self._problem.profile.operators
        return self._touched(
            lambda block: {
                f"{index} {name}": size
                for index in block.operators
                for name, size in parameter_gradients(operators[index])
            }
        )

    @cached_property
    def _saved(self) -> list[Integers]:
        return self._touched(lambda block: block.saved)

    def _touched(self, held: Callable[[Block], Mapping[str, int]]) -> list[Integers]:
        """Bytes that each span holds of what its blocks name, equal names once."""
        users: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for position, block in enumerate(self._problem.graph.blocks):
            for name, size in held(block).items():
                users[name] = users.get(name, 0) | 1 << position
                sizes[name] = size
        weights = np.array(list(sizes.values()), dtype=np.int64)
        boundary = Boundary(self._states, Items(list(users.values()), weights))
        return [boundary.touched(spans.starts, spans.end) for spans in self._spans]
