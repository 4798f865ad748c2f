"""Memory and messages of partitions into stages, at the profile's micro-batch size.

Memory that several operators save, send or receive is one storage and counts once, under the name
of the value that owns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipectl.arrays import Floats
from pipectl.graph import Lane, TransferKind, owners_of, routes
from pipectl.plan import StagePeaks, Transfer
from pipectl.planner.costs.liveness import (
    Borders,
    Levels,
    levels_of,
    peak_bytes,
)
from pipectl.profile import Operator, OptimizerCost, Profile, StepMemory

DEFAULT_BASELINE_BYTES = 240 * 2**20
"""A process with Python, torch and MPI, if the profile has no measurement."""


def baseline_bytes(profile: Profile) -> int:
    """Memory of a process without a stage."""
    measured = profile.process_baseline_bytes
    return DEFAULT_BASELINE_BYTES if measured is None else measured


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage at the profile's micro-batch size.

    Args:
        saved: from forward to backward of one micro-batch, with received and sent values, because
            a backward needs both.
        levels: None if the profile does not say what operators allocate.
        trained: parameters with a gradient by full name, in the optimizer's order.
        owned: trained parameters that only one operator of the model uses.
        accumulated: gradients; a parameter that several operators use has one per use.
        buffers: buffers.
        shared: for parameters with several uses: bytes of the parameters, of their uses in this
            stage, and the most that the uses of one of them in other stages take.
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
        """Bytes of the trained parameters."""
        return sum(self.trained.values())

    def updated_bytes(self, replicas: int) -> int:
        """Most bytes of parameters that a replica updates, if replicas shard the optimizer.

        Each parameter belongs to one replica; all replicas update those with several uses.
        """
        load = [0] * replicas
        for name, owner in owners_of(self.owned, replicas).items():
            load[owner] += self.owned[name]
        return self.trained_bytes - sum(self.owned.values()) + max(load)

    def peaks(self, scale: float, optimizer: OptimizerCost | None) -> StagePeaks | None:
        """The peaks at ``scale`` times the profile's micro-batch size."""
        if self.levels is None:
            return None
        # An update sums the gradients of uses, then takes the optimizer's step.
        own, uses, elsewhere = self.shared
        memory = optimizer.step_memory if optimizer is not None else StepMemory()
        step = memory.peak_bytes(tuple(self.trained.values()))
        return StagePeaks(
            forward_bytes=peak_bytes(self.levels.forward, scale),
            backward_bytes=peak_bytes(self.levels.backward, scale),
            first_backward_bytes=peak_bytes(self.levels.first_backward, scale),
            update_bytes=max(own + elsewhere, own - uses + step),
        )


@dataclass
class Crossing:
    """What enters and leaves one stage of a partition, filled in route by route.

    Attributes:
        received, sent: bytes by storage.
        returning: values whose gradients come from other stages.
    """

    received: Counter[str] = field(default_factory=Counter)
    sent: dict[str, int] = field(default_factory=dict)
    returning: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Footprint:
    """Memory and messages of a partition, at the profile's micro-batch size.

    Args:
        nodes: operator ids of every stage, in graph order.
        members: indices of the same operators.
        parameter_bytes: of every stage.
        memory: of every stage.
        transfers: messages of one micro-batch, one per kind and pair of stages.
        values: number of values with gradients that every stage receives and sends in one
            micro-batch, then of gradients that it receives and sends; shape [4, stages]. Values
            without gradients (indices, masks) are passed on unchanged.
        crossings: what enters and leaves every stage.
    """

    nodes: tuple[tuple[str, ...], ...]
    members: tuple[tuple[int, ...], ...]
    parameter_bytes: tuple[int, ...]
    memory: tuple[StageMemory, ...]
    transfers: tuple[Transfer, ...]
    values: Floats
    crossings: tuple[Crossing, ...]

    @cached_property
    def received_bytes(self) -> tuple[int, ...]:
        """Bytes of the activations that enter each stage."""
        return tuple(sum(crossing.received.values()) for crossing in self.crossings)

    @property
    def saved_bytes(self) -> tuple[int, ...]:
        """Bytes that each stage keeps per micro-batch."""
        return tuple(memory.saved for memory in self.memory)


class Footprints:
    """Footprints of partitions of one profile; equal stages are computed once."""

    def __init__(self, profile: Profile) -> None:
        operators = profile.operators
        self._operators = operators
        self._readers = profile.readers
        self._measured = all(operator.memory is not None for operator in operators)
        self._memory = [operator.allocations for operator in operators]
        self._made = {o.id: m.made_bytes for o, m in zip(operators, self._memory, strict=True)}
        self._gradients = [operator.parameter_gradients for operator in operators]
        uses = Counter(name for operator in operators for name, _ in operator.parameters)
        self._shared_uses = {name: count for name, count in uses.items() if count > 1}
        self._known: dict[tuple[tuple[int, ...], frozenset[str]], StageMemory] = {}

    def of(self, stages: Sequence[Sequence[int]]) -> Footprint:
        """The footprint of stages given as ascending operator indices."""
        operators = self._operators
        crossings = [Crossing() for _ in stages]
        messages: dict[Lane, int] = {}
        received, got, gave = ([0] * len(stages) for _ in range(3))
        sent: set[tuple[int, str]] = set()
        for lane, index in self._routes(stages):
            operator = operators[index]
            backward = lane.kind is TransferKind.GRADIENT
            size = operator.gradient_bytes if backward else operator.output_bytes
            messages[lane] = messages.get(lane, 0) + size
            if backward:
                crossings[lane.target].returning.add(operator.id)
                gave[lane.source] += 1
                got[lane.target] += 1
                continue
            storage = self._memory[index].storage
            crossings[lane.source].sent.setdefault(storage, size)
            crossings[lane.target].received[storage] += size
            if operator.gradient_bytes:
                received[lane.target] += 1
                sent.add((lane.source, operator.id))
        senders = Counter(stage for stage, _ in sent)
        given = [senders[stage] for stage in range(len(stages))]
        return Footprint(
            nodes=tuple(tuple(operators[index].id for index in inside) for inside in stages),
            members=tuple(tuple(inside) for inside in stages),
            parameter_bytes=tuple(sum(self._parameters(inside).values()) for inside in stages),
            memory=tuple(map(self._stage_memory, stages, crossings)),
            transfers=tuple(Transfer(*lane, size) for lane, size in sorted(messages.items())),
            values=np.array([received, given, got, gave], dtype=np.float64),
            crossings=tuple(crossings),
        )

    def _routes(self, stages: Sequence[Sequence[int]]) -> Iterator[tuple[Lane, int]]:
        """Every message of a partition, with the operator that made its value."""
        stage_of = [0] * len(self._operators)
        for stage, inside in enumerate(stages):
            for index in inside:
                stage_of[index] = stage
        for producer, readers in enumerate(self._readers):
            home = stage_of[producer]
            uses = [stage_of[reader] for reader in readers]
            if uses.count(home) < len(uses):
                gradient = self._operators[producer].gradient_bytes > 0
                for lane in routes(home, uses, has_gradient=gradient):
                    yield lane, producer

    def _parameters(self, inside: Sequence[int]) -> dict[str, int]:
        return dict(pair for index in inside for pair in self._operators[index].parameters)

    def _stage_memory(self, inside: Sequence[int], crossing: Crossing) -> StageMemory:
        key = tuple(inside), frozenset(crossing.returning)
        if key in self._known:
            return self._known[key]
        operators, shared = [self._operators[index] for index in inside], self._shared_uses
        saved = dict(pair for operator in operators for pair in operator.saved)
        for name, size in crossing.sent.items():
            saved.setdefault(name, self._made.get(name) or size)
        saved.update(crossing.received)
        gradients = [pair for index in inside for pair in self._gradients[index]]
        buffers = dict(pair for index in inside for pair in self._memory[index].buffers)
        made = {name for name, _ in gradients}
        trained = {n: size for n, size in self._parameters(inside).items() if n in made}
        here = Counter(name for name, _ in gradients if name in shared)
        elsewhere = (trained[name] * (shared[name] - count) for name, count in here.items())
        self._known[key] = StageMemory(
            saved=sum(saved.values()),
            levels=self._levels(inside, operators, crossing) if self._measured else None,
            trained=trained,
            owned={name: size for name, size in trained.items() if name not in shared},
            accumulated=sum(size for _, size in gradients),
            buffers=sum(buffers.values()),
            shared=(
                sum(trained[name] for name in here),
                sum(trained[name] * count for name, count in here.items()),
                max(elsewhere, default=0),
            ),
        )
        return self._known[key]

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
