"""Partitions that fit into memory, for when the balanced ones do not.

Runs the dynamic programme over prefixes of topological orders with the memory of every stage:
for the smallest bottleneck within the limits, or for the smallest peak of all. Where stages may
recompute, each has two modes; in the second it keeps only what it received, holds the rest in one
backward at a time, and computes its forward twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import numpy as np

from pipectl.planner.chain_kernels import UNREACHED
from pipectl.planner.condense import Block
from pipectl.planner.dynamic import Chains, Check, Memory, best_chains
from pipectl.planner.ideals import prefix_downsets
from pipectl.planner.liveness import memory_of, parameter_gradients
from pipectl.planner.loads import PER_SECOND, Loads, named_items
from pipectl.planner.mix import Mix
from pipectl.planner.partition import Cut
from pipectl.planner.problem import Problem
from pipectl.planner.span_kernels import Integers
from pipectl.planner.spans import Boundary, Items, Spans, States, find_spans

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
        found = [self._balanced(fit, messages) for messages in (0, 1)]
        return list(dict.fromkeys(cut for cut in found if cut is not None))

    def smallest_peak(self, fit: Fit) -> list[Cut]:
        """Partitions whose most demanding rank, relative to its limit, demands least."""
        found = [self._smallest_peak(fit, messages) for messages in (0, 1)]
        return list(dict.fromkeys(cut for cut in found if cut is not None))

    def _balanced(self, fit: Fit, messages: int) -> Cut | None:
        """Looks at spans up to some length, which grows until it is seen to be enough."""
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
            length *= 4

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
        spans = find_spans(states, length)
        scale = self._problem.scale(fit.size)
        flying = np.rint(1000 * scale * np.array(fit.warm_up)).astype(np.int64)
        held = self._held(fit, messages, spans)
        least = held[0::2] + held[1::2] * flying.min() // 1000
        kept = (least <= limits.max()).any(axis=0)
        return spans.only(kept), Memory(np.ascontiguousarray(held[:, kept]), flying, limits)

    def _held(self, fit: Fit, messages: int, spans: Spans) -> Integers:
        """Bytes by mode, without and for each micro-batch in flight; shape [modes * 2, spans]."""
        optimizer, scale = self._problem.profile.optimizer, self._problem.scale(fit.size)
        state = optimizer.state_bytes_per_parameter_byte if optimizer is not None else 0.0
        parts = self._boundaries(spans.states)
        resident = self._problem.baseline_bytes + parts.gradients.touched(spans)
        resident = resident + (1 + state) * parts.parameters.touched(spans)
        resident = (resident + messages * scale * self._temporary).astype(np.int64)
        saved = parts.saved.touched(spans)
        crossing = parts.messages.crossing(spans)
        rows = [resident, saved + messages * crossing]
        if fit.recompute:
            received = parts.messages.entering(spans)
            whole = (scale * np.maximum(saved - received, 0)).astype(np.int64)
            rows += [resident + whole, received + messages * crossing]
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
            np.stack([times, times + again], axis=1).reshape(-1, len(spans))
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
        key = tuple(states.downsets)
        if key not in self._known:
            self._known[key] = _Boundaries(self._problem, states)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], _Boundaries]:
        """By order of the states, which depends on the times."""
        return {}

    @cached_property
    def _temporary(self) -> int:
        """The most that one operator allocates at once."""
        memory = [memory_of(operator) for operator in self._problem.profile.operators]
        return max(max(one.forward_bytes - one.made_bytes, one.backward_bytes) for one in memory)


class _Boundaries:
    """How everything that takes memory lies to some states."""

    def __init__(self, problem: Problem, states: States) -> None:
        graph, operators = problem.graph, problem.profile.operators
        sizes = np.array([value.size_bytes for value in graph.values], dtype=np.int64)
        self.messages = Boundary(states, Items([value.blocks for value in graph.values], sizes))
        self.parameters = Boundary(states, named_items(graph, lambda block: block.parameters))
        self.saved = Boundary(states, named_items(graph, lambda block: block.saved))

        def gradients(block: Block) -> dict[str, int]:
            """One that several operators use has a gradient for each."""
            return {
                f"{index} {name}": size
                for index in block.operators
                for name, size in parameter_gradients(operators[index])
            }

        self.gradients = Boundary(states, named_items(graph, gradients))


def _cut(chains: Chains, states: States, stages: int) -> Cut:
    chain = chains.chain(stages)
    again = tuple(mode == 1 for mode in chain.modes) if any(chain.modes) else ()
    return Cut(states.cut(chain.states), chain.kinds, again)


def plain_fit(
    problem: Problem, size: int, warm_up: Sequence[int], mix: Mix, *, recompute: bool = False
) -> Fit:
    """A fit within the limits of a problem's devices."""
    return Fit(size, tuple(warm_up), mix, problem.kind_limits_bytes, recompute)
