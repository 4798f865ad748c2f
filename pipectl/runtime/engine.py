"""The engine: executes rank programs on tensors, the same ones the simulator executes on costs.

Replicas that split micro-batches exchange the rows that both compute. A value that all samples
share (positions of tokens, say) is the same on all replicas that make it; each reader takes it from
the first of them, which also gets the reader's gradient, so that each part of it arrives once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipectl.capture import CapturedGraph, Cut, Slot
from pipectl.capture.batch import Reader
from pipectl.capture.slices import Rows, batch_dimension
from pipectl.graph import TransferKind
from pipectl.runtime.device import Device
from pipectl.runtime.failure import Doing
from pipectl.runtime.layout import Tensors
from pipectl.runtime.reduction import StageReduction
from pipectl.runtime.stage import MicroBatch, Stage
from pipectl.runtime.step import Loaded, Row, Step, StepInput
from pipectl.runtime.transport import Posted, Transport
from pipectl.schedule import Actions, Kind

_HALVES = (TransferKind.SAVED, TransferKind.WEIGHT)
"""Messages between the two ranks of a stage, which know what they hold."""


class Piece(NamedTuple):
    """What arrived of a micro-batch from one replica."""

    rows: Rows
    tensors: Tensors


class Slicing:
    """Cuts and joins the values of one graph."""

    def __init__(self, graph: CapturedGraph) -> None:
        nodes = {node.name: node for node in graph.operators}
        self._dimension = cache(lambda value: batch_dimension(graph, nodes[value]))

    def part(self, results: Tensors, origin: int, rows: Rows, *, leads: bool) -> Tensors:
        """Rows of what a replica computed.

        Args:
            origin: first sample of the results.
            rows: wanted, counted from the first sample of the micro-batch.
            leads: whether shared values go along.
        """
        return {
            slot: None if tensor is None else self._rows(slot, tensor, origin, rows, leads)
            for slot, tensor in results.items()
        }

    def joined(self, pieces: Sequence[Piece]) -> Tensors:
        """What arrived from all replicas, as one."""
        if all(piece.rows.is_whole for piece in pieces):
            return {slot: tensor for piece in pieces for slot, tensor in piece.tensors.items()}
        parts: dict[Slot, list[Tensor]] = {}
        for piece in sorted(pieces, key=lambda item: item.rows):
            for slot, tensor in piece.tensors.items():
                tensors_of_slot = parts.setdefault(slot, [])
                if tensor is not None:
                    tensors_of_slot.append(tensor)
        return {slot: self._join(slot, tensors) for slot, tensors in parts.items()}

    def _rows(
        self, slot: Slot, tensor: Tensor, origin: int, rows: Rows, leads: bool
    ) -> Tensor | None:
        dim = self._dimension(slot.value)
        if dim is None:
            return tensor if leads else None
        if tensor.shape[dim] == rows.size:
            return tensor
        return tensor.narrow(dim, rows.start - origin, rows.size).contiguous()

    def _join(self, slot: Slot, tensors: Sequence[Tensor]) -> Tensor | None:
        if len(tensors) < 2:
            return tensors[0] if tensors else None
        dim = self._dimension(slot.value)
        if dim is not None:
            return torch.cat(list(tensors), dim)
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return total


class Origin(NamedTuple):
    """A stage whose output for a micro-batch is not finite."""

    micro_batch: int
    stage: int


class Origins:
    """Sums of what the stages of one rank hand on, in steps that are not over.

    Every stage sums its output while a cache still has it: a sum is finite only if all elements
    are. Nobody looks at the sums before the end of the step, so no accelerator is waited for.

    Args:
        values: operators whose values are looked at.
    """

    def __init__(self, values: Container[str]) -> None:
        self._values = values
        self._sums: list[tuple[Origin, Tensor]] = []

    @classmethod
    def of(cls, cut: Cut) -> Origins:
        """Of what has a gradient that comes back from another stage: masks may be infinite."""
        lanes = cut.lanes.items()
        back = (slots for lane, slots in lanes if lane.kind is TransferKind.GRADIENT)
        return cls({slot.value for slots in back for slot in slots})

    def note(self, micro_batch: int, stage: int, results: Tensors) -> None:
        """Sum what a stage has made of a micro-batch."""
        for slot, tensor in results.items():
            if tensor is not None and slot.value in self._values:
                wide = torch.promote_types(tensor.dtype, torch.float32)
                self._sums.append((Origin(micro_batch, stage), tensor.sum(dtype=wide)))

    def first(self, micro_batches: Container[int] | None = None) -> Origin | None:
        """The first micro-batch and stage, among some or all, that is not finite.

        They are forgotten.
        """
        mine, others = list[tuple[Origin, Tensor]](), list[tuple[Origin, Tensor]]()
        for origin, total in self._sums:
            is_asked_for = micro_batches is None or origin.micro_batch in micro_batches
            (mine if is_asked_for else others).append((origin, total))
        self._sums = others
        if not mine:
            return None
        finite = torch.stack([total.double() for _, total in mine]).isfinite().tolist()
        return min((o for (o, _), good in zip(mine, finite, strict=True) if not good), default=None)

    def forget(self) -> None:
        """Begin anew."""
        self._sums.clear()


@dataclass
class StepRun:
    """The state of one execution of a step.

    Attributes:
        inbox: what arrived for a computation, by kind, stage and micro-batch.
        outbox: what the last computation made, by kind and stage, with its first sample; it is sent
            by the rows that follow.
        sends, receives: under way, by channel and micro-batch.
        losses: of every micro-batch, or part of one, that this rank computes, in order.
        busy_s: time in forwards and backwards.
    """

    step: Step
    step_input: StepInput
    loaded: Loaded
    inbox: dict[tuple[TransferKind, int, int], list[Piece]] = field(default_factory=dict)
    outbox: dict[tuple[TransferKind, int], tuple[int, Tensors]] = field(default_factory=dict)
    sends: dict[tuple[int, int], Posted] = field(default_factory=dict)
    receives: dict[tuple[int, int], Posted] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    busy_s: float = 0.0


Update = Callable[[Row, StepRun], None]
"""Called at an UPDATE, with what the run gave so far."""


class Engine:
    """Runs the steps of one rank.

    Args:
        stages: the rank's stages by index.
        cut: of the training or evaluation graph; any batch size serves.
        reductions: of the stages that have replicas.
        graphs: by the shape of a micro-batch, if they are several.

    Attributes:
        origins: is shown what the stages make, if anybody looks for what is not finite.
        on_evaluated: called with (rows, results, targets) where the loss of an evaluation is
            computed.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        cut: Cut,
        transport: Transport,
        device: Device,
        doing: Doing,
        reductions: Mapping[int, StageReduction] | None = None,
        graphs: Mapping[tuple[int, int], CapturedGraph] | None = None,
    ) -> None:
        self.cut = cut
        self._stages = stages
        self._slicing = Slicing(cut.graph)
        self.reductions = dict(reductions or {})
        self._transport = transport
        self._device = device.torch_device
        self._board = doing.board
        self._loss = Slot(cut.graph.loss)
        self._graphs = graphs or {}
        self._readers: dict[tuple[int, int], Reader] = {}
        self.origins: Origins | None = None
        self.on_evaluated: Callable[[Rows, Tensors, Any], None] | None = None

        def move(_: StepRun, row: Row) -> None:
            stages[row.stage].saved[row.micro_batch].move(row.kind)

        self._handlers: dict[Kind, Callable[[StepRun, Row], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: lambda _, row: stages[row.stage].recompute(_micro_batch(row)),
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: lambda _, row: stages[row.stage].finish_backward(row.micro_batch),
            Kind.EVALUATE: self._evaluate,
            Kind.SEND_START: self._send_start,
            Kind.SEND_WAIT: self._send_wait,
            Kind.RECEIVE_START: self._receive_start,
            Kind.RECEIVE_WAIT: self._receive_wait,
            Kind.OFFLOAD_START: move,
            Kind.OFFLOAD_WAIT: move,
            Kind.FETCH_START: move,
            Kind.FETCH_WAIT: move,
            Kind.REDUCE_START: lambda _, row: self.reductions[row.stage].start(),
            Kind.REDUCE_WAIT: lambda _, row: self.reductions[row.stage].finish(),
        }

    def run(
        self,
        step: Step,
        step_input: StepInput,
        update: Update = lambda *_: None,
        parts: Iterable[tuple[Actions, int]] | None = None,
    ) -> StepRun:
        """Execute a step.

        Args:
            update: called for every UPDATE.
            parts: rows that follow one another, with what is to be added to their micro-batches;
                by default the step's.
        """
        run = StepRun(step, step_input, Loaded(step_input.batches, step.pieces))
        if parts is None:
            self._run_rows(run, step.table(self._transport.line), step.actions, update)
            return run
        for actions, more in parts:
            shifted = actions.shifted(more)
            rows = list(step.rows_of(shifted, self._transport.line))
            self._run_rows(run, rows, shifted, update)
        return run

    def _run_rows(
        self, run: StepRun, rows: Sequence[Row], actions: Actions, update: Update
    ) -> None:
        if run.step_input.recording is not None:
            run.step_input.recording.expect(actions.rows)
        run.loaded.expect(rows)
        for row in rows:
            self._execute(run, row, update)

    def _execute(self, run: StepRun, row: Row, update: Update) -> None:
        start = perf_counter()
        kind, recording = row.kind, run.step_input.recording
        self._board.program_row(row.text, row.stage)
        if kind > Kind.EVALUATE:
            self._handlers[kind](run, row)
            if recording is not None:
                recording.add(start, perf_counter())
            return
        run.outbox.clear()  # what was made before is sent, or waits with its send
        if kind is Kind.UPDATE:
            update(row, run)
        else:
            self._handlers[kind](run, row)
        end = perf_counter()
        if recording is not None:
            recording.add(start, end)
        if kind is not Kind.UPDATE:
            run.busy_s += end - start
        self._transport.progress()
        for reduction in self.reductions.values():
            reduction.advance()

    def _forward(self, run: StepRun, row: Row) -> None:
        stage, micro_batch = self._stages[row.stage], _micro_batch(row, run)
        arrived = self._take(run, TransferKind.ACTIVATION, row)
        inputs = self._read(run, row, stage.inputs(True, row.rows), training=True)
        run.loaded.done(row.micro_batch)
        results = stage.forward(micro_batch, inputs, arrived)
        loss = results.get(self._loss)
        if loss is not None:
            run.losses.append(loss)
        if self.origins is not None:
            self.origins.note(row.micro_batch, row.stage, results)
        self._deliver(run, TransferKind.ACTIVATION, row, results)

    def _backward(self, run: StepRun, row: Row) -> None:
        gradients = self._take(run, TransferKind.GRADIENT, row)
        if row.kind is Kind.BACKWARD and run.step.closing.get(row.stage) == row.micro_batch:
            self.reductions[row.stage].arm()
        weight, scale = run.step_input.weights[row.micro_batch], run.step_input.scale
        results = self._stages[row.stage].backward(_micro_batch(row), gradients, weight, scale)
        self._deliver(run, TransferKind.GRADIENT, row, results)

    def _evaluate(self, run: StepRun, row: Row) -> None:
        stage = self._stages[row.stage]
        arrived = self._take(run, TransferKind.ACTIVATION, row)
        inputs = self._read(run, row, stage.inputs(False, row.rows), training=False)
        results = stage.evaluate(_micro_batch(row, run), inputs, arrived)
        if row.stage == self.cut.loss_stage and self.on_evaluated is not None:
            targets = run.loaded.part(row.micro_batch, row.rows)[1]
            self.on_evaluated(row.rows, {**arrived, **results}, targets)
        run.loaded.done(row.micro_batch)
        self._deliver(run, TransferKind.ACTIVATION, row, results)

    def _deliver(self, run: StepRun, kind: TransferKind, row: Row, results: Tensors) -> None:
        """Keep results for the sends that follow; hand them to stages on this rank at once."""
        run.outbox[kind, row.stage] = row.rows.start, results
        for channel, lane, carried in run.step.local.get((kind, row.stage), ()):
            if carried is None or row.micro_batch in carried:
                rows = row.rows if carried is None else carried[row.micro_batch]
                sent = row._replace(channel=channel, lane=lane, rows=rows)
                piece = Piece(rows, self._message(run, sent))
                run.inbox.setdefault((kind, lane.target, row.micro_batch), []).append(piece)

    def _message(self, run: StepRun, row: Row) -> Tensors:
        lane = row.lane
        assert lane is not None
        if lane.kind in _HALVES:
            return self._stages[row.stage].leaving(row.micro_batch)
        origin, results = run.outbox[lane.kind, row.stage]
        message = {slot: results.get(slot) for slot in self.cut.lanes[lane]}
        if row.rows.is_whole:
            return message
        leads = run.step.heads[row.channel, row.micro_batch] == row.rows.start
        return self._slicing.part(message, origin, row.rows, leads=leads)

    def _take(self, run: StepRun, kind: TransferKind, row: Row) -> Tensors:
        return self._slicing.joined(run.inbox.pop((kind, row.stage, row.micro_batch), ()))

    def _send_start(self, run: StepRun, row: Row) -> None:
        assert row.line is not None
        run.sends[row.channel, row.micro_batch] = row.line.start_send(
            row.micro_batch, row.rows.shape, self._message(run, row)
        )

    def _send_wait(self, run: StepRun, row: Row) -> None:
        assert row.line is not None
        self._board.awaits(row.peer, row.awaited)
        row.line.finish_send(run.sends.pop((row.channel, row.micro_batch)))

    def _receive_start(self, run: StepRun, row: Row) -> None:
        assert row.line is not None
        run.receives[row.channel, row.micro_batch] = row.line.start_receive(
            row.micro_batch, row.rows.shape
        )

    def _receive_wait(self, run: StepRun, row: Row) -> None:
        assert row.lane is not None
        assert row.line is not None
        self._board.awaits(row.peer, row.awaited)
        tensors = row.line.finish_receive(run.receives.pop((row.channel, row.micro_batch)))
        if row.lane.kind in _HALVES:
            self._stages[row.stage].arriving(_micro_batch(row, run), tensors)
            return
        place = row.lane.kind, row.stage, row.micro_batch
        run.inbox.setdefault(place, []).append(Piece(row.rows, tensors))

    def _read(
        self, run: StepRun, row: Row, names: Sequence[str], *, training: bool
    ) -> dict[str, Tensor]:
        if not names:
            return {}
        rows = row.rows
        reader = self._readers.get(rows.shape)
        if reader is None:
            graph = self._graphs.get(rows.shape, self.cut.graph)
            reader = Reader(graph, training=training, length=rows.length)
            self._readers[rows.shape] = reader
        known = reader.read(run.loaded.part(row.micro_batch, rows))
        reader.check(known, rows.size, names, is_whole=rows.is_whole)
        return {name: known[name].to(self._device) for name in names}


def _micro_batch(row: Row, run: StepRun | None = None) -> MicroBatch:
    seed = 0 if run is None else run.step_input.seed_of(row.micro_batch)
    return MicroBatch(row.micro_batch, row.rows, seed, row.age)
