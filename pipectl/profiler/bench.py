"""The stages of a cut, each run by itself, over and over, as a rank runs its own.

A first pass runs them in the order of the pipeline and keeps what each one received: activations
for its forward, gradients for its backward. Afterwards any stage can be run alone, one forward and
one backward at a time, as in the steady state of 1F1B.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from pipectl.capture import CapturedGraph, CapturedJob, Cut, Slot
from pipectl.capture.batch import by_name, spared
from pipectl.capture.slices import Rows
from pipectl.graph import TransferKind
from pipectl.profiler.marks import Cost, Marked, Spent, clock_of
from pipectl.runtime.device import Device
from pipectl.runtime.layout import Tensors
from pipectl.runtime.stage import MicroBatch, Stage

_SEED = 1
_MIN_STAGES, _MAX_STAGES = 2, 6


@dataclass(frozen=True)
class Subject:
    """A graph and the micro-batch it is measured on.

    Args:
        batch: the tensors of the micro-batch by name, on the device.
        size: samples in it.
        precision: as in the spec.
    """

    graph: CapturedGraph
    batch: Mapping[str, Tensor]
    size: int
    device: Device
    precision: str

    @classmethod
    def of(cls, job: CapturedJob, size: int, device: Device) -> Subject:
        """The training graph of a job and the first samples of its data."""
        graph = job.training_graph(size)
        named = by_name(graph, job.loader.example(size))
        target = device.torch_device
        batch = {name: leaf.to(target) for name, leaf in named.items() if isinstance(leaf, Tensor)}
        return cls(graph, batch, size, device, job.spec.training.precision)


class Bench:
    """Runs and times the stages of one cut.

    Args:
        states: parameters and buffers by full name.
        stage_of: stage of every operator of the training graph.
    """

    def __init__(
        self, subject: Subject, states: Mapping[str, Tensor], stage_of: Mapping[str, int]
    ) -> None:
        self.cut = Cut(subject.graph, stage_of, training=True)
        self._clock = clock_of(subject.device)
        rows = Rows.of(subject.size)
        self._micro_batch, self._key = MicroBatch(0, rows, _SEED), (True, rows)
        device, precision = subject.device, subject.precision
        self._stages = [
            Stage(index, {self._key: self.cut}, states, device, precision=precision)
            for index in range(1 + max(stage_of.values()))
        ]
        self._marked: dict[int, Marked] = {}
        self._batches = [
            {name: subject.batch[name] for name in stage.inputs(*self._key)}
            for stage in self._stages
        ]
        self._received: dict[tuple[TransferKind, int], dict[Slot, Tensor | None]] = {
            (kind, stage): {} for kind in TransferKind for stage in range(len(self))
        }
        for index in range(len(self)):
            self._deliver(TransferKind.ACTIVATION, index, self._forward(index))
        for index in reversed(range(len(self))):
            self._deliver(TransferKind.GRADIENT, index, self._backward(index))

    def __len__(self) -> int:
        return len(self._stages)

    def run(self, index: int) -> tuple[float, float]:
        """One forward and one backward of a stage: the seconds of each."""
        batch = self._batch(index)
        start = self._clock()
        self._forward(index, batch)
        middle = self._clock()
        self._backward(index)
        return middle - start, self._clock() - middle

    def run_marked(self, index: int, cost: Cost) -> Spent:
        """The same with marks: where the time went.

        Args:
            cost: of measuring.
        """
        code = self._stages[index].segments[0].codes[self._key]
        plain = code.stage
        if index not in self._marked:
            operators = self.cut.graph.position
            self._marked[index] = Marked(plain, operators, self._clock, cost)
        marked = self._marked[index]
        code.stage = replace(plain, module=marked)
        self._forward(index)
        code.stage = plain
        marked.watch_backward()
        self._backward(index)
        return marked.spent(self._clock())

    def forget(self) -> None:
        """Drop the gradients of parameters."""
        for stage in self._stages:
            stage.forget()

    def _batch(self, index: int) -> dict[str, Tensor]:
        """What a stage reads from the batch, for one forward: every run finds the same."""
        return spared(self.cut.graph, self._batches[index])

    def _forward(self, index: int, batch: Mapping[str, Tensor] | None = None) -> Tensors:
        batch = self._batch(index) if batch is None else batch
        received = self._received[TransferKind.ACTIVATION, index]
        return self._stages[index].forward(self._micro_batch, batch, received)

    def _backward(self, index: int) -> Tensors:
        received = dict(self._received[TransferKind.GRADIENT, index])
        return self._stages[index].backward(self._micro_batch, received, 1.0)

    def _deliver(self, kind: TransferKind, source: int, sent: Tensors) -> None:
        for lane, slots in self.cut.lanes.items():
            if lane.kind is kind and lane.source == source:
                for slot in slots:
                    tensor = sent.get(slot)
                    copy = None if tensor is None else tensor.detach().clone()
                    self._received[kind, lane.target][slot] = copy


def whole(graph: CapturedGraph) -> dict[str, int]:
    """The cut with everything in one stage."""
    return {node.name: 0 for node in graph.operators}


def windows(graph: CapturedGraph, sizes: Mapping[str, float], limit: float) -> dict[str, int]:
    """A cut into runs of neighbouring operators of at most ``limit`` in all, if groups allow it.

    Args:
        sizes: of every operator, in any unit.
    """
    total = 0.0
    borders: list[int] = []
    allowed = set(_borders(graph))
    for index, node in enumerate(graph.operators):
        size = sizes[node.name]
        if index in allowed and total and total + size > limit:
            borders.append(index)
            total = 0.0
        total += size
    return _stages(graph, borders)


def random_stages(graph: CapturedGraph, seed: int) -> dict[str, int]:
    """A cut into 2 to 6 runs of neighbouring operators, anywhere that groups allow."""
    draw = random.Random(seed)
    allowed = _borders(graph)
    count = min(draw.randint(_MIN_STAGES, _MAX_STAGES) - 1, len(allowed))
    return _stages(graph, draw.sample(allowed, count))


def _borders(graph: CapturedGraph) -> list[int]:
    """Places between neighbouring operators that divide no group."""
    groups = [graph.groups.get(node.name) for node in graph.operators]
    last = {group: index for index, group in enumerate(groups)}
    borders, closed = [], -1
    for index, group in enumerate(groups):
        if index and index > closed:
            borders.append(index)
        if group is not None:
            closed = max(closed, last[group])
    return borders


def _stages(graph: CapturedGraph, borders: Sequence[int]) -> dict[str, int]:
    starts = set(borders)
    stage = 0
    stage_of: dict[str, int] = {}
    for index, node in enumerate(graph.operators):
        stage += index in starts
        stage_of[node.name] = stage
    return stage_of
