"""Partitions that fit into memory, for when the balanced ones do not.

Runs the dynamic programme over prefixes of topological orders with the memory of every stage:
for the smallest bottleneck within the limits, or for the smallest peak of all. Where stages may
recompute, each has two modes; in the second it keeps only what it received, holds the rest in one
backward at a time, and computes its forward twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import numpy as np

from pipectl.arrays import Integers
from pipectl.planner.graphs.condense import Block, held_by
from pipectl.planner.graphs.ideals import prefix_downsets
from pipectl.planner.graphs.loads import PER_SECOND, Loads, items_of
from pipectl.planner.graphs.spans import Boundary, Items, Spans, States, find_spans
from pipectl.planner.machines.mix import Mix
from pipectl.planner.memory.liveness import memory_of, parameter_gradients, trained_parameters
from pipectl.planner.partitions.chain_kernels import UNREACHED
from pipectl.planner.partitions.dynamic import Chains, Check, Memory, best_chains
from pipectl.planner.partitions.partition import Cut
from pipectl.planner.problem import Problem

MOST_DOWNSETS = 1500


@dataclass(frozen=True)
class Fit:
    """What shall fit.

    Args:
        size: samples of a micro-batch.
        warm_up: micro-batches in flight in every stage.
        mix: the devices that stages may use.
        limits_bytes: memory of each kind of device.
        recompute: whether stages may.
    """

    size: int
    warm_up: tuple[int, ...]
    mix: Mix
    limits_bytes: tuple[float, ...]
    recompute: bool = False


class Fitter:
    """Partitions of a problem's graph under memory limits."""

    def __init__(self, problem: Problem, check: Check = lambda: None) -> None:
        self._problem = problem
        self._check = check

    def balanced(self, fit: Fit) -> list[Cut]:
        """Partitions with small bottlenecks that fit, or nearly: the caller checks the exact peak.

        Once without messages and temporary values (too little), once with (too much).
        """
        return _both(lambda messages: self._balanced(fit, messages))

    def smallest_peak(self, fit: Fit) -> list[Cut]:
        """Partitions whose most demanding rank, relative to its limit, demands least."""
        return _both(lambda messages: self._smallest_peak(fit, messages))

    def _balanced(self, fit: Fit, messages: int) -> Cut | None:
        """Looks at short spans first, and at all if these are not seen to be enough."""
        limits = np.array([min(limit, UNREACHED) for limit in fit.limits_bytes], dtype=np.int64)
        costs = self._problem.span_costs(fit.size)
        loads = Loads(self._problem.graph, self._downsets, costs)
        total, stages = int(loads.states.compute[-1]), len(fit.warm_up)
        length = 2 * total // stages + round(max(costs.compute_s) * PER_SECOND) + 1
        while True:
            spans, memory = self._spans(fit, messages, loads.states, length, limits)
            times = self._with_recomputation(fit, loads, spans)
            chains = best_chains(spans, fit.mix, times, memory=memory, check=self._check)
            best = chains.best(stages)
            if length >= total or (best is not None and best * max(costs.speeds) <= length):
                return None if best is None else _cut(chains, loads.states, stages)
            length = total

    def _smallest_peak(self, fit: Fit, messages: int) -> Cut | None:
        """A chain of short spans first; then all spans that demand no more than it does."""
        finite = [limit if isfinite(limit) else 0 for limit in fit.limits_bytes]
        allowed = np.array(finite, dtype=np.int64)
        spare = allowed.max() - allowed
        states, stages = self._states, len(fit.warm_up)
        total, bound, found = int(states.compute[-1]), UNREACHED, None
        for length in (4 * total // stages, total):
            within = np.full(len(spare), bound, dtype=np.int64)
            spans, memory = self._spans(fit, messages, states, length, within)
            modes = 2 if fit.recompute else 1
            extra = np.repeat(spare, modes)[:, None] + np.zeros(len(spans), dtype=np.int64)
            memory = Memory(memory.held, memory.flying, None)
            chains = best_chains(spans, fit.mix, extra, memory=memory, check=self._check)
            best = chains.best(stages)
            if best is not None:
                bound, found = best, _cut(chains, states, stages)
        return found

    def _spans(
        self, fit: Fit, messages: int, states: States, length: int, limits: Integers
    ) -> tuple[Spans, Memory]:
        """Spans up to some length that fit some device where the fewest are in flight."""
        sizes = self._boundaries(states).up_to(min(length, int(states.compute[-1])))
        scale = self._problem.scale(fit.size)
        flying = np.rint(1000 * scale * np.array(fit.warm_up)).astype(np.int64)
        held = self._held(fit, messages, sizes)
        least = held[0::2] + held[1::2] * flying.min() // 1000
        kept = (least <= limits.max()).any(axis=0)
        return sizes.spans.only(kept), Memory(held[:, kept].copy(), flying, limits)

    def _held(self, fit: Fit, messages: int, sizes: _Sizes) -> Integers:
        """Bytes by mode, without and for each micro-batch in flight; shape [modes * 2, spans]."""
        scale = self._problem.scale(fit.size)
        state = self._problem.profile.optimizer_cost.state_bytes_per_parameter_byte
        resident = self._problem.baseline_bytes + sizes.parameters + sizes.gradients
        resident = resident + state * sizes.trained
        resident = (resident + messages * scale * self._temporary).astype(np.int64)
        rows = [resident, sizes.saved + messages * sizes.crossing]
        if fit.recompute:
            whole = np.maximum(sizes.saved - sizes.entering, 0) + messages * sizes.crossing
            rows += [resident + (scale * whole).astype(np.int64), sizes.entering]
        return np.stack(rows)

    def _with_recomputation(self, fit: Fit, loads: Loads, spans: Spans) -> Integers:
        """Loads by kind and mode."""
        times = loads.compute(spans)
        if not fit.recompute:
            return times
        forward = self._problem.forward_block_times(fit.size)
        amounts = spans.between(loads.states.sums(forward, PER_SECOND))
        speeds = np.array(self._problem.speeds)
        again = np.rint(amounts / speeds[:, None]).astype(np.int64)
        return np.ascontiguousarray(
            np.stack([times, times + again], axis=1).reshape(2 * len(times), len(spans))
        )

    @cached_property
    def _downsets(self) -> list[int]:
        return prefix_downsets(self._problem.graph, MOST_DOWNSETS)

    @cached_property
    def _states(self) -> States:
        times = self._problem.block_times(self._problem.profile.micro_batch_size)
        compute = [round(time * PER_SECOND) for time in times]
        return States(self._problem.graph, self._downsets, compute)

    def _boundaries(self, states: States) -> _Boundaries:
        key = states.compute.tobytes()
        if key not in self._known:
            self._known[key] = _Boundaries(self._problem, states)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[bytes, _Boundaries]:
        """By the times of the states, which also order them."""
        return {}

    @cached_property
    def _temporary(self) -> int:
        """The most that one operator allocates at once."""
        memory = [memory_of(operator) for operator in self._problem.profile.operators]
        return max(max(one.forward_bytes - one.made_bytes, one.backward_bytes) for one in memory)


@dataclass(frozen=True)
class _Sizes:
    """Bytes of spans; shapes [spans]."""

    spans: Spans
    parameters: Integers
    trained: Integers
    gradients: Integers
    saved: Integers
    crossing: Integers
    entering: Integers


class _Boundaries:
    """How everything that takes memory lies to some states."""

    def __init__(self, problem: Problem, states: States) -> None:
        graph, operators = problem.graph, problem.profile.operators
        sizes = np.array([value.size_bytes for value in graph.values], dtype=np.int64)
        self._states = states
        self._all: _Sizes | None = None
        self.messages = Boundary(states, Items([value.blocks for value in graph.values], sizes))
        self.parameters = Boundary(states, items_of(graph.parameters))
        self.saved = Boundary(states, items_of(graph.saved))

        def trained(block: Block) -> dict[str, int]:
            inside = [operators[index] for index in block.operators]
            return dict(pair for operator in inside for pair in trained_parameters(operator))

        def gradients(block: Block) -> dict[str, int]:
            """One that several operators use has a gradient for each."""
            return {
                f"{index} {name}": size
                for index in block.operators
                for name, size in parameter_gradients(operators[index])
            }

        self.trained = Boundary(states, items_of(held_by(map(trained, graph.blocks))))
        self.gradients = Boundary(states, items_of(held_by(map(gradients, graph.blocks))))

    def up_to(self, length: int) -> _Sizes:
        """Sizes of the spans of at most some compute; those of all spans are kept."""
        if length < int(self._states.compute[-1]):
            return self._sizes(find_spans(self._states, length))
        if self._all is None:
            self._all = self._sizes(find_spans(self._states, length))
        return self._all

    def _sizes(self, spans: Spans) -> _Sizes:
        return _Sizes(
            spans,
            self.parameters.touched(spans),
            self.trained.touched(spans),
            self.gradients.touched(spans),
            self.saved.touched(spans),
            self.messages.crossing(spans),
            self.messages.entering(spans),
        )


def _both(cut: Callable[[int], Cut | None]) -> list[Cut]:
    """What is found without messages, and if that is anything, with them."""
    first = cut(0)
    found = [] if first is None else [first, cut(1)]
    return list(dict.fromkeys(one for one in found if one is not None))


def _cut(chains: Chains, states: States, stages: int) -> Cut:
    chain = chains.chain(stages)
    again = tuple(mode == 1 for mode in chain.modes) if any(chain.modes) else ()
    return Cut(states.cut(chain.states), chain.kinds, again)


def plain_fit(
    problem: Problem, size: int, warm_up: Sequence[int], mix: Mix, *, recompute: bool = False
) -> Fit:
    """A fit within the limits of a problem's devices."""
    return Fit(size, tuple(warm_up), mix, problem.kind_limits_bytes, recompute)
