"""What a stage holds and allocates, from what its operators hold and allocate.

A value that several operators save, send or receive is one storage and counts once, under the name
of the value whose memory it is. No order of actions avoids

    peak = process + parameters + buffers + optimizer state + micro-batches in flight
                   + gradients of the parameters, from the first backward on
                   + what the action that runs holds for itself

so plans above a limit by that are dropped. The simulator adds the buffers of messages under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.plan import StageCost, StagePeaks, Transfer
from pipectl.plan.sums import owners_of
from pipectl.planner.costs.liveness import (
    Borders,
    Levels,
    levels_of,
    memory_of,
    parameter_gradients,
    peak_bytes,
)
from pipectl.profile import Operator, OptimizerCost, Profile, StepMemory


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage at the profile's micro-batch size.

    Args:
        saved: from forward to backward of one micro-batch, received and sent values included,
            because a backward needs both.
        levels: None where the profile does not say what operators allocate.
        trained: parameters with a gradient by full name, in the optimizer's order.
        owned: those of them that only one operator of the model uses.
        accumulated: their gradients; a parameter that several operators use has one for each.
        buffers: buffers.
        shared: of the parameters with several uses: themselves, their uses here, and the most
            that the uses elsewhere of one of them take.
    """

    saved: int
    levels: Levels | None
    trained: Mapping[str, int]
    owned: Mapping[str, int]
    accumulated: int
    buffers: int
    shared: tuple[int, int, int]

    @property
    def trained_bytes(self) -> int:
        """Parameters that the optimizer has a state of."""
        return sum(self.trained.values())

    def updated_bytes(self, replicas: int) -> int:
        """Parameters that the replica with most of them updates, if they share them out.

        Each is one replica's as a whole; those that several operators use, all update.
        """
        load = [0] * replicas
        for name, owner in owners_of(self.owned, replicas).items():
            load[owner] += self.owned[name]
        return self.trained_bytes - sum(self.owned.values()) + max(load)

    def peaks(self, scale: float, optimizer: OptimizerCost | None) -> StagePeaks | None:
        """The most allocated at once, at ``scale`` times the profile's micro-batch size."""
        if self.levels is None:
            return None
        return StagePeaks(
            forward_bytes=peak_bytes(self.levels.forward, scale),
            backward_bytes=peak_bytes(self.levels.backward, scale),
            first_backward_bytes=peak_bytes(self.levels.first_backward, scale),
            update_bytes=self._update_bytes(optimizer),
        )

    def _update_bytes(self, optimizer: OptimizerCost | None) -> int:
        """Summing the gradients of uses, then the optimizer's step."""
        own, uses, elsewhere = self.shared
        memory = optimizer.step_memory if optimizer is not None else StepMemory()
        step = memory.peak_bytes(tuple(self.trained.values()))
        return max(own + elsewhere, own - uses + step)


@dataclass
class Crossing:
    """What the routes of a partition say of one stage, to be filled in.

    Attributes:
        received, sent: bytes by storage.
        returning: values whose gradients come from other stages.
    """

    received: Counter[str] = field(default_factory=Counter)
    sent: dict[str, int] = field(default_factory=dict)
    returning: set[str] = field(default_factory=set)


class StageMemories:
    """Memory of the stages of one profile's partitions; equal stages are looked at once."""

    def __init__(self, profile: Profile) -> None:
        self._operators = profile.operators
        self._readers = profile.readers
        self._measured = all(operator.memory is not None for operator in profile.operators)
        self._memory = [memory_of(operator) for operator in profile.operators]
        self._made = {
            o.id: m.made_bytes for o, m in zip(profile.operators, self._memory, strict=True)
        }
        self._gradients = [parameter_gradients(operator) for operator in profile.operators]
        self._uses = self._shared_uses()
        self._known: dict[tuple[tuple[int, ...], frozenset[str]], StageMemory] = {}

    def storage_of(self, index: int) -> str:
        """Name of the memory that the value of an operator lies in."""
        return self._memory[index].storage

    def of(self, inside: Sequence[int], crossing: Crossing) -> StageMemory:
        """Memory of a stage given as ascending operator indices."""
        key = tuple(inside), frozenset(crossing.returning)
        if key not in self._known:
            self._known[key] = self._of(inside, crossing)
        return self._known[key]

    def _of(self, inside: Sequence[int], crossing: Crossing) -> StageMemory:
        operators = [self._operators[index] for index in inside]
        saved = dict(pair for operator in operators for pair in operator.saved)
        for name, size in crossing.sent.items():
            saved.setdefault(name, self._made.get(name) or size)
        saved.update(crossing.received)
        gradients = [pair for index in inside for pair in self._gradients[index]]
        buffers = dict(pair for index in inside for pair in self._memory[index].buffers)
        trained = self._trained(inside)
        return StageMemory(
            saved=sum(saved.values()),
            levels=self._levels(inside, operators, crossing) if self._measured else None,
            trained=trained,
            owned={name: size for name, size in trained.items() if name not in self._uses},
            accumulated=sum(size for _, size in gradients),
            buffers=sum(buffers.values()),
            shared=self._shared(trained, gradients),
        )

    def _levels(
        self, inside: Sequence[int], operators: Sequence[Operator], crossing: Crossing
    ) -> Levels:
        place = {index: position for position, index in enumerate(inside)}
        readers = {index: [u for u in self._readers[index] if u in place] for index in inside}
        borders = Borders(
            stays=frozenset(crossing.received) | frozenset(crossing.sent),
            returning=frozenset(crossing.returning),
            last_reader={self._operators[i].id: place[u[-1]] for i, u in readers.items() if u},
            roots=frozenset(self._operators[i].id for i in inside if not self._readers[i]),
        )
        return levels_of(operators, borders)

    def _trained(self, inside: Sequence[int]) -> dict[str, int]:
        with_gradient = {name for index in inside for name, _ in self._gradients[index]}
        named = dict(pair for index in inside for pair in self._operators[index].parameters)
        return {name: size for name, size in named.items() if name in with_gradient}

    def _shared(
        self, trained: Mapping[str, int], gradients: Sequence[tuple[str, int]]
    ) -> tuple[int, int, int]:
        here = Counter(name for name, _ in gradients if name in self._uses)
        elsewhere = (trained[name] * (self._uses[name] - count) for name, count in here.items())
        own = sum(trained[name] for name in here)
        uses = sum(trained[name] * count for name, count in here.items())
        return own, uses, max(elsewhere, default=0)

    def _shared_uses(self) -> dict[str, int]:
        """How many operators use each parameter that several use."""
        count = Counter(name for operator in self._operators for name, _ in operator.parameters)
        return {name: uses for name, uses in count.items() if uses > 1}


@dataclass(frozen=True)
class StageTable:
    """Costs of one full micro-batch; arrays have the shape [stages]."""

    costs: tuple[StageCost, ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def resident_bytes(self) -> Integers:
        """There from one step to the next."""
        return np.array([cost.resident_bytes for cost in self.costs])

    @cached_property
    def gradient_bytes(self) -> Integers:
        """Gradients of the parameters."""
        return np.array([cost.accumulated_bytes for cost in self.costs])

    @cached_property
    def saved_bytes(self) -> Integers:
        """Kept from forward to backward, without and with recomputation; shape [2, stages]."""
        kept = [[cost.saved_bytes, cost.input_bytes] for cost in self.costs]
        return np.array(kept).T

    @cached_property
    def peaks(self) -> Integers:
        """Of forward, first and later backwards, and update; shape [4, stages]."""
        return np.array([_peaks(cost) for cost in self.costs]).T


def _peaks(cost: StageCost) -> tuple[int, int, int, int]:
    peaks = cost.peaks or StagePeaks(0, 0, cost.accumulated_bytes, 0)
    return (
        peaks.forward_bytes,
        peaks.first_backward_bytes,
        peaks.backward_bytes,
        peaks.update_bytes,
    )


def least_peaks_bytes(
    table: StageTable,
    warm_up: Sequence[int],
    shares: Sequence[float],
    recompute: Sequence[bool] = (),
) -> Floats:
    """Lower bounds on the memory of the ranks of all stages, without the process.

    Args:
        warm_up: micro-batches in flight.
        shares: sizes of the step's micro-batches, relative to a full one.
        recompute: stages that keep only their inputs, and hold the rest in one backward.
    """
    depth = np.minimum(np.array(warm_up), len(shares))
    goes_on = depth < len(shares)
    flying = np.where(goes_on, depth, len(shares) - 1 + shares[-1])
    again = np.array(recompute, dtype=np.int64) if len(recompute) else np.zeros_like(depth)
    kept = np.where(again, table.saved_bytes[1], table.saved_bytes[0])
    saved, last, gradients = flying * kept, shares[0] * kept, table.gradient_bytes
    whole = np.where(again, shares[0] * (table.saved_bytes[0] - kept), 0)
    forward, first_backward, backward, update = table.peaks
    later = np.where(goes_on, gradients, 0)  # there in the last forward of a full pipeline
    moments = (
        later + saved,
        later + saved - last + forward,
        saved + whole + first_backward,
        gradients + np.where(goes_on, saved, saved - last) + whole + backward * (depth > 1),
        gradients + update,
    )
    highest: Floats = np.maximum.reduce(moments) + table.resident_bytes
    return highest


def largest_peak_bytes(
    costs: Sequence[StageCost], warm_up: Sequence[int], baseline_bytes: int, micro_batches: int
) -> int:
    """The same for the most demanding of some stages, when every micro-batch is full."""
    table = StageTable(tuple(costs), ())
    peaks = least_peaks_bytes(table, warm_up, (1.0,) * micro_batches)
    return baseline_bytes + round(float(peaks.max()))
