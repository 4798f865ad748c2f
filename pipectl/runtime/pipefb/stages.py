"""The two halves of a stage: one rank runs its forwards, another its backwards and updates.

What autograd saves in a forward is taken out of its graph and sent, each memory once. The
backward's rank runs through a graph of its own, which was recorded with numbers in the place of
saved tensors, or computes the forward again from what the first one started it from. Weights return
after an update.

Once for every size, in the warm-up pass, the forward's rank announces what the stage's code was
called with, what autograd saved, and what graph it made. The other records its graph from the same
call and compares: kernels that differ on the two ranks show here and not in wrong gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.autograd.graph import saved_tensors_hooks

from pipectl.capture import Cut, Lane, Slot
from pipectl.capture.batch import spared
from pipectl.capture.opaque import Opaque
from pipectl.capture.slices import Rows
from pipectl.capture.stage import StageCode
from pipectl.errors import MismatchError, WorkerError
from pipectl.graph import TransferKind
from pipectl.plan import Stage as PlannedStage
from pipectl.runtime.device import Device
from pipectl.runtime.layout import Layout, Tensors
from pipectl.runtime.offload import StageOffload
from pipectl.runtime.pipefb.graph import Graph, nodes_behind
from pipectl.runtime.pipefb.messages import Contents, pack
from pipectl.runtime.saved_tensors import memory_of, unpack
from pipectl.runtime.stage import Code, Key, MicroBatch, Stage, Start
from pipectl.runtime.transport import Wire

_MAX_PLACES = 512
_TOGETHER = "set pipeline.backward to together: its backward has to stay with its forward"


@dataclass(frozen=True)
class Agreement:
    """What holds for all micro-batches of one size in one stage.

    Args:
        start: what the first forward started from, on the host.
        structure: of the autograd graph; see :attr:`Graph.structure`.
    """

    contents: Contents
    start: Start | None = None
    structure: tuple[str, ...] = ()

    def check(self, stage: int, graph: Graph) -> None:
        """Compare with the graph that another rank recorded.

        Raises:
            MismatchError: naming the first difference.
        """
        forms = [(view.dtype, view.sizes) for view in self.contents.views]
        difference = _difference("node", self.structure, graph.structure) or _difference(
            "saved tensor", forms, graph.saved
        )
        if difference:
            raise MismatchError(
                f"plan.json: stages[{stage}] has its backward on another rank, which does not get "
                f"the graph of its forward: {difference}",
                cure=_TOGETHER,
            )


@dataclass(frozen=True)
class Ends:
    """Of the messages between two halves, seen from one of them.

    Args:
        other_rank: of the other half.
        places: tensors that a message of saved values may have.
        recomputes: whether it holds only what a forward starts from.
        wire: for agreements; those of a stage arrive in the order in which they are sent.
    """

    other_rank: int
    places: int
    recomputes: bool
    wire: Wire


class _Half(Stage):
    """A stage whose forward and backward run on different ranks, on one of them.

    Args:
        ends: of the messages between the halves.
        others: see :class:`~pipectl.runtime.stage.Stage`.
    """

    def __init__(self, ends: Ends, *args: Any, offload: StageOffload | None = None) -> None:
        super().__init__(*args, offload=offload)
        self._ends = ends
        self._agreed: dict[Rows, Agreement] = {}

    def compile(self) -> None:
        """Compile the training code, which the other half can follow only by computing it again.

        Raises:
            MismatchError: it does not.
        """
        if not self._ends.recomputes:
            raise MismatchError(
                f"plan.json: stages[{self.index}] has its backward on another rank, which cannot "
                "follow what torch.compile makes of its forward",
                cure="set training.compile: false, or pipeline.backward: together",
            )
        super().compile()

    def _code(self, rows: Rows) -> Code:
        return self.segments[0].codes[True, rows]


class ForwardHalf(_Half):
    """Runs forwards and evaluations, with the weights that the other half sends."""

    def __init__(self, ends: Ends, *args: Any) -> None:
        super().__init__(ends, *args)
        self._leaving: dict[int, Tensors] = {}

    def forward(
        self, micro_batch: MicroBatch, inputs: Mapping[str, Tensor], arrived: Tensors
    ) -> Tensors:
        """Run the training forward of a micro-batch; what its backward needs waits to be sent."""
        assert micro_batch.age == 0  # it holds the weights that arrived last, and no others
        segment, code = self.segments[0], self._code(micro_batch.rows)
        if self._ends.recomputes:
            tensors = _start_of(code, inputs, arrived)
            results = super().forward(micro_batch, inputs, arrived)
            del segment.live[micro_batch.number]
            self._leave(micro_batch, code, tensors)
            return results
        is_first, start = micro_batch.rows not in self._agreed, None
        if is_first:
            start = Start(micro_batch, inputs, arrived, {}).map_tensors(_on_host)
        saved: list[Tensor] = []
        # The graph holds the hooks: with its own values in their list, nothing would free it.
        with saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), _refuse):
            results = super().forward(micro_batch, inputs, arrived)
        live = segment.live.pop(micro_batch.number)
        nodes = nodes_behind(live.roots.values()) if is_first else ()
        changing = {memory_of(buffer) for _, buffer in written_states(code)}
        tensors = [t.clone() if memory_of(t) in changing else t for t in saved]
        self._leave(micro_batch, code, tensors, start, [node.name() for node in nodes])
        return results

    def leaving(self, index: int) -> Tensors:
        """What the backward of a micro-batch needs, once."""
        return self._leaving.pop(index)

    def arriving(self, _: MicroBatch, message: Tensors) -> None:
        """Take the weights that the other half has updated.

        The parameters move there: messages of earlier micro-batches may still leave from the old.
        One with several uses stays, since these are leaves in its memory; it goes only with
        schedules that flush.
        """
        several = {slot.value for slot in self.uses}
        for slot, tensor in message.items():
            assert tensor is not None
            parameter = self.parameters[slot.value]
            if slot.value in several:
                parameter.data.copy_(tensor)
            else:
                parameter.data = tensor

    def forget(self) -> None:
        """Drop what is not sent."""
        super().forget()
        self._leaving.clear()

    def _leave(
        self,
        micro_batch: MicroBatch,
        code: Code,
        saved: Sequence[Tensor],
        start: Start | None = None,
        structure: Sequence[str] = (),
    ) -> None:
        """Put what a backward needs into a message that both halves understand.

        Raises:
            WorkerError: it lies otherwise in memory than that of an earlier micro-batch.
        """
        contents, message = pack(saved, lasting_states(code), self._ends.places)
        rows = micro_batch.rows
        if rows not in self._agreed:
            self._agreed[rows] = Agreement(contents, start, tuple(structure))
            self._ends.wire.send_object(self._agreed[rows], self._ends.other_rank, self.index)
        if contents != self._agreed[rows].contents:
            raise WorkerError(
                f"stage {self.index} saves other tensors for its backward than before, so that "
                "they cannot be sent to another rank",
                cure=_TOGETHER,
            )
        self._leaving[micro_batch.number] = {
            Slot(str(place)): tensor for place, tensor in enumerate(message)
        }


class BackwardHalf(_Half):
    """Runs backwards of what the other half sends, and sends it the updated weights.

    A micro-batch's backward runs through the recorded graph of the stage; if the stage
    recomputes, its forward runs here first. Weights of its forward that are older than the newest
    are kept here: they are the stage's :attr:`versions`. What arrives may be offloaded until then.
    """

    def __init__(self, ends: Ends, *args: Any, offload: StageOffload | None = None) -> None:
        super().__init__(ends, *args, offload=offload)
        self._graphs: dict[Rows, Graph] = {}
        self._arrived: dict[int, tuple[MicroBatch, list[Any]]] = {}

    def inputs(self, training: bool, rows: Rows) -> tuple[str, ...]:  # noqa: ARG002
        """None: it reads no batches."""
        return ()

    @property
    def reads(self) -> bool:
        """Never: what forwards read is not needed here."""
        return False

    def leaving(self, index: int) -> Tensors:  # noqa: ARG002
        """The parameters that training changes."""
        trained = sorted((n, p) for n, p in self.parameters.items() if p.requires_grad)
        return {Slot(name): parameter.detach() for name, parameter in trained}

    def arriving(self, micro_batch: MicroBatch, message: Tensors) -> None:
        """Take what the forward of a micro-batch has left for its backward.

        Raises:
            MismatchError: the code of this stage cannot have its backward here.
        """
        if micro_batch.rows not in self._agreed:
            agreed = self._ends.wire.receive_object(self._ends.other_rank, self.index)
            self._agreed[micro_batch.rows] = agreed
            if agreed.start is not None:
                self._graphs[micro_batch.rows] = self._graph(agreed, agreed.start)
        tensors: list[Any] = list(message.values())
        if self.offload is not None:
            pool = self.offload.pool(micro_batch.number, ())
            tensors = [None if tensor is None else pool.pack(tensor) for tensor in tensors]
        self._arrived[micro_batch.number] = micro_batch, tensors

    def recompute(self, micro_batch: MicroBatch) -> None:
        """Run the forward of a micro-batch, from what the other half started it from."""
        began, values = self._unpacked(micro_batch)
        left = iter([value.data for value in values])  # each may be written, also of one memory
        code, segment = self._code(began.rows), self.segments[0]
        inputs = {name: next(left) for name in code.stage.inputs}
        arrived: Tensors = {slot: next(left) for slot in values_received(code.stage)}
        buffers = {index: next(left) for index, _ in written_states(code)}
        version = None if self.versions is None else self.versions.of_age(micro_batch.age)
        start = Start(began, inputs, arrived, buffers, version)
        segment.live[micro_batch.number], _ = segment.run(start, again=True)

    def backward(
        self, micro_batch: MicroBatch, gradients: Tensors, weight: float, scale: float = 1.0
    ) -> Tensors:
        """Run the backward of a micro-batch; parameter gradients accumulate."""
        if self._ends.recomputes:
            return super().backward(micro_batch, gradients, weight, scale)
        began, values = self._unpacked(micro_batch)
        return self._graphs[began.rows].backward(values, gradients, weight, scale)

    def forget(self) -> None:
        """Drop gradients and unfinished micro-batches."""
        super().forget()
        self._arrived.clear()

    def _unpacked(self, micro_batch: MicroBatch) -> tuple[MicroBatch, list[Tensor]]:
        """What a micro-batch's forward had, and saved; weights among that at their age."""
        began, packed = self._arrived.pop(micro_batch.number)
        if self.offload is not None:
            self.offload.end(micro_batch.number)
        message = [None if item is None else unpack(item) for item in packed]
        states = lasting_states(self._code(began.rows))
        if self.versions is not None:
            used = self.versions.of_age(micro_batch.age).among(list(states.values()))
            states = dict(zip(states, used, strict=True))
        return began, self._agreed[began.rows].contents.unpack(message, states)

    def _graph(self, agreed: Agreement, start: Start) -> Graph:
        written = written_states(self._code(start.micro_batch.rows))
        start = start.map_tensors(lambda tensor: tensor.to(self.device))
        buffers = {index: buffer.clone() for index, buffer in written}
        graph = Graph(self.index, self.segments[0], replace(start, buffers=buffers))
        agreed.check(self.index, graph)
        return graph


def make_half(
    stage: PlannedStage,
    index: int,
    rank: int,
    wire: Wire,
    cuts: Mapping[Key, Cut],
    states: Mapping[str, Tensor],
    device: Device,
    precision: str,
    offload: StageOffload | None = None,
) -> Stage:
    """The half of a stage that a rank has.

    Args:
        index: of the stage.
        offload: takes what arrives at the backward's rank; None if it stays.
        wire, others: see :class:`Ends` and :class:`Stage`.

    Raises:
        MismatchError: the stage's backward cannot run on another rank.
    """
    training = {key: cut for key, cut in cuts.items() if key[0]}
    cut = next(iter(training.values()))
    if not stage.recompute:
        check_operators(cut, index)
    ranks = stage.ranks[0], stage.updating_ranks[0]
    is_forward = rank == ranks[0]
    ends = Ends(ranks[is_forward], places_of(cut, index), stage.recompute, wire)
    if is_forward:
        return ForwardHalf(ends, index, cuts, states, device, precision)
    return BackwardHalf(ends, index, training, states, device, precision, offload=offload)


def check_operators(cut: Cut, stage: int) -> None:
    """Refuse a stage whose autograd graph may differ from one micro-batch to the next.

    Raises:
        MismatchError: naming the operator.
    """
    for name in cut.operators(stage):
        target = cut.graph.operators[cut.graph.position[name]].target
        if isinstance(target, Opaque | HigherOrderOperator):
            what = repr(target) if isinstance(target, Opaque) else name
            raise MismatchError(
                f"plan.json: stages[{stage}] has its backward on another rank, but {what} runs "
                "code of its own, which may do otherwise from one micro-batch to the next",
                cure=_TOGETHER,
            )


def add_lanes(cut: Cut, states: Mapping[str, Tensor], lanes: list[Lane]) -> None:
    """Let a cut have the lanes between the halves of its stages, and empty ones a plan has."""
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
    """Tensors that a message of saved values may have; what is more travels with the small ones.

    Some operators save one tensor, few more than three.
    """
    return min(_MAX_PLACES, 8 + 3 * len(cut.operators(stage)))


def values_received(code: StageCode) -> list[Slot]:
    """The slots of the values that a stage receives, each once."""
    return list(dict.fromkeys(Slot(slot.value) for slot in code.received))


def written_states(code: Code) -> list[tuple[int, Tensor]]:
    """The state arguments that forwards write, with their indices."""
    written, slots = code.cut.graph.written, code.stage.states
    return [(i, code.arguments[i]) for i, slot in enumerate(slots) if slot.value in written]


def lasting_states(code: Code) -> dict[int, Tensor]:
    """The state arguments that no forward writes, by index: both halves have the same."""
    written = {index for index, _ in written_states(code)}
    return {index: t for index, t in enumerate(code.arguments) if index not in written}


def _start_of(code: Code, inputs: Mapping[str, Tensor], arrived: Tensors) -> list[Tensor]:
    """What a forward starts from, safe from what it writes."""
    copies = spared(code.cut.graph, inputs)
    batch = [copies[name] for name in code.stage.inputs]
    buffers = [buffer.clone() for _, buffer in written_states(code)]
    values = [*batch, *(arrived[slot] for slot in values_received(code.stage)), *buffers]
    return [tensor for tensor in values if tensor is not None]


def _on_host(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    layout = Layout.of(tensor)
    return layout.unflatten(layout.flatten(tensor.detach()).cpu().clone())


def _refuse(_: Any) -> NoReturn:
    raise AssertionError("the backward of this stage runs on another rank")


def _difference(what: str, expected: Sequence[Any], recorded: Sequence[Any]) -> str:
    if len(expected) != len(recorded):
        return f"{len(expected)} {what}s instead of {len(recorded)}"
    pairs = enumerate(zip(expected, recorded, strict=True))
    return next(
        (f"{what} {index} is {one} instead of {other}" for index, (one, other) in pairs
         if one != other), ""
    )  # fmt: skip
