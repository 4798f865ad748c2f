"""How a rank executes its program on tensors. Read this page first.

What a rank does, and in which order, is decided before training. The engine does it row by row:

    step      makes                                                        in
    plan      Plan: stages, schedule, ranks                                planner/
    lower     Actions: a row of integers for each thing that a rank does   schedule/lowering
    prepare   Step: the rows with what follows from the number of samples  step
    bind      Row: one function for all rows alike, and a micro-batch      here
    run       StepRun: batch, inbox, outbox and losses of one execution    here, step
    end       one vote of all ranks, clipping, the update                  step_end

A row calls a :class:`~pipectl.runtime.stage.Stage`, which holds forward and backward of its part
of the graph, a line of the :class:`~pipectl.runtime.transport.Transport`, or a sum of gradients.
Values that arrive wait in the inbox, by direction, stage and micro-batch; results stay in the
outbox until the sends that follow.

Sources: torch.distributed.pipelining runs lists of actions, too, without the rows of messages and
memory. The early backward is DAPPLE's (Fan et al., PPoPP 2021, section 3), halves of backwards are
Zero Bubble's (Qi et al., ICLR 2024), a stage whose backward has a rank of its own is PipeFB's.

Trade-offs: the order is fixed, so a rank waits for the message of its next row though it could do
another one. In exchange, the simulator runs the same rows on costs and a recorded step is compared
row by row, memory is known before, ranks cannot wait for each other in a circle, and sums have one
order. Rows are bound before: then a program is few functions called with small data, and all rows
run the same code, which stays in the caches. A rank computes in one Python thread; a thread may
move messages (transport), and accelerators have streams of their own for copies (staging).

Replicas that split micro-batches exchange the samples that both compute. A value that all samples
share (positions of tokens, say) is the same on all replicas that compute it. Each reader takes it
from the first of them, which also gets the reader's gradient, so that each part of the gradient
arrives once.

What would change if: there is a new action: a :class:`~pipectl.schedule.Kind`, where the lowering
places it, a function in ``_bind_form``, and its time in ``simulate/``. A rank chooses among rows
that are ready: ``_run_rows``, the simulator, and what the lowering proves of orders. A step depends
on values (branches): ``Step`` would be chosen anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from time import perf_counter, thread_time
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pipectl.capture import CapturedGraph, Cut, Slot
from pipectl.capture.batch import Reader
from pipectl.capture.slices import Span, batch_dimension
from pipectl.lanes import Lane, TransferKind
from pipectl.runtime.device import Device
from pipectl.runtime.diagnosis import find_not_finite
from pipectl.runtime.layout import Tensors
from pipectl.runtime.reduction import StageReduction
from pipectl.runtime.segment import MicroBatch
from pipectl.runtime.stage import Stage
from pipectl.runtime.step import Arrived, Step, StepRun, lane_of
from pipectl.runtime.transport import Transport
from pipectl.runtime.work_clock import WorkClock
from pipectl.schedule import Actions, Channel, Kind
from pipectl.watch.board import Board, row_record, wait_record

_HALVES = (TransferKind.SAVED, TransferKind.WEIGHT)
"""Messages between the two ranks of a stage, which takes them itself."""
_KINDS = [(kind, kind.name, kind.is_compute and kind is not Kind.UPDATE) for kind in Kind]
"""By number: a kind, its name, and whether the stage does it."""
_READING = (Kind.FORWARD, Kind.EVALUATE)


class Slicing:
    """Cuts and joins the values of one graph."""

    def __init__(self, graph: CapturedGraph) -> None:
        nodes = {node.name: node for node in graph.operators}
        self._dimension = cache(lambda value: batch_dimension(graph, nodes[value]))

    def part(self, results: Tensors, origin: int, span: Span, *, leads: bool) -> Tensors:
        """Some samples of the results of a replica.

        Args:
            origin: first sample of the results.
            span: samples to take, counted from the first sample of the micro-batch.
            leads: whether to include values that all samples share.
        """
        return {
            slot: None if tensor is None else self._narrowed(slot, tensor, origin, span, leads)
            for slot, tensor in results.items()
        }

    def joined(self, arrived: Sequence[Arrived]) -> Tensors:
        """The samples that arrived from all replicas, joined."""
        if len(arrived) == 1 and arrived[0].span.is_whole:
            return arrived[0].tensors
        if all(each.span.is_whole for each in arrived):
            return {slot: tensor for each in arrived for slot, tensor in each.tensors.items()}
        parts: dict[Slot, list[Tensor]] = {}
        for each in sorted(arrived, key=lambda item: item.span):
            for slot, tensor in each.tensors.items():
                tensors_of_slot = parts.setdefault(slot, [])
                if tensor is not None:
                    tensors_of_slot.append(tensor)
        return {slot: self._join(slot, tensors) for slot, tensors in parts.items()}

    def _narrowed(
        self, slot: Slot, tensor: Tensor, origin: int, span: Span, leads: bool
    ) -> Tensor | None:
        dim = self._dimension(slot.value)
        if dim is None:
            return tensor if leads else None
        if tensor.shape[dim] == span.size:
            return tensor
        return tensor.narrow(dim, span.start - origin, span.size).contiguous()

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
    """One operation of a program: an action, or a part of a message, copy or sum.

    Args:
        execute: does it; rows that differ only in their micro-batch share it.
        micro_batch: its micro-batch.
        activity: what the rank does, for monitoring.
        wait: what it waits for, for monitoring; empty if it waits for no other rank.
        computes: whether it is work of a stage, after which messages and sums advance.
    """

    execute: Execute
    micro_batch: MicroBatch
    activity: bytes
    wait: bytes
    computes: bool


class Copy(NamedTuple):
    """Samples that a stage on this rank takes over a channel from another stage on this rank.

    Args:
        leads: whether to include values that all samples share.
    """

    channel: int
    span: Span
    leads: bool


class Form(NamedTuple):
    """What a row does for any micro-batch, and all that is needed to bind it.

    Args:
        is_last: of forwards and evaluations, whether no later one reads the micro-batch; of
            backwards, whether none comes before the sum of gradients.
        leads: of messages, whether they include values that all samples share.
        copies: of the results.
    """

    kind: Kind
    stage: int
    channel: int
    span: Span
    is_last: bool
    leads: bool
    copies: tuple[Copy, ...]


Execute = Callable[[StepRun, MicroBatch], None]
Content = Callable[[StepRun], Tensors]
Deliver = Callable[[StepRun, MicroBatch, Tensors], None]


class Engine:
    """Runs the steps of one rank.

    Args:
        stages: the rank's stages by index.
        cut: of the training or evaluation graph; of any batch size.
        reductions: of the stages that have replicas.
        graphs: by the shape of a micro-batch, if there are several.

    Attributes:
        stages: as given.
        on_results: called with (micro-batch, stage, results, find) after every training forward;
            ``find`` says what computed the first value that is not finite.
        on_evaluated: called with (span, results, targets) on the rank that computes the loss of
            an evaluation.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        cut: Cut,
        transport: Transport,
        device: Device,
        board: Board,
        reductions: Mapping[int, StageReduction] | None = None,
        graphs: Mapping[tuple[int, int], CapturedGraph] | None = None,
    ) -> None:
        self.cut = cut
        self.stages = stages
        self._slicing = Slicing(cut.graph)
        self.reductions = dict(reductions or {})
        self._transport = transport
        self.device, self.board = device, board
        self._loss = Slot(cut.graph.loss)
        self._graphs = graphs or {}
        self._readers: dict[tuple[int, int], Reader] = {}
        self._programs: WeakKeyDictionary[Step, list[Row]] = WeakKeyDictionary()
        self._bound: WeakKeyDictionary[Step, dict[Form, Execute]] = WeakKeyDictionary()
        self.on_results: Callable[[int, int, Tensors, Callable[[], str]], None] | None = None
        self.on_evaluated: Callable[[Span, Tensors, Any], None] | None = None

    def run(self, run: StepRun, parts: Iterable[tuple[Actions, int]] | None = None) -> None:
        """Execute a step.

        Args:
            parts: consecutive rows, each with the number to add to their micro-batches; by default
                those of the step.
        """
        step = run.step
        for reduction in self.reductions.values():
            reduction.begin(len(step.sizes))
        if parts is None:
            if step not in self._programs:
                self._programs[step] = self._bind(step, step.actions)
            self._run_rows(run, self._programs[step], step.actions)
            return
        for actions, more in parts:
            shifted = actions.shifted(more)
            self._run_rows(run, self._bind(step, shifted), shifted)

    def _run_rows(self, run: StepRun, rows: Sequence[Row], actions: Actions) -> None:
        work_clock = self.device.work_clock
        if run.recording is not None:
            run.recording.expect(actions.rows)
            if work_clock is not None:
                work_clock.compare()
        begin, awaits, advance = self.board.begin, self.board.awaits, self._transport.advance
        reductions = list(self.reductions.values())
        for execute, micro_batch, activity, wait, computes in rows:
            start = perf_counter()
            begin(activity)
            if wait:
                awaits(wait)
            if computes:
                run.outbox = 0, {}  # earlier results are sent, or held by their send
                before_s = thread_time()
            execute(run, micro_batch)
            end = perf_counter()
            if run.recording is not None:
                run.recording.add(start, end)
            if computes:
                run.called_s += end - start
                run.called_cpu_s += thread_time() - before_s
                advance()
                for reduction in reductions:
                    reduction.advance()
        if work_clock is not None:
            self._read_work(run, work_clock)

    def _read_work(self, run: StepRun, work_clock: WorkClock) -> None:
        """Take over how long the accelerator worked, and when, if the step is recorded."""
        recording = run.recording
        intervals = work_clock.read(wait=recording is not None)
        run.worked_s += sum(end_s - start_s for _, start_s, end_s in intervals)
        if recording is not None:
            recording.correct(intervals)
            work_clock.forget()

    def _bind(self, step: Step, actions: Actions) -> list[Row]:
        """The rows of some actions of a step, bound to what they need."""
        program: list[Row] = []
        bound = self._bound.setdefault(step, {})
        read: set[int] = set()  # by rows after the current one
        for row in reversed(actions.rows.tolist()):
            code, stage, number, channel, start, stop, age = row
            kind, name, computes = _KINDS[code]
            weights = channel >= 0 and step.channels[channel].kind is TransferKind.WEIGHT
            span = Span.of(0) if number < 0 or weights else step.sizes[number]
            if start >= 0:
                span = span._replace(start=start, stop=stop)
            copies: tuple[Copy, ...] = ()
            is_last, leads, wait = False, False, b""
            if channel >= 0:
                leads = step.heads.get((channel, number)) == span.start
                if kind in (Kind.SEND_WAIT, Kind.RECEIVE_WAIT):
                    wait = _wait(step.channels[channel], kind, number)
            elif kind in _READING:
                is_last, copies = number not in read, _copies(step, kind, stage, number)
                read.add(number)
            elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                copies = _copies(step, kind, stage, number)
                is_last = kind is Kind.BACKWARD and step.closing.get(stage) == number
            form = Form(kind, stage, channel, span, is_last, leads, copies)
            if form not in bound:
                execute = self._bind_form(step.channels, form)
                bound[form] = self._timed(execute) if computes else execute
            activity = row_record(name, stage, number)
            micro_batch = MicroBatch(number, span, age=age)
            program.append(Row(bound[form], micro_batch, activity, wait, computes))
        return program[::-1]

    def _timed(self, execute: Execute) -> Execute:
        """Measures on an accelerator what it computes."""
        work_clock = self.device.work_clock
        if work_clock is None:
            return execute

        def timed(run: StepRun, micro_batch: MicroBatch) -> None:
            work_clock.begin(-1 if run.recording is None else run.recording.count)
            execute(run, micro_batch)
            work_clock.end()

        return timed

    def _bind_form(self, channels: Sequence[Channel], form: Form) -> Execute:
        kind, index, stages, reductions = form.kind, form.stage, self.stages, self.reductions
        match kind:
            case Kind.FORWARD | Kind.EVALUATE:
                return self._bind_forward(channels, form)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                return self._bind_backward(channels, form)
            case Kind.BACKWARD_WEIGHT:
                return lambda _, batch: stages[index].finish_backward(batch.number)
            case Kind.RECOMPUTE:
                return lambda _, batch: stages[index].recompute(batch)
            case Kind.OFFLOAD_START | Kind.OFFLOAD_WAIT | Kind.FETCH_START | Kind.FETCH_WAIT:
                return lambda _, batch: stages[index].saved[batch.number].move(kind)
            case Kind.REDUCE_START:
                return lambda *_: reductions[index].start()
            case Kind.REDUCE_WAIT:
                return lambda *_: reductions[index].finish()
            case Kind.UPDATE:
                return partial(self._update, index)
            case Kind.SEND_START | Kind.SEND_WAIT:
                return self._bind_send(channels[form.channel], form)
        return self._bind_receive(channels[form.channel], form)

    def _bind_forward(self, channels: Sequence[Channel], form: Form) -> Execute:
        index, span, trains = form.stage, form.span, form.kind is Kind.FORWARD
        stage, loss_slot = self.stages[index], self._loss
        take_inputs = self._bind_inputs(stage, trains, form)
        deliver = self._bind_delivery(channels, form)

        def forward(run: StepRun, micro_batch: MicroBatch) -> None:
            inputs = take_inputs(run, micro_batch)
            results = stage.forward(*inputs)
            loss = results.get(loss_slot)
            if loss is not None:
                run.losses.append(loss)
            if self.on_results is not None:
                find = partial(find_not_finite, stage, *inputs)
                self.on_results(micro_batch.number, index, results, find)
            deliver(run, micro_batch, results)

        def evaluate(run: StepRun, micro_batch: MicroBatch) -> None:
            on_evaluated = self.on_evaluated if index == self.cut.loss_stage else None
            targets = None
            if run.loads_for_others or on_evaluated is not None:
                targets = run.load(micro_batch.number, span)[1]
            inputs = take_inputs(run, micro_batch)
            results = stage.evaluate(*inputs)
            if on_evaluated is not None:
                on_evaluated(span, {**inputs[2], **results}, targets)
            deliver(run, micro_batch, results)

        return forward if trains else evaluate

    def _bind_inputs(
        self, stage: Stage, trains: bool, form: Form
    ) -> Callable[[StepRun, MicroBatch], tuple[MicroBatch, dict[str, Tensor], Tensors]]:
        """The arguments of a forward: its micro-batch, tensors of the batch, received values."""
        index, span, is_last_reader = form.stage, form.span, form.is_last
        size, bring, joined = span.size, self.device.bring, self._slicing.joined
        draws, names = stage.draws(trains, span), stage.inputs(trains, span)
        has_loss = index == self.cut.loss_stage
        reader = None
        if names:
            if span.shape not in self._readers:
                graph = self._graphs.get(span.shape, self.cut.graph)
                self._readers[span.shape] = Reader(graph, training=trains, length=span.length)
            reader = self._readers[span.shape]

        def take_inputs(
            run: StepRun, micro_batch: MicroBatch
        ) -> tuple[MicroBatch, dict[str, Tensor], Tensors]:
            number = micro_batch.number
            if draws:
                micro_batch = micro_batch._replace(seed=run.seed_of(number))
            arrived = joined(run.inbox.pop((False, index, number), ()))
            known = {} if reader is None else reader.read(run.load(number, span))
            if has_loss:
                run.compare_readings(number)
            if is_last_reader:
                run.drop(number)
            if reader is not None:
                reader.check(known, size, names)
            return micro_batch, {name: bring(known[name]) for name in names}, arrived

        return take_inputs

    def _bind_backward(self, channels: Sequence[Channel], form: Form) -> Execute:
        index, is_last, joined = form.stage, form.is_last, self._slicing.joined
        stage, deliver = self.stages[index], self._bind_delivery(channels, form)
        has_loss = index == self.cut.loss_stage
        arms = is_last and stage.adds_once  # else a gradient may grow after its hook is called

        def backward(run: StepRun, micro_batch: MicroBatch) -> None:
            number = micro_batch.number
            if has_loss:
                run.compare_readings(number)
            gradients = joined(run.inbox.pop((True, index, number), ()))
            if arms:
                self.reductions[index].arm()
            weight = run.weights[number] if has_loss else None
            results = stage.backward(micro_batch, gradients, weight, run.scale)
            deliver(run, micro_batch, results)

        return backward

    def _bind_delivery(self, channels: Sequence[Channel], form: Form) -> Deliver:
        """Keeps results for the sends that follow; copies them to stages on this rank at once."""
        first, copies = form.span.start, []
        for number, span, leads in form.copies:
            channel = channels[number]
            key = channel.kind is TransferKind.GRADIENT, channel.target_stage
            copies.append((*key, span, self._bind_content(lane_of(channel), span, leads)))

        def deliver(run: StepRun, micro_batch: MicroBatch, results: Tensors) -> None:
            run.outbox = first, results
            for returns, target, span, content in copies:
                arrived = run.inbox.setdefault((returns, target, micro_batch.number), [])
                arrived.append(Arrived(span, content(run)))

        return deliver

    def _bind_content(self, lane: Lane, span: Span, leads: bool) -> Content:
        """Select the content of a message from the results of the last computation."""
        slots, is_whole, part = self.cut.lanes[lane], span.is_whole, self._slicing.part

        def content(run: StepRun) -> Tensors:
            origin, results = run.outbox
            tensors = {slot: results.get(slot) for slot in slots}
            return tensors if is_whole else part(tensors, origin, span, leads=leads)

        return content

    def _update(self, stage: int, run: StepRun, micro_batch: MicroBatch) -> None:
        run.outbox = 0, {}
        run.outcome = run.update(run, stage, micro_batch.number)
        self._transport.advance()

    def _bind_send(self, end: Channel, form: Form) -> Execute:
        lane, channel, shape = lane_of(end), form.channel, form.span.shape
        line = self._transport.line(lane, end.target_rank)

        def finish_send(run: StepRun, micro_batch: MicroBatch) -> None:
            line.finish_send(run.sends.pop((channel, micro_batch.number)))

        if form.kind is Kind.SEND_WAIT:
            return finish_send
        content = self._bind_content(lane, form.span, form.leads)

        def start_send(run: StepRun, micro_batch: MicroBatch) -> None:
            number = micro_batch.number
            run.sends[channel, number] = line.start_send(number, shape, content(run))

        def send_results(run: StepRun, micro_batch: MicroBatch) -> None:
            number, (_, results) = micro_batch.number, run.outbox
            run.sends[channel, number] = line.start_send(number, shape, results)

        def send_weights(run: StepRun, micro_batch: MicroBatch) -> None:
            number, weights = micro_batch.number, self.stages[form.stage].weights()
            run.sends[channel, number] = line.start_send(number, shape, weights)

        if lane.kind is TransferKind.WEIGHT:
            return send_weights
        return send_results if form.span.is_whole else start_send

    def _bind_receive(self, end: Channel, form: Form) -> Execute:
        lane, channel, span, shape = lane_of(end), form.channel, form.span, form.span.shape
        line = self._transport.line(lane, end.source_rank)
        returns, target = lane.kind is TransferKind.GRADIENT, lane.target

        def start_receive(run: StepRun, micro_batch: MicroBatch) -> None:
            number = micro_batch.number
            run.receives[channel, number] = line.start_receive(number, shape)

        def finish_receive(run: StepRun, micro_batch: MicroBatch) -> None:
            number = micro_batch.number
            tensors = line.finish_receive(run.receives.pop((channel, number)))
            run.inbox.setdefault((returns, target, number), []).append(Arrived(span, tensors))

        def finish_half(run: StepRun, micro_batch: MicroBatch) -> None:
            tensors = line.finish_receive(run.receives.pop((channel, micro_batch.number)))
            if lane.kind is TransferKind.SAVED:  # the forward may run again here
                micro_batch = micro_batch._replace(seed=run.seed_of(micro_batch.number))
            self.stages[form.stage].arriving(micro_batch, tensors)

        if form.kind is Kind.RECEIVE_START:
            return start_receive
        return finish_half if lane.kind in _HALVES else finish_receive


def _copies(step: Step, kind: Kind, stage: int, number: int) -> tuple[Copy, ...]:
    carried = TransferKind.ACTIVATION if kind in _READING else TransferKind.GRADIENT
    return tuple(
        Copy(channel, spans[number], step.heads.get((channel, number)) == spans[number].start)
        for channel, spans in step.local.get((carried, stage), ())
        if number in spans
    )


def _wait(channel: Channel, kind: Kind, number: int) -> bytes:
    words = f"{channel.kind}s" if number < 0 else f"{channel.kind} {number}"
    if kind is Kind.SEND_WAIT:
        peer = channel.target_rank
        return wait_record(f"rank {peer} to take {words} of stage {channel.source_stage}", peer)
    peer = channel.source_rank
    return wait_record(f"{words} of stage {channel.source_stage} from rank {peer}", peer)
