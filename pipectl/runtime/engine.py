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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pipectl.capture import CapturedGraph, Cut, Lane, Slot
from pipectl.capture.batch import Reader
from pipectl.capture.slices import Rows, batch_dimension
from pipectl.graph import TransferKind
from pipectl.runtime.device import Device
from pipectl.runtime.failure import Doing
from pipectl.runtime.layout import Tensors
from pipectl.runtime.reduction import StageReduction
from pipectl.runtime.stage import MicroBatch, Stage
from pipectl.runtime.step import Loaded, Step, StepInput, lane_of
from pipectl.runtime.transport import Line, Posted, Transport
from pipectl.schedule import Actions, Kind
from pipectl.watch.board import action_record, wait_record

_HALVES = (TransferKind.SAVED, TransferKind.WEIGHT)
"""Messages between the two ranks of a stage, which know what they hold."""
_KINDS = tuple(Kind)
_SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


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
        if len(pieces) == 1 and pieces[0].rows.is_whole:
            return pieces[0].tensors
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
                total = tensor.sum(dtype=_SUMMED_AS.get(tensor.dtype))
                self._sums.append((Origin(micro_batch, stage), total))

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


Key = tuple[bool, int, int]
"""Of what arrives for a computation: whether it is gradients, stage, micro-batch."""


class Message(NamedTuple):
    """What of a stage's results goes along a channel.

    Args:
        rows: of the micro-batch.
        leads: whether values that all samples share go along.
        key: of the computation that it is for.
    """

    slots: Sequence[Slot]
    rows: Rows
    leads: bool
    key: Key


class Row(NamedTuple):
    """One action, with all that it refers to.

    Args:
        execute: does it.
        computes: whether it occupies the device.
        micro_batch: that is computed or moved, without its seed.
        activity: what the rank does, for whoever watches it.
        key: of what a computation reads, or a message holds.
        draws: whether a computation may draw random numbers, so that it needs a seed.
        inputs: names of what it reads of the batch.
        is_last_reader: whether no later row reads the micro-batch.
        is_closing: whether this backward is the last before the gradients of its stage are summed.
        copies: of the results, for computations on this rank.
        handle: of a message under way: channel and micro-batch.
        line: of a message.
        message: what is sent.
        wait: what a wait is for, for whoever watches the rank.
    """

    execute: Callable[[StepRun, Row], None]
    computes: bool
    kind: Kind
    stage: int
    micro_batch: MicroBatch
    activity: bytes
    key: Key
    draws: bool = False
    inputs: tuple[str, ...] = ()
    is_last_reader: bool = False
    is_closing: bool = False
    copies: Sequence[Message] = ()
    handle: tuple[int, int] = (-1, -1)
    line: Line | None = None
    message: Message | None = None
    wait: bytes = b""


@dataclass
class StepRun:
    """The state of one execution of a step.

    Attributes:
        inbox: what arrived for computations.
        outbox: the first sample and the results of the last computation; they are sent by the rows
            that follow.
        sends, receives: under way, by channel and micro-batch.
        losses: of every micro-batch, or part of one, that this rank computes, in order.
        busy_s: time in forwards and backwards.
    """

    step_input: StepInput
    loaded: Loaded
    inbox: dict[Key, list[Piece]] = field(default_factory=dict)
    outbox: tuple[int, Tensors] | None = None
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
        self._tables: WeakKeyDictionary[Step, list[Row]] = WeakKeyDictionary()
        self.origins: Origins | None = None
        self.on_evaluated: Callable[[Rows, Tensors, Any], None] | None = None

        def move(_: StepRun, row: Row) -> None:
            stages[row.stage].saved[row.micro_batch.number].move(row.kind)

        def finish_backward(_: StepRun, row: Row) -> None:
            stages[row.stage].finish_backward(row.micro_batch.number)

        self._handlers: dict[Kind, Callable[[StepRun, Row], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: lambda _, row: stages[row.stage].recompute(row.micro_batch),
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: finish_backward,
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
        self._half_handlers = {
            **self._handlers,
            Kind.SEND_START: self._send_half,
            Kind.RECEIVE_WAIT: self._receive_half,
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
        run = StepRun(step_input, Loaded(step_input.batches, step.pieces))
        if parts is None:
            if step not in self._tables:
                self._tables[step] = self._table(step, step.actions)
            self._run_rows(run, self._tables[step], step.actions, update)
            return run
        for actions, more in parts:
            shifted = actions.shifted(more)
            self._run_rows(run, self._table(step, shifted), shifted, update)
        return run

    def _table(self, step: Step, actions: Actions) -> list[Row]:
        """The rows of some actions of a step."""
        lanes = [lane_of(channel) for channel in step.channels]
        table: list[Row] = []
        read: set[int] = set()  # by rows after the one under way
        for row in reversed(actions.rows.tolist()):
            kind, (_, stage, number, channel, start, stop, age) = _KINDS[row[0]], row
            weights = channel >= 0 and lanes[channel].kind is TransferKind.WEIGHT
            rows = Rows.of(0) if number < 0 or weights else step.sizes[number]
            if start >= 0:
                rows = rows._replace(start=start, stop=stop)
            micro_batch = MicroBatch(number, rows, age=age)
            text = kind.name if number < 0 else f"{kind.name} micro-batch {number}"
            common = kind.is_compute, kind, stage, micro_batch, action_record(text, stage)
            if channel >= 0:
                table.append(self._message_row(common, step, channel, lanes[channel]))
                continue
            is_gradient = kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
            draws, is_last_reader, inputs = False, False, tuple[str, ...]()
            if kind in (Kind.FORWARD, Kind.EVALUATE):
                draws = self._stages[stage].draws(kind is Kind.FORWARD, rows)
                inputs = self._stages[stage].inputs(kind is Kind.FORWARD, rows)
                is_last_reader = number not in read
                read.add(number)
            table.append(
                Row(
                    self._handlers.get(kind, _nothing),
                    *common,
                    (is_gradient, stage, number),
                    draws=draws,
                    inputs=inputs,
                    is_last_reader=is_last_reader,
                    is_closing=kind is Kind.BACKWARD and step.closing.get(stage) == number,
                    copies=self._copies(step, is_gradient, stage, micro_batch),
                )
            )
        return table[::-1]

    def _message_row(
        self,
        common: tuple[bool, Kind, int, MicroBatch, bytes],
        step: Step,
        channel: int,
        lane: Lane,
    ) -> Row:
        _, kind, stage, micro_batch, _ = common
        number, rows, end = micro_batch.number, micro_batch.rows, step.channels[channel]
        words = f"{lane.kind}s" if number < 0 else f"{lane.kind} {number}"
        if kind in (Kind.SEND_START, Kind.SEND_WAIT):
            peer = end.target_rank
            wait = f"rank {peer} to take {words} of stage {stage}"
        else:
            peer = end.source_rank
            wait = f"{words} of stage {lane.source} from rank {peer}"
        handlers = self._half_handlers if lane.kind in _HALVES else self._handlers
        key = lane.kind is TransferKind.GRADIENT, lane.target, number
        leads = step.heads.get((channel, number)) == rows.start
        return Row(
            handlers[kind],
            *common,
            key,
            draws=lane.kind is TransferKind.SAVED,  # the forward may run again there
            handle=(channel, number),
            line=self._transport.line(lane, peer),
            message=Message(self.cut.lanes[lane], rows, leads, key),
            wait=wait_record(wait, peer),
        )

    def _copies(
        self, step: Step, is_gradient: bool, stage: int, micro_batch: MicroBatch
    ) -> list[Message]:
        """What the results of a computation are for on this rank."""
        copies, number = [], micro_batch.number
        kind = TransferKind.GRADIENT if is_gradient else TransferKind.ACTIVATION
        for channel, lane, carried in step.local.get((kind, stage), ()):
            if carried is None or number in carried:
                rows = micro_batch.rows if carried is None else carried[number]
                leads = step.heads.get((channel, number)) == rows.start
                key = is_gradient, lane.target, number
                copies.append(Message(self.cut.lanes[lane], rows, leads, key))
        return copies

    def _run_rows(
        self, run: StepRun, rows: Sequence[Row], actions: Actions, update: Update
    ) -> None:
        if run.step_input.recording is not None:
            run.step_input.recording.expect(actions.rows)
        for row in rows:
            self._execute(run, row, update)

    def _execute(self, run: StepRun, row: Row, update: Update) -> None:
        start = perf_counter()
        self._board.begin(row.activity)
        if not row.computes:
            row.execute(run, row)
            if run.step_input.recording is not None:
                run.step_input.recording.add(start, perf_counter())
            return
        run.outbox = None  # what was made before is sent, or waits with its send
        recording = run.step_input.recording
        if row.kind is Kind.UPDATE:
            update(row, run)
            end = perf_counter()
        else:
            row.execute(run, row)
            end = perf_counter()
            run.busy_s += end - start
        if recording is not None:
            recording.add(start, end)
        self._transport.advance()
        for reduction in self.reductions.values():
            reduction.advance()

    def _forward(self, run: StepRun, row: Row) -> None:
        micro_batch = _seeded(run, row)
        arrived = self._slicing.joined(run.inbox.pop(row.key, ()))
        inputs = self._read(run, row, training=True)
        results = self._stages[row.stage].forward(micro_batch, inputs, arrived)
        loss = results.get(self._loss)
        if loss is not None:
            run.losses.append(loss)
        if self.origins is not None:
            self.origins.note(micro_batch.number, row.stage, results)
        self._deliver(run, row, results)

    def _backward(self, run: StepRun, row: Row) -> None:
        gradients = self._slicing.joined(run.inbox.pop(row.key, ()))
        if row.is_closing:
            self.reductions[row.stage].arm()
        weight, scale = run.step_input.weights[row.micro_batch.number], run.step_input.scale
        results = self._stages[row.stage].backward(row.micro_batch, gradients, weight, scale)
        self._deliver(run, row, results)

    def _evaluate(self, run: StepRun, row: Row) -> None:
        micro_batch = _seeded(run, row)
        arrived = self._slicing.joined(run.inbox.pop(row.key, ()))
        targets = None
        if row.stage == self.cut.loss_stage and self.on_evaluated is not None:
            targets = run.loaded.part(micro_batch.number, micro_batch.rows)[1]
        inputs = self._read(run, row, training=False)
        results = self._stages[row.stage].evaluate(micro_batch, inputs, arrived)
        if row.stage == self.cut.loss_stage and self.on_evaluated is not None:
            self.on_evaluated(micro_batch.rows, {**arrived, **results}, targets)
        self._deliver(run, row, results)

    def _deliver(self, run: StepRun, row: Row, results: Tensors) -> None:
        """Keep results for the sends that follow; hand them to stages on this rank at once."""
        run.outbox = row.micro_batch.rows.start, results
        for message in row.copies:
            piece = Piece(message.rows, self._content(run, message))
            run.inbox.setdefault(message.key, []).append(piece)

    def _content(self, run: StepRun, message: Message) -> Tensors:
        """What a message takes from the results of the last computation."""
        assert run.outbox is not None
        origin, results = run.outbox
        tensors = {slot: results.get(slot) for slot in message.slots}
        if message.rows.is_whole:
            return tensors
        return self._slicing.part(tensors, origin, message.rows, leads=message.leads)

    def _send_start(self, run: StepRun, row: Row) -> None:
        assert row.line is not None
        assert row.message is not None
        number, shape = row.micro_batch.number, row.message.rows.shape
        content = self._content(run, row.message)
        run.sends[row.handle] = row.line.start_send(number, shape, content)

    def _send_half(self, run: StepRun, row: Row) -> None:
        """Send what the other half of a stage needs."""
        assert row.line is not None
        number, shape = row.micro_batch.number, row.micro_batch.rows.shape
        content = self._stages[row.stage].leaving(number)
        run.sends[row.handle] = row.line.start_send(number, shape, content)

    def _send_wait(self, run: StepRun, row: Row) -> None:
        assert row.line is not None
        self._board.awaits(row.wait)
        row.line.finish_send(run.sends.pop(row.handle))

    def _receive_start(self, run: StepRun, row: Row) -> None:
        assert row.line is not None
        number, rows = row.micro_batch.number, row.micro_batch.rows
        run.receives[row.handle] = row.line.start_receive(number, rows.shape)

    def _receive_wait(self, run: StepRun, row: Row) -> None:
        assert row.line is not None
        self._board.awaits(row.wait)
        tensors = row.line.finish_receive(run.receives.pop(row.handle))
        run.inbox.setdefault(row.key, []).append(Piece(row.micro_batch.rows, tensors))

    def _receive_half(self, run: StepRun, row: Row) -> None:
        """Receive what the other half of a stage has sent."""
        assert row.line is not None
        self._board.awaits(row.wait)
        tensors = row.line.finish_receive(run.receives.pop(row.handle))
        self._stages[row.stage].arriving(_seeded(run, row), tensors)

    def _read(self, run: StepRun, row: Row, *, training: bool) -> dict[str, Tensor]:
        number, rows = row.micro_batch.number, row.micro_batch.rows
        if not row.inputs:
            if row.is_last_reader:
                run.loaded.drop(number)
            return {}
        reader = self._readers.get(rows.shape)
        if reader is None:
            graph = self._graphs.get(rows.shape, self.cut.graph)
            reader = Reader(graph, training=training, length=rows.length)
            self._readers[rows.shape] = reader
        known = reader.read(run.loaded.part(number, rows))
        if row.is_last_reader:
            run.loaded.drop(number)
        reader.check(known, rows.size, row.inputs, is_whole=rows.is_whole)
        return {name: known[name].to(self._device) for name in row.inputs}


def _seeded(run: StepRun, row: Row) -> MicroBatch:
    if not row.draws:
        return row.micro_batch
    return row.micro_batch._replace(seed=run.step_input.seed_of(row.micro_batch.number))


def _nothing(_: StepRun, __: Row) -> None:
    """An UPDATE, which is no matter of the engine's."""
