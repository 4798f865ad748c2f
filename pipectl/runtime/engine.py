"""The engine: executes rank programs on tensors, the same ones the simulator executes on costs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pipectl.capture import CapturedGraph, Cut, Slot
from pipectl.capture.batch import Number, by_name, expected_of
from pipectl.capture.slices import Rows, Samples, count_of
from pipectl.graph import TransferKind
from pipectl.runtime.apart import BackwardHalf, ForwardHalf
from pipectl.runtime.device import Device
from pipectl.runtime.failure import Doing
from pipectl.runtime.layout import Tensors
from pipectl.runtime.passes import Loaded
from pipectl.runtime.reduction import Reducer
from pipectl.runtime.slicing import Piece, Slicing
from pipectl.runtime.stage import StageRuntime
from pipectl.runtime.step_input import StepInput, StepOutput, Update
from pipectl.runtime.transport import Message, Posted, Transport
from pipectl.runtime.vote import Origins
from pipectl.runtime.wiring import Range, Wiring
from pipectl.schedule import Action, Actions, Channel, Kind

_OFFLOAD = (Kind.OFFLOAD_START, Kind.OFFLOAD_WAIT, Kind.FETCH_START, Kind.FETCH_WAIT)
_BETWEEN_HALVES = (TransferKind.SAVED, TransferKind.WEIGHT)


class Engine:
    """Runs the programs of one rank.

    Args:
        stages: the rank's stages by index.
        cut: of the training or evaluation graph; any batch size serves.
        channels: what the channel column of a program refers to, unless a pass brings its own.
        reducer: sums gradients over replicas.
        graphs: by samples of a micro-batch, where they are several.
    """

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, StageRuntime],
        cut: Cut,
        channels: Sequence[Channel],
        transport: Transport,
        device: Device,
        doing: Doing,
        reducer: Reducer | None = None,
        graphs: Mapping[int, CapturedGraph] | None = None,
    ) -> None:
        self._rank = rank
        self._stages = stages
        self._cut = cut
        self._own_wiring = Wiring.plain(channels, rank)
        self._slicing = Slicing(cut.graph)
        self._reducer = reducer or Reducer(())
        self._transport = transport
        self._device = device
        self._board = doing.board
        self._loss = Slot(cut.graph.loss)
        self._graphs = graphs or {}
        self._expected = {
            graph: expected_of(graph) for graph in {cut.graph, *self._graphs.values()}
        }
        self.origins: Origins | None = None
        # Called with (samples, results, targets) where the loss of an evaluation is computed.
        self.on_evaluated: Callable[[int, Tensors, Any], None] | None = None
        self._handlers = self._handlers_by_kind()

    @property
    def loss_stage(self) -> int:
        """The stage that computes the loss."""
        return self._cut.loss_stage

    def run(self, actions: Actions, given: StepInput, update: Callable[[], None]) -> StepOutput:
        """Execute one body; ``update`` is called for its UPDATE."""
        return self.run_parts([(actions, 0)], given, lambda *_: update())

    def run_parts(
        self, parts: Iterable[tuple[Actions, int]], given: StepInput, update: Update
    ) -> StepOutput:
        """Execute rows that follow one another.

        Args:
            parts: rows, with what is to be added to their micro-batches.
        """
        self._given, self._out = given, StepOutput()
        self._sends: dict[tuple[int, int], Posted] = {}
        self._receives: dict[tuple[int, int], Posted] = {}
        self._arrived: dict[tuple[TransferKind, int, int], list[Piece]] = {}
        self._made: dict[tuple[TransferKind, int], Tensors] = {}
        self._origin: dict[tuple[TransferKind, int], int] = {}
        self._wiring = given.wiring or self._own_wiring
        self._loaded = Loaded(given.batches, given.pieces)
        for actions, more in parts:
            found = actions.shifted(more).rows
            if given.recording is not None:
                given.recording.expect(found)
            rows = found.tolist()
            self._loaded.expect(_reads(rows))
            for row in rows:
                self._execute(Action(*row), update)
        return self._out

    def _handlers_by_kind(self) -> dict[int, Callable[[Action], None]]:
        """What executes an action; updates are the caller's."""
        return {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.EVALUATE: self._evaluate,
            Kind.SEND_START: self._send_start,
            Kind.SEND_WAIT: self._send_wait,
            Kind.RECEIVE_START: self._receive_start,
            Kind.RECEIVE_WAIT: self._receive_wait,
            **dict.fromkeys(_OFFLOAD, self._offload),
            Kind.REDUCE_START: lambda action: self._reducer.start(action.stage),
            Kind.REDUCE_WAIT: lambda action: self._reducer.finish(action.stage),
        }

    def _execute(self, action: Action, update: Update) -> None:
        start = time.perf_counter()
        kind = Kind(action.kind)
        self._board.row(kind.name, action.stage, action.micro_batch)
        if kind.is_compute:
            self._made.clear()  # what was made before is sent, or waits with its send
        if action.kind == Kind.UPDATE:
            update(action, self._out)
        else:
            self._handlers[action.kind](action)
        self._record(action, start)

    def _record(self, action: Action, start: float) -> None:
        end = time.perf_counter()
        if self._given.recording is not None:
            self._given.recording.add(start, end)
        if Kind(action.kind).is_compute:
            self._out.busy_s += end - start if action.kind != Kind.UPDATE else 0.0
            self._transport.progress()
            self._reducer.advance()

    def _forward(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        runtime, size = self._stages[stage], self._samples(action)
        arrived = self._take(TransferKind.ACTIVATION, action)
        inputs = self._inputs(runtime, action)
        self._loaded.done(micro_batch)
        seed = self._given.seed_of(micro_batch)
        made = runtime.forward(micro_batch, size, seed, inputs, arrived, action.weight_version)
        if self._loss in made:
            loss = made[self._loss]
            assert loss is not None
            self._out.losses.append(loss)
        if self.origins is not None:
            self.origins.note(micro_batch, stage, made)
        self._deliver(TransferKind.ACTIVATION, action, made)

    def _recompute(self, action: Action) -> None:
        self._stages[action.stage].recompute(action.micro_batch, action.weight_version)

    def _backward(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        gradients = self._take(TransferKind.GRADIENT, action)
        if action.kind == Kind.BACKWARD and self._wiring.closing.get(stage) == micro_batch:
            self._reducer.arm(stage)
        ordered = dict(sorted(gradients.items(), key=self._latest_use, reverse=True))
        weight, scale = self._given.weights[micro_batch], self._given.scale
        made = self._stages[stage].backward(
            micro_batch, ordered, self._loss, weight, scale, action.weight_version
        )
        self._deliver(TransferKind.GRADIENT, action, made)

    def _backward_weight(self, action: Action) -> None:
        self._stages[action.stage].finish_backward(action.micro_batch)

    def _evaluate(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        runtime, size = self._stages[stage], self._given.sizes[micro_batch]
        arrived = self._take(TransferKind.ACTIVATION, action)
        inputs = self._inputs(runtime, action, training=False)
        made = runtime.evaluate(size, self._given.seed_of(micro_batch), inputs, arrived)
        if stage == self._cut.loss_stage and self.on_evaluated is not None:
            targets = self._loaded.part(micro_batch, Range())[1]
            self.on_evaluated(size, {**arrived, **made}, targets)
        self._loaded.done(micro_batch)
        self._deliver(TransferKind.ACTIVATION, action, made)

    def _deliver(self, kind: TransferKind, action: Action, made: Tensors) -> None:
        """Keep results for the sends that follow; hand them to stages on this rank at once."""
        self._made[kind, action.stage] = made
        self._origin[kind, action.stage] = max(0, action.start)
        for index, lane, carried in self._wiring.local_lanes:
            here = carried is None or action.micro_batch in carried
            if lane.kind is kind and lane.source == action.stage and here:
                rows = Range() if carried is None else carried[action.micro_batch]
                place = kind, lane.target, action.micro_batch
                found = self._message(action._replace(channel=index, start=rows[0], stop=rows[1]))
                self._arrived.setdefault(place, []).append(Piece(rows, found))

    def _message(self, action: Action) -> Tensors:
        """What a message holds of what its stage has just made."""
        lane = self._wiring.lanes[action.channel]
        place = lane.kind, action.stage
        made = {slot: self._made[place].get(slot) for slot in self._cut.lanes[lane]}
        if action.start < 0:
            return made
        leads = self._wiring.heads[action.channel, action.micro_batch] == action.start
        rows = Range(action.start, action.stop)
        return self._slicing.part(made, self._origin[place], rows, leads=leads)

    def _take(self, kind: TransferKind, action: Action) -> Tensors:
        """What arrived for a computation, from all stages and replicas."""
        place = kind, action.stage, action.micro_batch
        return self._slicing.joined(self._arrived.pop(place, []))

    def _send_start(self, action: Action) -> None:
        self._sends[action.channel, action.micro_batch] = self._transport.start_send(
            Message(self._wiring.lanes[action.channel], action.micro_batch),
            self._whole(action),
            self._wiring.channels[action.channel].target_rank,
            self._leaving(action),
        )

    def _send_wait(self, action: Action) -> None:
        channel = self._wiring.channels[action.channel]
        message, peer = _name_message(channel, action), channel.target_rank
        self._board.awaits(peer, f"rank {peer} to take {message} of stage {action.stage}")
        self._transport.finish_send(self._sends.pop((action.channel, action.micro_batch)))

    def _receive_start(self, action: Action) -> None:
        self._receives[action.channel, action.micro_batch] = self._transport.start_receive(
            Message(self._wiring.lanes[action.channel], action.micro_batch),
            self._whole(action),
            self._wiring.channels[action.channel].source_rank,
        )

    def _receive_wait(self, action: Action) -> None:
        lane, channel = self._wiring.lanes[action.channel], self._wiring.channels[action.channel]
        message, peer = _name_message(channel, action), channel.source_rank
        self._board.awaits(peer, f"{message} of stage {channel.source_stage} from rank {peer}")
        tensors = self._transport.finish_receive(
            Message(lane, action.micro_batch),
            channel.source_rank,
            self._receives.pop((action.channel, action.micro_batch)),
        )
        if lane.kind in _BETWEEN_HALVES:
            seed, size = self._given.seed_of(action.micro_batch), self._whole(action)
            self._half(action).arriving(action.micro_batch, size, seed, tensors)
            return
        place = lane.kind, action.stage, action.micro_batch
        piece = Piece(Range(action.start, action.stop), tensors)
        self._arrived.setdefault(place, []).append(piece)

    def _leaving(self, action: Action) -> Tensors:
        """What a message holds."""
        if self._wiring.lanes[action.channel].kind in _BETWEEN_HALVES:
            return self._half(action).leaving(action.micro_batch)
        return self._message(action)

    def _half(self, action: Action) -> ForwardHalf | BackwardHalf:
        half = self._stages[action.stage]
        assert isinstance(half, ForwardHalf | BackwardHalf)
        return half

    def _offload(self, action: Action) -> None:
        offload = self._stages[action.stage].offload
        assert offload is not None
        offload.run(Kind(action.kind), action.micro_batch)

    def _whole(self, action: Action) -> int:
        """Samples of the micro-batch that a message belongs to; 0 for weights."""
        weights = self._wiring.lanes[action.channel].kind is TransferKind.WEIGHT
        return 0 if weights else self._given.sizes[action.micro_batch]

    def _samples(self, action: Action) -> Samples:
        """Samples that an action computes."""
        whole = self._given.sizes[action.micro_batch]
        return whole if action.start < 0 else Rows(whole, action.start, action.stop)

    def _inputs(
        self, runtime: StageRuntime, action: Action, *, training: bool = True
    ) -> dict[str, Tensor]:
        samples = self._samples(action)
        names = runtime.inputs(training, samples)
        if not names:
            return {}
        wanted = Range(action.start, action.stop)
        graph = self._graphs.get(self._given.sizes[action.micro_batch], self._cut.graph)
        loaded = self._loaded.part(action.micro_batch, wanted)
        known = by_name(graph, loaded, training=training)
        target, whole = self._device.torch_device, isinstance(samples, int)
        for name, expected in self._expected[graph].items():
            if name in names or (whole and isinstance(expected, Number)):
                expected.check(name, known[name], count_of(samples), training=training)
        return {name: known[name].to(target) for name in names}

    def _latest_use(self, item: tuple[Slot, Any]) -> int:
        """Position of the last use of a value: autograd adds later uses first."""
        return self._cut.graph.last_use(item[0].value)


def _reads(rows: Sequence[Sequence[int]]) -> Counter[int]:
    """How many actions may read each loaded micro-batch."""
    return Counter(row[2] for row in rows if row[0] in (Kind.FORWARD, Kind.EVALUATE))


def _name_message(channel: Channel, action: Action) -> str:
    """``activation 5``, or ``weights`` of what belongs to all micro-batches."""
    return f"{channel.kind}{'s' if action.micro_batch < 0 else f' {action.micro_batch}'}"
