"""What partitions into stages hold and send, at the profile's micro-batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipectl.graph import Route, TransferKind, routes
from pipectl.plan import Transfer
from pipectl.planner.costs.stage_memory import Crossing, StageMemories, StageMemory
from pipectl.profile import Operator, Profile, StageOverhead


@dataclass
class Values:
    """How many values enter a stage and leave it in one micro-batch.

    Values without gradient (indices, masks) are not counted: they enter a stage as they are.
    """

    received: int = 0
    sent: int = 0
    gradients_received: int = 0
    gradients_sent: int = 0

    def overhead_s(self, stage: StageOverhead) -> tuple[float, float]:
        """What forward and backward of the stage take besides its operators."""
        forward_s = stage.forward_s + self.received * stage.received_s + self.sent * stage.sent_s
        received_s = self.gradients_received * stage.gradient_received_s
        sent_s = self.gradients_sent * stage.gradient_sent_s
        return forward_s, stage.backward_s + received_s + sent_s


@dataclass(frozen=True)
class Footprint:
    """What a partition into stages needs, at the profile's micro-batch size.

    Args:
        nodes: operator ids of every stage, in graph order.
        members: indices of the same operators.
        parameter_bytes: of every stage.
        memory: of every stage.
        transfers: messages of one micro-batch, one per kind and pair of stages.
        values: how many values enter and leave every stage.
        crossings: what enters and leaves every stage.
    """

    nodes: tuple[tuple[str, ...], ...]
    members: tuple[tuple[int, ...], ...]
    parameter_bytes: tuple[int, ...]
    memory: tuple[StageMemory, ...]
    transfers: tuple[Transfer, ...]
    values: tuple[Values, ...]
    crossings: tuple[Crossing, ...]

    @cached_property
    def received_bytes(self) -> tuple[int, ...]:
        """Activations that enter every stage."""
        return tuple(sum(crossing.received.values()) for crossing in self.crossings)

    @property
    def saved_bytes(self) -> tuple[int, ...]:
        """What every stage keeps of one micro-batch."""
        return tuple(memory.saved for memory in self.memory)


class Footprints:
    """Footprints of partitions of one profile; what reads what is looked up once."""

    def __init__(self, profile: Profile) -> None:
        self._operators = profile.operators
        self._readers = profile.readers
        self._memories = StageMemories(profile)

    def of(self, stages: Sequence[Sequence[int]]) -> Footprint:
        """The footprint of stages given as ascending operator indices."""
        operators = self._operators
        crossings = [Crossing() for _ in stages]
        messages: dict[tuple[TransferKind, int, int], int] = {}
        values = [Values() for _ in stages]
        sent: set[tuple[int, str]] = set()
        for route, index in self._routes(stages):
            operator = operators[index]
            backward = route.kind is TransferKind.GRADIENT
            size = operator.gradient_bytes if backward else operator.output_bytes
            key = (route.kind, route.source, route.target)
            messages[key] = messages.get(key, 0) + size
            if backward:
                crossings[route.target].returning.add(route.value)
                values[route.source].gradients_sent += 1
                values[route.target].gradients_received += 1
                continue
            storage = self._memories.storage_of(index)
            crossings[route.source].sent.setdefault(storage, size)
            crossings[route.target].received[storage] += size
            if operator.gradient_bytes:
                values[route.target].received += 1
                sent.add((route.source, route.value))
        for stage, _ in sent:
            values[stage].sent += 1
        return Footprint(
            nodes=tuple(tuple(operators[index].id for index in inside) for inside in stages),
            members=tuple(tuple(inside) for inside in stages),
            parameter_bytes=tuple(_parameter_bytes(operators, inside) for inside in stages),
            memory=tuple(map(self._memories.of, stages, crossings)),
            transfers=tuple(Transfer(*key, size) for key, size in sorted(messages.items())),
            values=tuple(values),
            crossings=tuple(crossings),
        )

    def _routes(self, stages: Sequence[Sequence[int]]) -> Iterator[tuple[Route, int]]:
        """Every message of a partition, with the operator whose value it is of."""
        stage_of = [0] * len(self._operators)
        for stage, inside in enumerate(stages):
            for index in inside:
                stage_of[index] = stage
        for producer, readers in enumerate(self._readers):
            home = stage_of[producer]
            uses = [stage_of[reader] for reader in readers]
            if uses.count(home) < len(uses):
                operator = self._operators[producer]
                gradient = operator.gradient_bytes > 0
                for route in routes(operator.id, home, uses, has_gradient=gradient):
                    yield route, producer


def _parameter_bytes(operators: Sequence[Operator], inside: Sequence[int]) -> int:
    named = dict(pair for index in inside for pair in operators[index].parameters)
    return sum(named.values())
