"""Memory and messages of partitions into stages, at the profile's micro-batch size.

The times of stages and of messages, and the memory of saved values, follow from :class:`Sums`:
arrays over many partitions, which take some microseconds per partition. A :class:`Footprint` adds
what a plan needs to know of one partition, stage by stage.

Memory that several operators save, send or receive is one storage and counts once, under the name
of the value that owns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from math import ceil
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Integers, unique
from pipectl.lanes import TransferKind, owners_of
from pipectl.plan import StagePeaks, Transfer
from pipectl.planner.costs.liveness import (
    Borders,
    Level,
    Levels,
    evaluation_levels,
    levels_of,
    peak_bytes,
)
from pipectl.profile import Profile
from pipectl.profile_parts import OptimizerCost, StepMemory

DEFAULT_BASELINE_BYTES = 240 * 2**20
"""A process with Python, torch and MPI, if the profile has no measurement."""
MAX_HELD = 4_000_000
"""Largest array of what every stage of some partitions holds."""
KINDS = (TransferKind.ACTIVATION, TransferKind.GRADIENT)


def baseline_bytes(profile: Profile) -> int:
    """Memory of a process without a stage."""
    measured = profile.process_baseline_bytes
    return DEFAULT_BASELINE_BYTES if measured is None else measured


class Lanes(NamedTuple):
    """The values that stages send to later stages, by partition, operator and target; one message
    each, and another one for the gradient. See :func:`pipectl.lanes.routes`.

    Args:
        partition: number of the partition.
        operator: that makes the value.
        source, target: stages.
        back: the stage to which the target sends its gradient; -1 if it has none.
    """

    partition: Integers
    operator: Integers
    source: Integers
    target: Integers
    back: Integers


class Transfers(NamedTuple):
    """Messages of one micro-batch in some partitions, one per kind and pair of stages.

    Args:
        first: start of the activations of partition p at 2 p, of its gradients at 2 p + 1; shape
            [2 * partitions + 1].
        source, target, size_bytes: of every message; by ascending source and target in each range.
    """

    first: Integers
    source: Integers
    target: Integers
    size_bytes: Integers


@dataclass(frozen=True)
class Sums:
    """Memory and messages of partitions into equally many stages.

    Args:
        stage_of: of every operator; shape [partitions, operators].
        parameter_bytes, trained_bytes: of every stage: of its parameters, and of those that an
            update changes; as all others, of shape [partitions, stages].
        gradient_bytes: of its parameters; a parameter that several operators use has one per use.
        cast_bytes: of casts of its parameters, which micro-batches share.
        saved_bytes: from forward to backward of one micro-batch, with received and sent values,
            because a backward needs both.
        received_bytes, returned_bytes: activations and gradients that arrive from other stages.
        values: number of values with gradients that every stage receives and sends in one
            micro-batch, then of gradients that it receives and sends; shape [4, partitions,
            stages]. Values without gradients (indices, masks) are passed on unchanged.
        lanes: what is sent.
        transfers: the same, summed.
    """

    stage_of: Integers
    parameter_bytes: Integers
    trained_bytes: Integers
    gradient_bytes: Integers
    cast_bytes: Integers
    saved_bytes: Integers
    received_bytes: Integers
    returned_bytes: Integers
    values: Integers
    lanes: Lanes
    transfers: Transfers


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage at the profile's micro-batch size, besides its sums.

    Args:
        levels: None if the profile does not say what operators allocate.
        evaluation: returns those of an evaluation; none if they are unknown.
        trained: parameters that an update changes by full name, in the optimizer's order.
        owned: trained parameters that only one operator of the model uses.
        buffers: buffers.
        shared: for parameters with several uses: bytes of the parameters, of their uses in this
            stage, and the most that the uses of one of them in other stages take.
    """

    levels: Levels | None
    evaluation: Callable[[], tuple[Level, ...]]
    trained: Mapping[str, int]
    owned: Mapping[str, int]
    buffers: int
    shared: tuple[int, int, int]

    def updated_bytes(self, replicas: int) -> int:
        """Most bytes of parameters that a replica updates, if replicas shard the optimizer.

        Each parameter belongs to one replica; all replicas update those with several uses.
        """
        load = [0] * replicas
        for name, owner in owners_of(self.owned, replicas).items():
            load[owner] += self.owned[name]
        return sum(self.trained.values()) - sum(self.owned.values()) + max(load)

    def evaluation_bytes(self, scale: float) -> int:
        """The peak of an evaluation at ``scale`` times the profile's micro-batch size, without
        received values."""
        return peak_bytes(self.evaluation(), scale)

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
            left_bytes=ceil(scale * self.levels.left),
        )


@dataclass
class Crossing:
    """What enters and leaves one stage of a partition, filled in lane by lane.

    Attributes:
        received, sent: bytes by storage.
        returning: values whose gradients come from other stages.
    """

    received: Counter[str] = field(default_factory=Counter)
    sent: dict[str, int] = field(default_factory=dict)
    returning: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Footprint:
    """Memory and messages of one partition, at the profile's micro-batch size.

    Args:
        nodes: operator ids of every stage, in graph order.
        members: indices of the same operators.
        memory: of every stage.
        sums: of this partition alone.
        crossings: what enters and leaves every stage.
    """

    nodes: tuple[tuple[str, ...], ...]
    members: tuple[tuple[int, ...], ...]
    memory: tuple[StageMemory, ...]
    sums: Sums
    crossings: tuple[Crossing, ...]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Messages of one micro-batch, one per kind and pair of stages."""
        (_, gradients, _), *columns = map(np.ndarray.tolist, self.sums.transfers)
        return tuple(
            Transfer(KINDS[place >= gradients], *row)
            for place, row in enumerate(zip(*columns, strict=True))
        )


class _Held:
    """Bytes that operators hold under names, which count once per stage.

    Args:
        held: (name, bytes) of every operator.
        known: numbers of some names.

    Attributes:
        own_bytes: of every operator, under names without a number: those that it alone has.
        names: number of all other names.
    """

    def __init__(
        self, held: Iterable[Iterable[tuple[str, int]]], known: Mapping[str, int] | None = None
    ) -> None:
        pairs_of = [list(pairs) for pairs in held]
        uses = Counter(name for pairs in pairs_of for name, _ in pairs)
        numbers = dict(known or {})
        for name in (name for name, count in uses.items() if count > 1):
            numbers.setdefault(name, len(numbers))
        rows = [
            (index, numbers[name], size)
            for index, pairs in enumerate(pairs_of)
            for name, size in pairs
            if name in numbers
        ]
        self.own_bytes = np.array(
            [sum(size for name, size in pairs if name not in numbers) for pairs in pairs_of],
            dtype=np.int64,
        )
        self.operator, self._name, self._size_bytes = _columns(rows, 3)
        self.names = len(numbers)

    def write(self, table: Integers, place: Integers) -> Integers:
        """Write the bytes of every stage into a table; returns it.

        Args:
            table: shape [places, names].
            place: of the stage of every operator; shape [partitions, operators].
        """
        table[place[:, self.operator], self._name] = self._size_bytes
        return table


def _columns(rows: Sequence[tuple[int, ...]], count: int) -> Integers:
    return np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(-1, count).T)


class Footprints:
    """Memory and messages of partitions of one profile; equal stages are computed once."""

    def __init__(self, profile: Profile) -> None:
        operators = self._operators = profile.operators
        memory = self._memory = [operator.allocations for operator in operators]
        self._readers = profile.readers
        self._measured = all(operator.memory is not None for operator in operators)
        self._gradients = [operator.parameter_gradients for operator in operators]
        uses = Counter(name for operator in operators for name, _ in operator.parameters)
        self._shared_uses = {name: count for name, count in uses.items() if count > 1}
        self._known: dict[tuple[tuple[int, ...], frozenset[str]], StageMemory] = {}
        self._parameters = _Held(operator.parameters for operator in operators)
        self._trained = _Held(profile.trained_parameters)
        self._casts = _Held(operator.casts for operator in operators)
        self._trained_names = {name for each in profile.trained_parameters for name, _ in each}
        storages = dict.fromkeys(own.storage for own in memory)
        number = {name: number for number, name in enumerate(storages)}
        self._saved = _Held((operator.saved for operator in operators), number)
        made = {o.id: own.made_bytes for o, own in zip(operators, memory, strict=True)}
        # Of every operator: bytes of its message and of its gradient, of gradients of parameters,
        # the storage of its value, and what its stage keeps if the value is sent.
        (
            self._output_bytes,
            self._gradient_bytes,
            self._summed_bytes,
            self._storage,
            self._kept_bytes,
        ) = _columns(
            [
                (
                    each.output_bytes,
                    each.gradient_bytes,
                    sum(size for _, size in gradients),
                    number[own.storage],
                    made.get(own.storage) or each.output_bytes,
                )
                for each, gradients, own in zip(operators, self._gradients, memory, strict=True)
            ],
            5,
        )
        # Uses of values, by producer and reader.
        pairs = [(index, reader) for index, each in enumerate(self._readers) for reader in each]
        self._producer, self._reader = _columns(pairs, 2)
        self._is_first_use = np.diff(self._producer, prepend=-1) != 0

    def of(self, stages: Sequence[Sequence[int]]) -> Footprint:
        """The footprint of stages given as ascending operator indices."""
        stage_of = np.zeros((1, len(self._operators)), dtype=np.int64)
        for stage, inside in enumerate(stages):
            stage_of[0, list(inside)] = stage
        sums = self.sums(stage_of, len(stages))
        crossings = [Crossing() for _ in stages]
        for operator, source, target, back in zip(
            *map(np.ndarray.tolist, sums.lanes[1:]), strict=True
        ):
            size, storage = self._operators[operator].output_bytes, self._memory[operator].storage
            crossings[source].sent.setdefault(storage, size)
            crossings[target].received[storage] += size
            if back >= 0:
                crossings[back].returning.add(self._operators[operator].id)
        return Footprint(
            nodes=tuple(tuple(self._operators[index].id for index in inside) for inside in stages),
            members=tuple(tuple(inside) for inside in stages),
            memory=tuple(map(self._stage_memory, stages, crossings)),
            sums=sums,
            crossings=tuple(crossings),
        )

    def sums(self, stage_of: Integers, stages: int) -> Sums:
        """The sums of partitions.

        Args:
            stage_of: of every operator; shape [partitions, operators].
            stages: of every partition.
        """
        partitions, operators = stage_of.shape
        lanes, transfers = self._messages(stage_of, stages)
        begin, returns = lanes.partition * stages, lanes.back >= 0
        is_first = np.diff(lanes.partition * operators + lanes.operator, prepend=-1) != 0

        def total(place: Integers, weights: Integers | None = None) -> Integers:
            sums = np.bincount(place, weights, partitions * stages)
            return sums.astype(np.int64).reshape(partitions, stages)

        def total_of_operators(sizes: Integers) -> Integers:
            return total(place.ravel(), np.tile(sizes, partitions))

        received = total((begin + lanes.target)[returns])
        sent = total((begin + lanes.source)[returns & is_first])
        got = total((begin + lanes.back)[returns])
        received_bytes = total(begin + lanes.target, self._output_bytes[lanes.operator])
        sizes = self._gradient_bytes[lanes.operator[returns]]
        place = np.arange(partitions)[:, None] * stages + stage_of
        chunk = max(1, MAX_HELD // (stages * max(1, self._saved.names)))
        held = [
            self._held(place[first : first + chunk], first * stages, stages, lanes)
            for first in range(0, partitions, chunk)
        ]
        parameter_bytes, trained_bytes, cast_bytes, saved_bytes = np.concatenate(
            held, axis=1
        ).reshape(4, partitions, stages)
        return Sums(
            stage_of=stage_of,
            parameter_bytes=parameter_bytes + total_of_operators(self._parameters.own_bytes),
            trained_bytes=trained_bytes + total_of_operators(self._trained.own_bytes),
            gradient_bytes=total_of_operators(self._summed_bytes),
            cast_bytes=cast_bytes + total_of_operators(self._casts.own_bytes),
            saved_bytes=received_bytes + saved_bytes + total_of_operators(self._saved.own_bytes),
            received_bytes=received_bytes,
            returned_bytes=total((begin + lanes.back)[returns], sizes),
            values=np.stack([received, sent, got, received]),
            lanes=lanes,
            transfers=transfers,
        )

    def _messages(self, stage_of: Integers, stages: int) -> tuple[Lanes, Transfers]:
        home, use = stage_of[:, self._producer], stage_of[:, self._reader]
        # A gradient is summed on its way back if the stages of the uses never decrease.
        before = np.where(self._is_first_use, home, np.roll(use, 1, axis=1))
        is_chained = np.ones(stage_of.shape, np.bool_)
        partition, edge = np.nonzero(use < before)
        is_chained[partition, self._producer[edge]] = False
        partition, edge = np.nonzero(use != home)
        value = partition * stage_of.shape[1] + self._producer[edge]
        value, target = np.divmod(unique(value * stages + use[partition, edge]), stages)
        partition, operator = np.divmod(value, stage_of.shape[1])
        source = stage_of[partition, operator]
        follows = (np.diff(value, prepend=-1) == 0) & is_chained[partition, operator]
        back = np.where(follows, np.roll(target, 1), source)
        returns = self._gradient_bytes[operator] > 0
        lanes = Lanes(partition, operator, source, target, np.where(returns, back, -1))
        ahead = ((2 * partition) * stages + source) * stages + target
        behind = ((2 * partition + 1) * stages + target) * stages + back
        keys = np.concatenate([ahead, behind[returns]])
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
        sizes = np.concatenate(
            [self._output_bytes[operator], self._gradient_bytes[operator][returns]]
        )
        summed = np.add.reduceat(sizes[order], starts) if len(starts) else sizes
        ends, to = np.divmod(keys[order][starts], stages)
        kind, from_ = np.divmod(ends, stages)
        first = np.searchsorted(kind, np.arange(2 * len(stage_of) + 1))
        return lanes, Transfers(first, from_, to, summed)

    def _held(self, place: Integers, begin: int, stages: int, lanes: Lanes) -> Integers:
        """Bytes under numbered names in some partitions: of parameters, of trained ones, of casts,
        and of what a stage saves and sends of its own; shape [4, places].

        Args:
            place: of the stage of every operator; the first is ``begin``.
        """
        place, places = place - begin, len(place) * stages
        parameters, trained, casts, saved = (
            np.zeros((places, each.names), dtype=np.int64)
            for each in (self._parameters, self._trained, self._casts, self._saved)
        )
        self._parameters.write(parameters, place)
        self._trained.write(trained, place)
        self._casts.write(casts, place)
        some = slice(*np.searchsorted(lanes.partition * stages, (begin, begin + places)))
        partition, operator, source, target, _ = (each[some][::-1] for each in lanes)
        row, storage = partition * stages - begin, self._storage[operator]
        saved[row + source, storage] = self._kept_bytes[operator]
        self._saved.write(saved, place)
        saved[row + target, storage] = 0
        return np.stack([each.sum(axis=1) for each in (parameters, trained, casts, saved)])

    def _stage_memory(self, inside: Sequence[int], crossing: Crossing) -> StageMemory:
        key = tuple(inside), frozenset(crossing.returning)
        if key in self._known:
            return self._known[key]
        operators, shared = [self._operators[index] for index in inside], self._shared_uses
        buffers = dict(pair for index in inside for pair in self._memory[index].buffers)
        gradients = Counter(name for index in inside for name, _ in self._gradients[index])
        borders = self._borders(inside, crossing)
        sizes = dict(pair for operator in operators for pair in operator.parameters)
        trained = {name: size for name, size in sizes.items() if name in self._trained_names}
        uses = (name for operator in operators for name, _ in operator.parameters)
        here = Counter(name for name in uses if name in shared and name in trained)
        elsewhere = (trained[name] * (shared[name] - count) for name, count in here.items())
        self._known[key] = StageMemory(
            levels=levels_of(operators, borders) if self._measured else None,
            evaluation=cache(
                partial(evaluation_levels, operators if self._measured else (), borders)
            ),
            trained=trained,
            owned={name: size for name, size in trained.items() if name not in shared},
            buffers=sum(buffers.values()),
            shared=(
                sum(trained[name] for name in here),
                sum(trained[name] * gradients[name] for name in here),
                max(elsewhere, default=0),
            ),
        )
        return self._known[key]

    def _borders(self, inside: Sequence[int], crossing: Crossing) -> Borders:
        place = {index: position for position, index in enumerate(inside)}
        readers = {index: [u for u in self._readers[index] if u in place] for index in inside}
        return Borders(
            stays=frozenset(crossing.received) | frozenset(crossing.sent),
            returning=frozenset(crossing.returning),
            last_reader={self._operators[i].id: place[u[-1]] for i, u in readers.items() if u},
            roots=frozenset(self._operators[i].id for i in inside if not self._readers[i]),
        )
