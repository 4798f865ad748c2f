"""The engine: executes rank programs on tensors, the same ones the simulator executes on costs.

Before a program runs, every row is bound to all that it refers to: a stage, a line of messages,
what it reads of the batch. So a row is a call without arguments but the state of the run.

Replicas that split micro-batches exchange the rows that both compute. A value that all samples
share (positions of tokens, say) is the same on all replicas that make it; each reader takes it from
the first of them, which also gets the reader's gradient, so that each part of it arrives once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
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
from pipectl.runtime.layout import Tensors
from pipectl.runtime.process import Doing
from pipectl.runtime.reduction import StageReduction
from pipectl.runtime.stage import MicroBatch, Stage
from pipectl.runtime.step import Key, Piece, Step, StepRun, lane_of
from pipectl.runtime.transport import Transport
from pipectl.schedule import Actions, Kind
from pipectl.watch.board import action_record, wait_record

_HALVES = (TransferKind.SAVED, TransferKind.WEIGHT)
"""Messages between the two ranks of a stage, which know what they hold."""
_KINDS = tuple(Kind)


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


class Row(NamedTuple):
    """One action of a program, bound to all that it refers to.

    Args:
        execute: does it.
        activity: what the rank does, for whoever watches it.
        computes: whether it is work of a stage, after which messages and sums go on.
    """

    execute: Execute
    activity: bytes
    computes: bool


Execute = Callable[[StepRun], None]
Deliver = Callable[[StepRun, Tensors], None]


def _update(stage: int, micro_batch: int, run: StepRun) -> None:
    run.outbox = None
    run.update(stage, micro_batch)


class Engine:
    """Runs the steps of one rank.

    Args:
        stages: the rank's stages by index.
        cut: of the training or evaluation graph; any batch size serves.
        reductions: of the stages that have replicas.
        graphs: by the shape of a micro-batch, if they are several.

    Attributes:
        on_results: called with (micro-batch, stage, results) after every forward of a training.
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
        self._programs: WeakKeyDictionary[Step, list[Row]] = WeakKeyDictionary()
        self.on_results: Callable[[int, int, Tensors], None] | None = None
        self.on_evaluated: Callable[[Rows, Tensors, Any], None] | None = None

    def run(self, run: StepRun, parts: Iterable[tuple[Actions, int]] | None = None) -> None:
        """Execute a step.

        Args:
            parts: rows that follow one another, with what is to be added to their micro-batches;
                by default the step's.
        """
        step = run.step
        if parts is None:
            if step not in self._programs:
                self._programs[step] = self._bind(step, step.actions)
            self._run_rows(run, self._programs[step], step.actions)
            return
        for actions, more in parts:
            shifted = actions.shifted(more)
            self._run_rows(run, self._bind(step, shifted), shifted)

    def _run_rows(self, run: StepRun, rows: Sequence[Row], actions: Actions) -> None:
        if run.recording is not None:
            run.recording.expect(actions.rows)
        begin, advance = self._board.begin, self._transport.advance
        reductions = list(self.reductions.values())
        for execute, activity, computes in rows:
            start = perf_counter()
            begin(activity)
            if computes:
                run.outbox = None  # what was made before is sent, or waits with its send
            execute(run)
            end = perf_counter()
            if run.recording is not None:
                run.recording.add(start, end)
            if computes:
                run.busy_s += end - start
                advance()
                for reduction in reductions:
                    reduction.advance()

    def _bind(self, step: Step, actions: Actions) -> list[Row]:
        """The rows of some actions of a step, with all that they refer to."""
        program: list[Row] = []
        read: set[int] = set()  # by rows after the one under way
        for row in reversed(actions.rows.tolist()):
            kind, (_, stage, number, channel, start, stop, age) = _KINDS[row[0]], row
            weights = channel >= 0 and step.channels[channel].kind is TransferKind.WEIGHT
            rows = Rows.of(0) if number < 0 or weights else step.sizes[number]
            if start >= 0:
                rows = rows._replace(start=start, stop=stop)
            micro_batch = MicroBatch(number, rows, age=age)
            if channel >= 0:
                sends = kind in (Kind.SEND_START, Kind.SEND_WAIT)
                bind = self._bind_send if sends else self._bind_receive
                execute = bind(step, kind, stage, micro_batch, channel)
            else:
                execute = self._bind_work(step, kind, stage, micro_batch, number not in read)
            if kind in (Kind.FORWARD, Kind.EVALUATE):
                read.add(number)
            text = kind.name if number < 0 else f"{kind.name} micro-batch {number}"
            computes = kind.is_compute and kind is not Kind.UPDATE
            program.append(Row(execute, action_record(text, stage), computes))
        return program[::-1]

    def _bind_work(
        self, step: Step, kind: Kind, index: int, micro_batch: MicroBatch, is_last_reader: bool
    ) -> Execute:
        """What does anything but a message.

        Args:
            is_last_reader: whether no later row reads the micro-batch.
        """
        number, stages, reductions = micro_batch.number, self._stages, self.reductions
        match kind:
            case Kind.FORWARD | Kind.EVALUATE:
                return self._bind_forward(step, kind, index, micro_batch, is_last_reader)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                return self._bind_backward(step, kind, index, micro_batch)
            case Kind.BACKWARD_WEIGHT:
                return lambda _: stages[index].finish_backward(number)
            case Kind.RECOMPUTE:
                return lambda _: stages[index].recompute(micro_batch)
            case Kind.OFFLOAD_START | Kind.OFFLOAD_WAIT | Kind.FETCH_START | Kind.FETCH_WAIT:
                return lambda _: stages[index].saved[number].move(kind)
            case Kind.REDUCE_START:
                return lambda _: reductions[index].start()
            case Kind.REDUCE_WAIT:
                return lambda _: reductions[index].finish()
        return partial(_update, index, number)

    def _bind_forward(
        self, step: Step, kind: Kind, index: int, micro_batch: MicroBatch, is_last_reader: bool
    ) -> Execute:
        stage, (number, rows, _, age) = self._stages[index], micro_batch
        key, trains = (False, index, number), kind is Kind.FORWARD
        draws, names = stage.draws(trains, rows), stage.inputs(trains, rows)
        size, is_whole = rows.size, rows.is_whole
        deliver = self._bind_delivery(step, TransferKind.ACTIVATION, index, micro_batch)
        if names and rows.shape not in self._readers:
            graph = self._graphs.get(rows.shape, self.cut.graph)
            self._readers[rows.shape] = Reader(graph, training=trains, length=rows.length)
        reader, device = self._readers[rows.shape] if names else None, self._device

        def start(run: StepRun) -> tuple[MicroBatch, dict[str, Tensor], Tensors]:
            seeded = micro_batch
            if draws:
                seeded = MicroBatch(number, rows, run.seed_of(number), age)
            arrived, inputs = self._slicing.joined(run.inbox.pop(key, ())), {}
            known = None if reader is None else reader.read(run.load(number, rows))
            if is_last_reader:
                run.drop(number)
            if reader is not None and known is not None:
                reader.check(known, size, names, is_whole=is_whole)
                inputs = {name: known[name].to(device) for name in names}
            return seeded, inputs, arrived

        def forward(run: StepRun) -> None:
            results = stage.forward(*start(run))
            loss = results.get(self._loss)
            if loss is not None:
                run.losses.append(loss)
            if self.on_results is not None:
                self.on_results(number, index, results)
            deliver(run, results)

        def evaluate(run: StepRun) -> None:
            has_loss = index == self.cut.loss_stage and self.on_evaluated is not None
            targets = run.load(number, rows)[1] if has_loss else None
            given = start(run)
            results = stage.evaluate(*given)
            if has_loss and self.on_evaluated is not None:
                self.on_evaluated(rows, {**given[2], **results}, targets)
            deliver(run, results)

        return forward if trains else evaluate

    def _bind_backward(
        self, step: Step, kind: Kind, index: int, micro_batch: MicroBatch
    ) -> Execute:
        stage, number = self._stages[index], micro_batch.number
        key = True, index, number
        is_last = kind is Kind.BACKWARD and step.closing.get(index) == number
        deliver = self._bind_delivery(step, TransferKind.GRADIENT, index, micro_batch)

        def backward(run: StepRun) -> None:
            gradients = self._slicing.joined(run.inbox.pop(key, ()))
            if is_last:
                self.reductions[index].arm()
            results = stage.backward(micro_batch, gradients, run.weights[number], run.scale)
            deliver(run, results)

        return backward

    def _bind_delivery(
        self, step: Step, kind: TransferKind, index: int, micro_batch: MicroBatch
    ) -> Deliver:
        """Keeps results for the sends that follow; hands them to stages on this rank at once."""
        first, copies = micro_batch.rows.start, list[tuple[Key, Rows, Callable[..., Tensors]]]()
        for channel, carried in step.local.get((kind, index), ()):
            rows = carried.get(micro_batch.number)
            if rows is not None:
                target = step.channels[channel].target_stage
                key = kind is TransferKind.GRADIENT, target, micro_batch.number
                copies.append((key, rows, self._bind_content(step, channel, key[2], rows)))

        def deliver(run: StepRun, results: Tensors) -> None:
            run.outbox = first, results
            for key, rows, content in copies:
                run.inbox.setdefault(key, []).append(Piece(rows, content(run)))

        return deliver

    def _bind_content(
        self, step: Step, channel: int, number: int, rows: Rows
    ) -> Callable[[StepRun], Tensors]:
        """What a message takes from the results of the last computation."""
        slots = self.cut.lanes[lane_of(step.channels[channel])]
        leads, is_whole = step.heads.get((channel, number)) == rows.start, rows.is_whole

        def content(run: StepRun) -> Tensors:
            assert run.outbox is not None
            origin, results = run.outbox
            tensors = {slot: results.get(slot) for slot in slots}
            if is_whole:
                return tensors
            return self._slicing.part(tensors, origin, rows, leads=leads)

        return content

    def _bind_send(
        self, step: Step, kind: Kind, index: int, micro_batch: MicroBatch, channel: int
    ) -> Execute:
        end, number, rows = step.channels[channel], micro_batch.number, micro_batch.rows
        lane, peer, handle, shape = lane_of(end), end.target_rank, (channel, number), rows.shape
        line = self._transport.line(lane, peer)
        if kind is Kind.SEND_WAIT:
            words = f"rank {peer} to take {_words(lane, number)} of stage {index}"
            awaits, record = self._board.awaits, wait_record(words, peer)

            def finish_send(run: StepRun) -> None:
                awaits(record)
                line.finish_send(run.sends.pop(handle))

            return finish_send
        content = self._bind_content(step, channel, number, rows)
        if lane.kind in _HALVES:
            leaving = self._stages[index].leaving
            content = lambda _: leaving(number)  # noqa: E731
        elif rows.is_whole:  # the line takes its slots out of all results
            content = _results

        def start_send(run: StepRun) -> None:
            run.sends[handle] = line.start_send(number, shape, content(run))

        return start_send

    def _bind_receive(
        self, step: Step, kind: Kind, index: int, micro_batch: MicroBatch, channel: int
    ) -> Execute:
        end, number, rows = step.channels[channel], micro_batch.number, micro_batch.rows
        lane, peer, handle, shape = lane_of(end), end.source_rank, (channel, number), rows.shape
        line = self._transport.line(lane, peer)
        if kind is Kind.RECEIVE_START:

            def start_receive(run: StepRun) -> None:
                run.receives[handle] = line.start_receive(number, shape)

            return start_receive
        words = f"{_words(lane, number)} of stage {lane.source} from rank {peer}"
        awaits, record = self._board.awaits, wait_record(words, peer)
        key = lane.kind is TransferKind.GRADIENT, lane.target, number

        def finish_receive(run: StepRun) -> None:
            awaits(record)
            tensors = line.finish_receive(run.receives.pop(handle))
            run.inbox.setdefault(key, []).append(Piece(rows, tensors))

        def finish_half(run: StepRun) -> None:
            awaits(record)
            # The forward may run again here, from what its rank has saved.
            seed = run.seed_of(number) if lane.kind is TransferKind.SAVED else 0
            tensors = line.finish_receive(run.receives.pop(handle))
            self._stages[index].arriving(micro_batch._replace(seed=seed), tensors)

        return finish_half if lane.kind in _HALVES else finish_receive


def _words(lane: Lane, number: int) -> str:
    """What a message holds."""
    return f"{lane.kind}s" if number < 0 else f"{lane.kind} {number}"


def _results(run: StepRun) -> Tensors:
    """Of the last computation."""
    assert run.outbox is not None
    return run.outbox[1]
