"""PipeFB: stages whose forward and backward run on different ranks.

The forward's rank sends what its backward needs, each memory once: what autograd saves or, if the
stage recomputes, the inputs of the forward. The backward's rank runs an autograd graph of its own,
which was recorded with numbers in place of saved tensors, or computes the forward again. After an
update it sends the weights back.

Once per size, in the warm-up pass, the forward's rank announces the arguments of the stage's code,
what autograd saved, and the structure of the graph. The other rank records its graph from the same
call and compares: if the two ranks run different kernels, this raises an error instead of giving
wrong gradients.

Autograd saves many tensors that share memory: a value and its reshaped self, three views of one
projection. Each memory travels as bytes, from the first to the last that a saved tensor covers;
small ones travel in one vector. Parameters and constants, which both ranks have, are not sent::

    saved       w   x   x.view   q   k   v   3.0   mean
    message         [x]          [q  k  v]   [3.0  mean]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from pipectl.capture import Cut, Slot
from pipectl.capture.opaque import Opaque
from pipectl.capture.operators import runs_own_code
from pipectl.capture.randomness import replayed
from pipectl.capture.slices import Span
from pipectl.capture.stage import Receive
from pipectl.capture.tensors import storage_of
from pipectl.errors import MismatchError, WorkerError
from pipectl.lanes import Lane, TransferKind
from pipectl.plan import Stage as PlannedStage
from pipectl.runtime import casts
from pipectl.runtime.casts import SharedCasts
from pipectl.runtime.device import Device
from pipectl.runtime.layout import Layout, Tensors
from pipectl.runtime.offload import Mover
from pipectl.runtime.saved_tensors import bytes_of, hides_values, nodes_behind, unpack
from pipectl.runtime.segment import BoundCode, ForwardInputs, Live, MicroBatch, Segment
from pipectl.runtime.stage import Key, Stage
from pipectl.runtime.transport import Wire
from pipectl.torch_api import function_of

BUNDLED_BYTES = 8 << 10
"""Memories below this size travel together: a separate message would cost more than a copy."""
_ALIGNMENT = 16
_MAX_PLACES = 512
_TOGETHER = "set pipeline.backward to together: its backward has to stay with its forward"


class MessageView(NamedTuple):
    """The place of a tensor in a message.

    Args:
        number: of its memory; if negative, of the state ``~number``, which both ranks have.
        offset: of its first element, in elements after that of the memory or state.
        cast: the cast of the state in which it lies, if it does not lie in the state itself.
    """

    number: int
    layout: Layout
    offset: int
    cast: casts.View | None = None


class Agreement(NamedTuple):
    """What all messages of one size in one stage have in common; it follows from the stage's code.

    Args:
        views: of every tensor in the messages, in order.
        sizes: bytes of every memory in the messages.
        forward: the inputs of the first one, on the host; None if the stage recomputes.
        structure: of the autograd graph; see :attr:`Graph.structure`.
    """

    views: tuple[MessageView, ...]
    sizes: tuple[int, ...]
    forward: ForwardInputs | None = None
    structure: tuple[str, ...] = ()

    def unpack(
        self,
        message: Sequence[Tensor | None],
        states: Mapping[int, Tensor],
        shared: SharedCasts,
    ) -> list[Tensor]:
        """The tensors of a message.

        Args:
            states: the arguments that both ranks have, by index.
            shared: the casts of these on this rank.
        """
        bundle, *large = message
        alone = dict(zip(_large(self.sizes, len(message)), large, strict=False))
        memories, start = [], 0
        for number, size in enumerate(self.sizes):
            memory = alone.get(number)
            if memory is None:
                assert bundle is not None
                memory = bundle[start : start + size].clone()
                start += size
            memories.append(memory)

        def base(view: MessageView) -> Tensor:
            if view.number >= 0:
                return memories[view.number]
            state = states[~view.number]
            return state.detach() if view.cast is None else shared.again(state, view.cast)

        return [view.layout.view(base(view), view.offset) for view in self.views]

    def check(self, stage: int, graph: Graph) -> None:
        """Compare with the graph that another rank recorded.

        Raises:
            MismatchError: naming the first difference.
        """
        forms = [(view.layout.dtype, view.layout.sizes) for view in self.views]
        pairs = ("node", self.structure, graph.structure), ("saved tensor", forms, graph.saved)
        for what, expected, recorded in pairs:
            difference = f"{len(expected)} {what}s instead of {len(recorded)}"
            if len(expected) == len(recorded):
                both = enumerate(zip(expected, recorded, strict=True))
                differing = (f"{what} {i} is {one} instead of {two}" for i, (one, two) in both
                             if one != two)  # fmt: skip
                difference = next(differing, "")
            if difference:
                raise MismatchError(
                    f"plan.json: stages[{stage}] has its backward on another rank, which does not "
                    f"get the graph of its forward: {difference}",
                    hint=_TOGETHER,
                )


def pack(
    tensors: Sequence[Tensor], states: Mapping[int, Tensor], shared: SharedCasts, places: int
) -> tuple[Agreement, list[Tensor | None]]:
    """The views of a message's tensors, and the vectors to send, by place; the small ones first.

    Args:
        states: the arguments that both ranks have, by index.
        shared: the casts of these, which both ranks can make.
        places: how many tensors a message may have.

    Raises:
        WorkerError: a message cannot carry a tensor of this kind.
    """
    # The memory of a conjugate or negative view holds other values.
    tensors = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
    known: dict[int, tuple[int, Tensor, casts.View | None]] = {}
    for index, state in states.items():
        known[storage_of(state)] = ~index, state, None
        for view, cast in shared.made_of(state).items():
            known[storage_of(cast)] = ~index, cast, view
    extents: dict[int, tuple[int, int]] = {}
    memories: dict[int, Tensor] = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise WorkerError(
                f"a backward needs a tensor of layout {tensor.layout} and type {tensor.dtype}, "
                "which cannot be sent to another rank",
                hint="set pipeline.backward to together",
            )
        memory = storage_of(tensor)
        if memory not in known:
            start, stop = _extent(tensor)
            first, last = extents.get(memory, (start, stop))
            extents[memory] = min(first, start), max(last, stop)
            memories.setdefault(memory, bytes_of(tensor.untyped_storage()))
    vectors = [memories[memory][slice(*extent)] for memory, extent in extents.items()]
    numbers = {memory: number for number, memory in enumerate(extents)}
    views = []
    for tensor in tensors:
        memory, offset, of = storage_of(tensor), int(tensor.storage_offset()), None
        if memory in known:
            number, base, of = known[memory]
            offset -= int(base.storage_offset())
        else:
            number = numbers[memory]
            offset -= extents[memory][0] // tensor.itemsize
        views.append(MessageView(number, Layout.exactly(tensor), offset, of))
    sizes = tuple(vector.numel() for vector in vectors)
    large = _large(sizes, places)
    small = [vector for number, vector in enumerate(vectors) if number not in large]
    message = [torch.cat(small) if small else None, *(vectors[number] for number in large)]
    return Agreement(tuple(views), sizes), message


def _large(sizes: Sequence[int], places: int) -> list[int]:
    return [number for number, size in enumerate(sizes) if size >= BUNDLED_BYTES][: places - 1]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its memory from its first to past its last element; aligned for all types."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in pairs) + 1 if tensor.numel() else 0
    return start - start % _ALIGNMENT, start + reach * tensor.itemsize


class Graph(Live):
    """The autograd graph of a stage at one size, without its values.

    The stage's code runs once, on the arguments of the other rank's first forward. Instead of a
    tensor, autograd saves the tensor's number; in the backward of a micro-batch, the number gives
    the value. Parameters are the real ones, so gradients accumulate in them.

    Args:
        forward: the inputs of one of the whole stage, which is its only segment.

    Attributes:
        saved: type and sizes of every tensor that autograd would have saved, in order.
        structure: names of all nodes, in an order that depends on the graph alone.
        values, seed: of the micro-batch whose backward is next; values in order.

    Raises:
        MismatchError: an autograd function keeps values in attributes.
    """

    is_lasting = True

    def __init__(self, stage: int, segment: Segment, forward: ForwardInputs) -> None:
        self.values: list[Tensor | None] = []
        self.seed = 0
        self.saved: list[tuple[torch.dtype, tuple[int, ...]]] = []
        with saved_tensors_hooks(self._pack, self._unpack):
            live, _ = segment.run(forward, again=True)
        super().__init__(**vars(live))
        nodes = nodes_behind(self.edges)
        self.structure = [node.name() for node in nodes]
        _check_functions(stage, nodes)
        self._is_read_once = all(_is_read_once(node) for node in nodes)

    def backward(
        self, leaves: Iterable[Tensor], gradients: Tensors, weight: float | None, scale: float
    ) -> Tensors:
        """Run the backward of the micro-batch with :attr:`values`, and drop them."""
        with replayed(self.seed):
            returned = dict(super().backward(leaves, gradients, weight, scale))
        self.values = []
        self.caught.clear()
        return returned

    def _pack(self, tensor: Tensor) -> int:
        self.saved.append((tensor.dtype, tuple(tensor.shape)))
        return len(self.saved) - 1

    def _unpack(self, number: int) -> Tensor:
        value = self.values[number]
        assert value is not None
        if self._is_read_once:
            self.values[number] = None  # frees its memory after this node
        return value


def _is_read_once(node: Node) -> bool:
    """Whether it reads each saved tensor once: true of all but the user's own functions."""
    function = function_of(node)
    return function is None or function.__module__ in (Receive.__module__, casts.__name__)


def _check_functions(stage: int, nodes: Sequence[Node]) -> None:
    """Refuse autograd functions that keep values in attributes, which cannot be sent."""
    for node in nodes:
        if hides_values(node):
            raise MismatchError(
                f"plan.json: stages[{stage}] has its backward on another rank, but "
                f"{node.name()} keeps more than numbers as attributes",
                hint="keep tensors with ctx.save_for_backward(); or set pipeline.recompute to "
                "all, or pipeline.backward to together",
            )


class _Half(Stage):
    """One half of a stage whose forward and backward run on different ranks.

    Args:
        wire: for agreements; those of a stage arrive in the order in which they are sent.
        other_rank: rank of the other half.
        others: see :class:`~pipectl.runtime.stage.Stage`.
    """

    def __init__(self, wire: Wire, other_rank: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (self._segment,) = self.segments
        self._wire, self._other_rank = wire, other_rank
        self._agreed: dict[Span, Agreement] = {}
        planned = next(iter(self._segment.codes.values()))
        self._places = places_of(planned.cut, self.index)
        self._graphs: dict[Span, Graph] = {}
        self._arrived: dict[int, tuple[MicroBatch, list[Any]]] = {}

    def _bound(self, span: Span) -> BoundCode:
        return self._segment.codes[span]

    def forget(self) -> None:
        """Drop gradients and unfinished micro-batches."""
        super().forget()
        self._arrived.clear()


class ForwardHalf(_Half):
    """Runs forwards and evaluations with the weights that the other half sends."""

    def forward(
        self, micro_batch: MicroBatch, inputs: Mapping[str, Tensor], arrived: Tensors
    ) -> Tensors:
        """Run the training forward of a micro-batch.

        Returns:
            The stage's results, and what its backward needs, by slot.
        """
        assert micro_batch.age == 0  # it holds only the newest weights
        number, bound = micro_batch.number, self._bound(micro_batch.span)
        if self._segment.recomputes:
            results = super().forward(micro_batch, inputs, arrived)
            kept = self._segment.kept.pop(number)
            assert isinstance(kept, ForwardInputs)
            return results | self._message(micro_batch, _tensors_of(kept, bound))
        is_first, forward = micro_batch.span not in self._agreed, None
        if is_first:
            forward = ForwardInputs(micro_batch, inputs, arrived, {}).map_tensors(_on_host)
        saved: list[Tensor] = []
        # The graph holds the hooks: if their list held its own values, nothing would free it.
        with saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), _refuse):
            results = super().forward(micro_batch, inputs, arrived)
        live = self._segment.kept.pop(number)
        assert isinstance(live, Live)
        nodes = nodes_behind(live.edges) if is_first else ()
        changing = {storage_of(buffer) for _, buffer in written_states(bound)}
        tensors = [t.clone() if storage_of(t) in changing else t for t in saved]
        structure = [node.name() for node in nodes]
        return results | self._message(micro_batch, tensors, forward, structure)

    def arriving(self, _: MicroBatch, message: Tensors) -> None:
        """Take the weights that the other half has updated.

        The parameters move to the received memory, since messages of earlier micro-batches may
        still be sent from the old. Parameters with several uses keep their memory, which their
        leaves share; only schedules that flush allow them.
        """
        self.casts.drop()
        several = {slot.value for slot in self.uses}
        for slot, tensor in message.items():
            assert tensor is not None
            parameter = self.parameters[slot.value]
            if slot.value in several:
                parameter.data.copy_(tensor)
            else:
                parameter.data = tensor

    def _message(
        self,
        micro_batch: MicroBatch,
        tensors: Sequence[Tensor],
        forward: ForwardInputs | None = None,
        structure: Sequence[str] = (),
    ) -> Tensors:
        """The message of what a backward needs, by slot; its memory layout must never change."""
        span, bound = micro_batch.span, self._bound(micro_batch.span)
        agreement, message = pack(tensors, lasting_states(bound), self.casts, self._places)
        if span not in self._agreed:
            self._agreed[span] = agreement._replace(forward=forward, structure=tuple(structure))
            self._wire.send_object(self._agreed[span], self._other_rank, self.index)
        if agreement[:2] != self._agreed[span][:2]:
            raise WorkerError(
                f"stage {self.index} saves other tensors for its backward than before, so that "
                "they cannot be sent to another rank",
                hint=_TOGETHER,
            )
        return {Slot(str(place)): tensor for place, tensor in enumerate(message)}


class BackwardHalf(_Half):
    """Runs backwards of what the other half sends, and sends it the updated weights.

    Older weights are kept here, in :attr:`versions`. Received values may be offloaded until their
    backward.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inputs = dict.fromkeys(self._inputs, ())  # what forwards read is not needed here

    def arriving(self, micro_batch: MicroBatch, message: Tensors) -> None:
        """Receive what the forward of a micro-batch sends for its backward.

        Raises:
            MismatchError: the backward of this stage's code cannot run on another rank.
        """
        span = micro_batch.span
        if span not in self._agreed:
            agreed = self._wire.receive_object(self._other_rank, self.index)
            self._agreed[span] = agreed
            if agreed.forward is not None:
                forward = agreed.forward.map_tensors(lambda tensor: tensor.to(self.device))
                buffers = {i: buffer.clone() for i, buffer in written_states(self._bound(span))}
                graph = Graph(self.index, self._segment, forward._replace(buffers=buffers))
                agreed.check(self.index, graph)
                self._graphs[span] = graph
        tensors: list[Any] = list(message.values())
        pool = self._pool(micro_batch.number, ())
        if pool is not None:
            tensors = [None if tensor is None else pool.pack(tensor) for tensor in tensors]
        self._arrived[micro_batch.number] = micro_batch, tensors

    def recompute(self, micro_batch: MicroBatch) -> None:
        """Run the forward of a micro-batch from the inputs that the other half sent."""
        began, values = self._unpacked(micro_batch)
        version = None if self.versions is None else self.versions.of_age(micro_batch.age)
        forward = _forward_of(values, began, self._bound(began.span))
        self._segment.kept[micro_batch.number] = forward._replace(version=version)
        super().recompute(micro_batch)

    def backward(
        self, micro_batch: MicroBatch, gradients: Tensors, weight: float | None, scale: float = 1.0
    ) -> Tensors:
        """Run the backward of a micro-batch; parameter gradients accumulate."""
        if not self._segment.recomputes:
            began, values = self._unpacked(micro_batch)
            graph = self._graphs[began.span]
            graph.values, graph.seed = list[Tensor | None](values), began.seed
            self._segment.kept[micro_batch.number] = graph
            del values
        return super().backward(micro_batch, gradients, weight, scale)

    def _unpacked(self, micro_batch: MicroBatch) -> tuple[MicroBatch, list[Tensor]]:
        """The received tensors of a micro-batch; weights among them at their age."""
        began, packed = self._arrived.pop(micro_batch.number)
        self.saved.pop(micro_batch.number, None)
        message = [None if item is None else unpack(item) for item in packed]
        states = lasting_states(self._bound(began.span))
        if self.versions is not None:
            used = self.versions.of_age(micro_batch.age).replaced_in(list(states.values()))
            states = dict(zip(states, used, strict=True))
        return began, self._agreed[began.span].unpack(message, states, self.casts)


def make_half(
    stage: PlannedStage,
    index: int,
    rank: int,
    wire: Wire,
    cuts: Mapping[Key, Cut],
    states: Mapping[str, Tensor],
    device: Device,
    precision: str,
    mover: Mover | None = None,
    *,
    compiles: bool = False,
) -> Stage:
    """The half of a stage that this rank has.

    Args:
        index: of the stage.
        mover: offloads what arrives at the backward's rank; None if it stays.
        compiles: whether torch.compile compiles the code of stages.
        wire, others: see :class:`_Half` and :class:`Stage`.

    Raises:
        MismatchError: the stage's backward cannot run on another rank.
    """
    training = {key: cut for key, cut in cuts.items() if key[0]}
    if not stage.recompute:
        check_operators(next(iter(training.values())), index)
        if compiles:
            raise MismatchError(
                f"plan.json: stages[{index}] has its backward on another rank, which cannot "
                "follow what torch.compile makes of its forward",
                hint="set training.compile: false, or pipeline.backward: together",
            )
    forward, backward = stage.ranks[0], stage.updating_ranks[0]
    shared = index, cuts if rank == forward else training, states, device, precision
    if rank == forward:
        return ForwardHalf(wire, backward, *shared, recompute=stage.recompute)
    return BackwardHalf(wire, forward, *shared, recompute=stage.recompute, mover=mover)


def check_operators(cut: Cut, stage: int) -> None:
    """Refuse a stage whose autograd graph may differ between micro-batches.

    Raises:
        MismatchError: naming the operator.
    """
    for name in cut.operators(stage):
        node = cut.graph.operators[cut.graph.position[name]]
        if runs_own_code(node):
            what = repr(node.target) if isinstance(node.target, Opaque) else name
            raise MismatchError(
                f"plan.json: stages[{stage}] has its backward on another rank, but {what} runs "
                "code of its own, which may differ between micro-batches",
                hint="plan the job again; or set pipeline.recompute to all, or pipeline.backward "
                "to together",
            )


def add_lanes(cut: Cut, states: Mapping[str, Tensor], lanes: list[Lane]) -> None:
    """Add the lanes between the halves of its stages to a cut, and the empty ones of a plan."""
    for lane in lanes:
        slots: list[Slot] = []
        if lane.kind is TransferKind.SAVED:
            slots = [Slot(str(place)) for place in range(places_of(cut, lane.source))]
        elif lane.kind is TransferKind.WEIGHT:  # the parameters that training changes
            trained = {
                state.name
                for placeholder, state in cut.graph.states.items()
                if state.kind == "parameter"
                and states[state.name].requires_grad
                and any(
                    cut.stage_of[u] == lane.source for u in cut.graph.users.get(placeholder, ())
                )
            }
            slots = [Slot(name) for name in sorted(trained)]
        cut.lanes.setdefault(lane, slots)


def places_of(cut: Cut, stage: int) -> int:
    """Tensors that a message of saved values may have; any others travel with the small ones.

    Most operators save one tensor, few more than three.
    """
    return min(_MAX_PLACES, 8 + 3 * len(cut.operators(stage)))


def written_states(bound: BoundCode) -> list[tuple[int, Tensor]]:
    """The state arguments that forwards write, with their indices."""
    written, slots = bound.cut.graph.written, bound.code.states
    return [(i, bound.arguments[i]) for i, slot in enumerate(slots) if slot.value in written]


def lasting_states(bound: BoundCode) -> dict[int, Tensor]:
    """The state arguments that no forward writes, by index: both halves have the same."""
    written = {index for index, _ in written_states(bound)}
    return {index: t for index, t in enumerate(bound.arguments) if index not in written}


def _tensors_of(forward: ForwardInputs, bound: BoundCode) -> list[Tensor]:
    """All inputs of a forward, in the order in which :func:`_forward_of` takes them."""
    batch = [forward.inputs[name] for name in bound.code.inputs]
    received = [forward.arrived[slot] for slot in _received(bound)]
    return [*batch, *received, *(forward.buffers[index] for index, _ in written_states(bound))]


def _forward_of(
    tensors: Iterable[Tensor], micro_batch: MicroBatch, bound: BoundCode
) -> ForwardInputs:
    """The forward with these inputs; they are writable, even if they share memory."""
    left = iter([tensor.data for tensor in tensors])
    inputs = {name: next(left) for name in bound.code.inputs}
    arrived: Tensors = {slot: next(left) for slot in _received(bound)}
    return ForwardInputs(
        micro_batch, inputs, arrived, {i: next(left) for i, _ in written_states(bound)}
    )


def _received(bound: BoundCode) -> list[Slot]:
    return list(dict.fromkeys(Slot(slot.value) for slot in bound.code.received))


def _on_host(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    layout = Layout.of(tensor)
    return layout.unflatten(layout.flatten(tensor.detach()).cpu().clone())


def _refuse(_: Any) -> NoReturn:
    raise AssertionError("the backward of this stage runs on another rank")
