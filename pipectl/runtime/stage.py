"""One stage on its rank: parameters, and the forward and backward of its micro-batches.

A stage is a list of segments of its operators, in graph order; the segments compute the same as
separate stages on one rank. Most stages have one segment. Its forward keeps what autograd saves,
or its own inputs if the stage recomputes. Recomputation by segments (`recompute: blocks`) uses
several::

    forward     segment 0 -> 1 -> 2     each keeps its inputs
    recompute                     2
    backward                      2
                             1          forward again, then backward
                0                       forward again, then backward

While the backward of one segment runs, only the inputs of the others are in memory. Only the last
segment can be recomputed before the gradients of the stage's results arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge

from pipectl.capture import Cut, Slot, build_stage
from pipectl.capture.batch import copy_written_inputs
from pipectl.capture.casts import Casting
from pipectl.capture.graph import CapturedGraph, State
from pipectl.capture.randomness import SEEDERS
from pipectl.capture.regions import arithmetic
from pipectl.capture.slices import Span
from pipectl.capture.stage import Receive, StageCode
from pipectl.runtime.casts import SharedCasts
from pipectl.runtime.device import Device, move
from pipectl.runtime.layout import Tensors
from pipectl.runtime.offload import Mover
from pipectl.runtime.saved_tensors import SavedTensors, run_backward, unpack
from pipectl.runtime.stage_code import (
    WeightHalf,
    compile_stage,
    share_casts,
    split_backwards,
)
from pipectl.runtime.sums import GradientSums
from pipectl.runtime.versions import Version, Versions
from pipectl.runtime.written import StepWrites, copy_written, keep_written
from pipectl.torch_api import edge_of

Key = tuple[bool, Span]
"""(training, span): whether code is for training, and the samples that one call computes."""


class MicroBatch(NamedTuple):
    """The micro-batch of a computation.

    Args:
        span: samples to compute.
        seed: of (run, step, micro-batch), for random operators.
        age: of the weights, in updates.
    """

    number: int
    span: Span
    seed: int = 0
    age: int = 0


class Start(NamedTuple):
    """The inputs of a forward, which a recomputation uses again.

    Args:
        buffers: values before the forward of the buffers that it writes, by index of the state
            argument.
        version: of the weights; None if there is only one.
    """

    micro_batch: MicroBatch
    inputs: Mapping[str, Any]
    arrived: Mapping[Slot, Any]
    buffers: Mapping[int, Tensor]
    version: Version | None = None

    def map_tensors(self, change: Callable[[Any], Any]) -> Start:
        """A copy whose tensors are packed into a pool, or unpacked from one."""
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        arrived = {s: None if t is None else change(t) for s, t in self.arrived.items()}
        return self._replace(inputs=inputs, arrived=arrived)


@dataclass
class Live:
    """A micro-batch between its forward and its backward.

    It holds the edges at which the backward enters the graph, not the values there: only what the
    graph itself has saved stays in memory. The loss is small; its gradient has the same shape.

    Attributes:
        is_lasting: whether the graph is kept for further backwards.
    """

    roots: dict[Slot, GradientEdge]
    loss: Tensor | None
    caught: dict[Slot, Tensor | None]
    weight_half: WeightHalf | None
    version: Version | None
    is_lasting: ClassVar[bool] = False

    @property
    def edges(self) -> list[GradientEdge]:
        """All places at which the backward enters the graph."""
        loss = [] if self.loss is None else [edge_of(self.loss)]
        return [*self.roots.values(), *loss]

    def backward(
        self, leaves: Iterable[Tensor], gradients: Tensors, weight: float, scale: float
    ) -> Tensors:
        """Run the backward of the graph; returns the gradients of received values."""
        roots: list[Tensor | GradientEdge] = []
        seeds: list[Tensor] = []
        if self.loss is not None:
            roots.append(self.loss)
            form = tuple(self.loss.shape), self.loss.dtype, self.loss.device
            seeds.append(_seed(*form, scale, weight))
        for slot, gradient in gradients.items():
            root = self.roots.get(slot)
            if root is not None and gradient is not None:
                roots.append(root)
                seeds.append(gradient)
        if roots:
            later = () if self.weight_half is None else self.weight_half.gradients
            others = chain(seeds, gradients.values(), self.caught.values(), later)
            run_backward(roots, seeds, leaves, others, retain_graph=self.is_lasting)
        return self.caught


@lru_cache(16)
def _seed(
    sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, scale: float, weight: float
) -> Tensor:
    """The gradient of a loss; micro-batches with the same weight share it."""
    return torch.full(sizes, scale, dtype=dtype, device=device) * weight


@dataclass
class Code:
    """The code that a segment runs for micro-batches of one size.

    Args:
        arguments: the parameters and buffers that it is called with.
        received: slots that it reads, each with the slot of its message and whether it has a
            gradient.
        returning: slots of the gradients with which its backward begins, in the order in which
            autograd adds them.
        written: indices of the buffers that must not be written in place.
        draws: whether it has random operators, and so needs a seed.
    """

    stage: StageCode
    cut: Cut
    arguments: list[Tensor]
    received: list[tuple[Slot, Slot, bool]]
    returning: list[Slot]
    written: list[int]
    loss: Slot
    draws: bool


class Segment:
    """A part of a stage's operators, which run together.

    Args:
        number: index of the segment among the stages of the cuts.
        cuts: by span, for every size that it will compute.
        argument: returns a parameter or buffer that some code is called with.
        change: what to do to new code.
        recomputes: whether a forward keeps only its inputs.

    Attributes:
        leaves: states that get gradients in training.
        kept: what every micro-batch needs next: the inputs of a forward, the graph for its
            backward, or the second half of the backward.
    """

    def __init__(
        self,
        number: int,
        cuts: Mapping[Span, Cut],
        argument: Callable[[Cut, Slot], Tensor],
        device: torch.device,
        precision: str,
        change: Callable[[StageCode, CapturedGraph], StageCode],
        *,
        recomputes: bool,
    ) -> None:
        self.recomputes = recomputes
        self._arithmetic = arithmetic(precision, device)
        self._anchor = torch.zeros((), requires_grad=True)
        self.codes: dict[Span, Code] = {}
        for span, cut in cuts.items():
            graph = cut.graph
            code = change(build_stage(cut, number, span, device), graph)
            names = graph.written if recomputes else graph.rewritten
            assert isinstance(code.module, fx.GraphModule)
            self.codes[span] = Code(
                code,
                cut,
                [argument(cut, slot) for slot in code.states],
                [(s, Slot(s.value), graph.requires_grad[s.value]) for s in code.received],
                cut.returning(number),
                [index for index, slot in enumerate(code.states) if slot.value in names],
                Slot(graph.loss),
                any(node.target in SEEDERS for node in code.module.graph.nodes),
            )
        arguments = (t for code in self.codes.values() for t in code.arguments)
        trained = (tensor for tensor in arguments if tensor.requires_grad)
        self.leaves = list({id(tensor): tensor for tensor in trained}.values())
        self.kept: dict[int, Start | Live | WeightHalf] = {}
        self._splits = False
        self._weight_half = WeightHalf()

    def forward(self, start: Start, pool: SavedTensors | None) -> dict[Slot, Tensor]:
        """Run a training forward and keep what its backward needs; returns the results.

        Args:
            start: of the stage; the segment reads its part of it.
        """
        index = start.micro_batch.number
        if not self.recomputes:
            self.kept[index], results = self.run(start, again=False, pool=pool)
            return results
        code = self.codes[start.micro_batch.span]
        # The forward does not keep the memory of buffers: see keep_written().
        buffers = {index: code.arguments[index].detach() for index in code.written}
        inputs = {name: start.inputs[name] for name in code.stage.inputs}
        arrived = {source: start.arrived[source] for _, source, _ in code.received}
        start = start._replace(inputs=inputs, arrived=arrived, buffers=buffers)
        origin = start._replace(inputs=copy_written_inputs(code.cut.graph, inputs))
        self.kept[index] = origin if pool is None else origin.map_tensors(pool.pack)
        # Its graph ends here. Gradients stay enabled, since operators may choose their kernels by
        # whether their inputs have one.
        return self.run(start, again=False)[1]

    def recompute(self, index: int) -> None:
        """Run a forward again, just before its backward; buffers do not change."""
        start = self.kept.pop(index)
        assert isinstance(start, Start)
        self.kept[index], _ = self.run(start.map_tensors(unpack), again=True)

    def backward(
        self, index: int, gradients: Tensors, weight: float, scale: float
    ) -> tuple[Tensors, Version | None]:
        """Run the backward of a micro-batch; parameter gradients accumulate.

        Returns:
            Gradients of received values, and the version of the weights.
        """
        live = self.kept.pop(index)
        assert isinstance(live, Live)
        leaves = self.leaves if live.version is None else live.version.leaves.values()
        returned = live.backward(leaves, gradients, weight, scale)
        if live.weight_half is not None and live.weight_half.roots:
            self.kept[index] = live.weight_half
        return returned, live.version

    def finish_backward(self, index: int) -> None:
        """Run the second half of a backward: the deferred gradients of weights."""
        half = self.kept.pop(index, None)
        if half is not None:
            assert isinstance(half, WeightHalf)
            half.run()

    def run(
        self, start: Start, *, again: bool, pool: SavedTensors | None = None
    ) -> tuple[Live, dict[Slot, Tensor]]:
        """A training forward; if ``again``, it was run before and changes no buffer."""
        micro_batch, version = start.micro_batch, start.version
        code = self.codes[micro_batch.span]
        caught: dict[Slot, Tensor | None] = {}
        values: dict[Slot, Tensor] = {}
        for slot, source, has_gradient in code.received:
            tensor = start.arrived[source]
            values[slot] = (
                Receive.apply(self._anchor, tensor, caught, slot)  # type: ignore[no-untyped-call]
                if has_gradient
                else tensor
            )
        weight_half = None
        if self._splits:
            weight_half = self._weight_half = WeightHalf()
        states: Sequence[Tensor] = code.arguments
        if again:  # its writes to buffers are dropped
            states = [start.buffers.get(i, state) for i, state in enumerate(states)]
        elif code.written:
            states = copy_written(states, code.written)
        used = states if version is None else version.replaced_in(states)
        given = code, micro_batch.seed, used, start.inputs, values.values()
        if pool is None:
            results = self.call(*given)
        else:
            with pool.hooks():
                results = self.call(*given)
        if code.written and not again:
            keep_written(code.arguments, code.written, states)
        values.update(results)
        roots = {}
        for slot in code.returning:
            value = values.get(slot)
            if value is not None and value.requires_grad:
                roots[slot] = edge_of(value)
        return Live(roots, results.get(code.loss), caught, weight_half, version), results

    def call(
        self,
        code: Code,
        seed: int,
        states: Sequence[Tensor],
        inputs: Mapping[str, Tensor],
        received: Iterable[Any],
    ) -> dict[Slot, Tensor]:
        """Call a code; returns its results by slot."""
        batch, module = [inputs[name] for name in code.stage.inputs], code.stage.module
        run = module.forward if isinstance(module, fx.GraphModule) else module  # it has no hooks
        with self._arithmetic:
            results = run(seed, *states, *batch, *received)
        return dict(zip(code.stage.results, results, strict=True))

    def split_backwards(self) -> None:
        """Defer the gradients of weights of every backward to :meth:`finish_backward`."""
        self._splits = True
        for code in self.codes.values():
            states = code.cut.graph.states
            code.stage = split_backwards(code.stage, states, lambda: self._weight_half)


class Stage:
    """The part of the model that one stage computes.

    Args:
        index: of the stage.
        cuts: by (training, span), for every size that it will compute.
        states: the model's parameters and buffers by full name; those of this stage are moved
            to the device in place.
        precision: as in the spec.
        recompute: whether a forward keeps only its inputs, until :meth:`recompute`.
        firsts: the first operator of every segment but the first; several segments imply
            recomputation.
        mover: offloads what forwards keep; None if it stays.

    Attributes:
        cuts: as given.
        parameters, buffers: of the stage, by full name.
        uses: leaves in the memory of parameters with several uses, one per use.
        segments: in the order in which training runs them.
        versions: of the weights, if steps are not flushed; see :meth:`keep_versions`.
        casts: of the weights, which micro-batches share.
        saved: what forwards keep, by micro-batch, if it is offloaded.
        sums, writes: of a step, if its bits must not depend on replicas; see :meth:`reproduce`.
    """

    def __init__(
        self,
        index: int,
        cuts: Mapping[Key, Cut],
        states: Mapping[str, Tensor],
        device: Device,
        precision: str = "float32",
        *,
        recompute: bool = False,
        firsts: Sequence[str] = (),
        mover: Mover | None = None,
    ) -> None:
        self.index = index
        self._mover = mover
        self.cuts = cuts
        self.saved: dict[int, SavedTensors] = {}
        self.device, self.precision = device.torch_device, precision
        self.versions: Versions | None = None
        self.sums: GradientSums | None = None
        self.writes: StepWrites | None = None
        self.casts = SharedCasts()
        self._casting = Casting(precision, self.device)
        self._states = states
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self.uses: dict[Slot, Tensor] = {}
        self._constants: dict[str, Tensor] = {}
        training = {span: cut for (trains, span), cut in cuts.items() if trains}
        evaluating = {span: cut for (trains, span), cut in cuts.items() if not trains}
        inner = {span: cut.in_segments(index, firsts) for span, cut in training.items()}
        given = self.argument, self.device, precision
        again = recompute or bool(firsts)
        self.segments = [
            Segment(number, inner, *given, self.share_casts, recomputes=again)
            for number in range(index, index + len(firsts) + 1)
        ]
        self._evaluation = Segment(index, evaluating, *given, self.share_casts, recomputes=False)
        self._inputs: dict[Key, tuple[str, ...]] = {}
        for key in cuts:
            names = (name for code in self._codes(key) for name in code.stage.inputs)
            self._inputs[key] = tuple(dict.fromkeys(names))
        self._results: dict[Span, list[Slot]] = {}
        for span, cut in training.items():
            results = {slot for code in self._codes((True, span)) for slot in code.stage.results}
            self._results[span] = [slot for slot in cut.sent(index) if slot in results]

    def draws(self, training: bool, span: Span) -> bool:
        """Whether it draws random numbers, so that its micro-batches need a seed."""
        return any(code.draws for code in self._codes((training, span)))

    def inputs(self, training: bool, span: Span) -> tuple[str, ...]:
        """Names of the batch tensors this stage reads."""
        return self._inputs[training, span]

    def reads(self, *, training: bool) -> set[str]:
        """Names of the batch tensors that it reads of micro-batches of any shape."""
        return {n for key, names in self._inputs.items() if key[0] is training for n in names}

    def forward(
        self, micro_batch: MicroBatch, inputs: Mapping[str, Tensor], arrived: Tensors
    ) -> Tensors:
        """Run the training forward of a micro-batch and keep what its backward needs.

        Args:
            inputs: the batch tensors by name.
            arrived: activations by the slot of their message.

        Returns:
            The stage's results by slot.
        """
        version = None if self.versions is None else self.versions.of_age(micro_batch.age)
        pool = None
        if self._mover is not None:
            codes = (segment.codes[micro_batch.span] for segment in self.segments)
            states = [state for code in codes for state in code.arguments]
            used = states if version is None else version.replaced_in(states)
            pool = self._pool(micro_batch.number, used)
        before = None if self.writes is None else self.writes.begin()
        values = dict(arrived)
        for segment in self.segments:
            results = segment.forward(Start(micro_batch, inputs, values, {}, version), pool)
            for slot, tensor in results.items():
                values[slot] = tensor.detach()
        if self.writes is not None and before is not None:
            self.writes.end(micro_batch.number, before)
        return {slot: values[slot] for slot in self._results[micro_batch.span]}

    def recompute(self, micro_batch: MicroBatch) -> None:
        """Run a forward again; if the stage has several segments, that of the last one."""
        self.segments[-1].recompute(micro_batch.number)

    def backward(
        self, micro_batch: MicroBatch, gradients: Tensors, weight: float, scale: float = 1.0
    ) -> Tensors:
        """Run the backward of a micro-batch, or its first half; parameter gradients accumulate.

        Args:
            gradients: of the stage's results, and of received values that later stages use too.
            weight: of the micro-batch in the loss, if this stage computes the loss.
            scale: of the loss, in float16; it scales all gradients too.

        Returns:
            Gradients of what the stage received, by slot.
        """
        index = micro_batch.number
        self.saved.pop(index, None)  # none of it is offloaded after this
        returned = dict(gradients)
        if self.sums is not None:
            self.sums.micro_batch = index
        for segment in reversed(self.segments):
            if segment is not self.segments[-1]:
                segment.recompute(index)
            slots = segment.codes[micro_batch.span].returning
            entering = {slot: returned.pop(slot) for slot in slots if slot in returned}
            caught, version = segment.backward(index, entering, weight, scale)
            returned |= caught
            if self.sums is not None:
                self.sums.add(segment.leaves)
        if self.versions is not None and version is not None:
            self.versions.collect(version)
        if self.versions is not None:
            del version
            self.casts.drop([])  # if no further backward uses these weights
        return returned

    def finish_backward(self, index: int) -> None:
        """Run the second half of a backward: the deferred gradients of weights."""
        if self.sums is not None:
            self.sums.micro_batch = index
        for segment in reversed(self.segments):
            segment.finish_backward(index)
            if self.sums is not None:
                self.sums.add(segment.leaves)

    def evaluate(
        self, micro_batch: MicroBatch, inputs: Mapping[str, Tensor], arrived: Tensors
    ) -> Tensors:
        """Run the evaluation forward of a micro-batch; returns the results by slot."""
        code = self._evaluation.codes[micro_batch.span]
        received = [arrived[slot] for slot in code.stage.received]
        states = copy_written(code.arguments, code.written)
        with torch.no_grad():
            results = self._evaluation.call(code, micro_batch.seed, states, inputs, received)
        keep_written(code.arguments, code.written, states)
        return dict(results)

    def split_backwards(self) -> None:
        """Defer the gradients of weights of every backward to :meth:`finish_backward`."""
        for segment in self.segments:
            segment.split_backwards()

    def compile(self, mode: str | bool = True) -> None:
        """Compile the training code with ``torch.compile``, each part at its first run.

        Args:
            mode: of ``torch.compile``; True is its default.
        """
        for segment in self.segments:
            for code in segment.codes.values():
                code.stage = compile_stage(code.stage, mode=mode if isinstance(mode, str) else None)

    def keep_versions(self, kept: int, *, corrects: bool = False) -> None:
        """From now on, forwards can use the weights of up to ``kept`` - 1 updates ago.

        Args:
            corrects: see :class:`~pipectl.runtime.versions.Versions`.
        """
        self.versions = Versions(self.parameters.values(), kept, corrects=corrects)

    def reproduce(self, written: Container[str]) -> None:
        """From now on, results do not depend on which replica computes which micro-batch.

        Args:
            written: full names of the buffers that forwards write.
        """
        leaves = {id(leaf): leaf for segment in self.segments for leaf in segment.leaves}
        self.sums = GradientSums(leaves.values())
        own = {name: self.buffers[name] for name in sorted(self.buffers) if name in written}
        self.writes = StepWrites(own) if own else None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Wraps an update of the parameters while backwards of older versions are still to come."""
        assert self.versions is not None
        kept = [each for segment in self.segments for each in segment.kept.values()]
        waiting = [each.version for each in kept if isinstance(each, Live | Start)]
        self.versions.before_update([version for version in waiting if version is not None])
        self.casts.drop(self.parameters.values())  # moved, or changed where they are
        yield
        self.versions.after_update()
        self.casts.drop([])

    def follow_parameters(self) -> None:
        """Follow an optimizer that may have given parameters other memory (``p.data = ...``)."""
        for slot, use in self.uses.items():
            use.data = self.parameters[slot.value].data

    def forget(self) -> None:
        """Drop gradients and unfinished micro-batches."""
        for segment in self.segments:
            segment.kept.clear()
        self.saved.clear()
        self.casts.drop()
        for tensor in (*self.parameters.values(), *self.uses.values()):
            tensor.grad = None
        for noted in (self.versions, self.sums, self.writes):
            if noted is not None:
                noted.forget()

    def weights(self) -> Tensors:
        """The parameters that training changes."""
        trained = ((n, p) for n, p in self.parameters.items() if p.requires_grad)
        return {Slot(name): parameter.detach() for name, parameter in trained}

    def arriving(self, micro_batch: MicroBatch, message: Tensors) -> None:
        """Receive a message of the other half of this stage; see :mod:`pipefb`."""
        raise NotImplementedError

    def _codes(self, key: Key) -> list[Code]:
        trains, span = key
        segments = self.segments if trains else [self._evaluation]
        return [segment.codes[span] for segment in segments]

    def share_casts(self, code: StageCode, graph: CapturedGraph) -> StageCode:
        """Let code of this stage take the casts of weights that its micro-batches share."""

        def tensor_of(state: State) -> Tensor:
            return (graph.constants if state.kind == "constant" else self._states)[state.name]

        return share_casts(code, graph, tensor_of, self._casting, self.casts)

    def argument(self, cut: Cut, slot: Slot) -> Tensor:
        """A parameter or buffer of this stage, moved to the device in place."""
        state = cut.graph.states[slot.value]
        if state.kind == "constant":
            if state.name not in self._constants:  # one copy for training and evaluation
                self._constants[state.name] = cut.graph.constants[state.name].to(self.device)
            return self._constants[state.name]
        tensor = self._states[state.name]
        move(tensor, self.device)
        if not isinstance(tensor, nn.Parameter):
            self.buffers[state.name] = tensor
            return tensor
        self.parameters[state.name] = tensor
        if not slot.use:
            return tensor
        use = slot._replace(value=state.name)
        if use not in self.uses:
            self.uses[use] = tensor.detach().requires_grad_(tensor.requires_grad)
        return self.uses[use]

    def _pool(self, index: int, staying: Sequence[Tensor]) -> SavedTensors | None:
        """The pool for what a micro-batch keeps, if that is offloaded."""
        if self._mover is None:
            return None
        self.saved[index] = SavedTensors(staying, self.device, self._mover, self.casts)
        return self.saved[index]
