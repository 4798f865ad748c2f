"""The stages of a cut, each run by itself, over and over, as a rank runs its own.

A first pass runs them in the order of the pipeline and keeps what each one received: activations
for its forward, gradients for its backward. Afterwards any stage can be run alone, one forward and
one backward at a time, as in the steady state of 1F1B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from pipectl.capture import Cut, Slot
from pipectl.capture.batch import spared
from pipectl.capture.slices import Rows
from pipectl.graph import TransferKind
from pipectl.profiler.marks import Cost, Marked, Spent, clock_of
from pipectl.profiler.subject import Subject
from pipectl.runtime.layout import Tensors
from pipectl.runtime.stage import MicroBatch, Stage

_SEED = 1


@dataclass
class _Given:
    """What a stage reads from the batch, and what other stages send it."""

    inputs: Mapping[str, Tensor]
    activations: dict[Slot, Tensor | None]
    gradients: dict[Slot, Tensor | None]


class AloneStages:
    """Runs and times the stages of one cut.

    Args:
        states: parameters and buffers by full name.
        stage_of: stage of every operator of the training graph.
    """

    def __init__(
        self, subject: Subject, states: Mapping[str, Tensor], stage_of: Mapping[str, int]
    ) -> None:
        self.cut = Cut(subject.graph, stage_of, training=True)
        rows = Rows.of(subject.size)
        self._micro_batch = MicroBatch(0, rows, _SEED)
        self._clock = clock_of(subject.device)
        self._key = (True, rows)
        device, precision = subject.device, subject.precision
        self._stages = [
            Stage(index, {self._key: self.cut}, states, device, precision=precision)
            for index in range(1 + max(stage_of.values()))
        ]
        self._marked: dict[int, Marked] = {}
        self._given = [
            _Given({name: subject.batch[name] for name in stage.inputs(*self._key)}, {}, {})
            for stage in self._stages
        ]
        self._first_pass()

    def __len__(self) -> int:
        return len(self._stages)

    def run(self, index: int) -> tuple[float, float]:
        """One forward and one backward of a stage: the seconds of each."""
        inputs = self._inputs(index)
        start = self._clock()
        self._forward(index, inputs)
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
        self._forward(index, self._inputs(index))
        code.stage = plain
        marked.watch_backward()
        self._backward(index)
        return marked.spent(self._clock())

    def forget(self) -> None:
        """Drop the gradients of parameters."""
        for stage in self._stages:
            stage.forget()

    def _first_pass(self) -> None:
        for index in range(len(self)):
            made = self._forward(index, self._inputs(index))
            self._deliver(TransferKind.ACTIVATION, index, made)
        for index in reversed(range(len(self))):
            self._deliver(TransferKind.GRADIENT, index, self._backward(index))

    def _inputs(self, index: int) -> dict[str, Tensor]:
        """What a stage reads from the batch, for one forward: every run finds the same."""
        return spared(self.cut.graph, self._given[index].inputs)

    def _forward(self, index: int, inputs: Mapping[str, Tensor]) -> Tensors:
        stage, arrived = self._stages[index], self._given[index].activations
        return stage.forward(self._micro_batch, inputs, arrived)

    def _backward(self, index: int) -> Tensors:
        given = dict(self._given[index].gradients)
        return self._stages[index].backward(self._micro_batch, given, 1.0)

    def _deliver(self, kind: TransferKind, source: int, made: Tensors) -> None:
        for lane, slots in self.cut.lanes.items():
            if lane.kind is not kind or lane.source != source:
                continue
            given = self._given[lane.target]
            into = given.activations if kind is TransferKind.ACTIVATION else given.gradients
            for slot in slots:
                tensor = made.get(slot)
                into[slot] = None if tensor is None else tensor.detach().clone()
