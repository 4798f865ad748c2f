"""A part of a stage's operators that run together: forward, backward, and what lies between.

A forward keeps what autograd saves, or, in a segment that recomputes, its own inputs. The backward
enters the graph that the forward has left, or that a recomputation leaves just before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge

from pipectl.capture import Cut, Slot, build_stage
from pipectl.capture.batch import copy_written_inputs
from pipectl.capture.graph import CapturedGraph
from pipectl.capture.model_with_loss import own_name
from pipectl.capture.randomness import SEEDERS
from pipectl.capture.refusals import Refusal, RefusedError
from pipectl.capture.regions import arithmetic
from pipectl.capture.slices import Span
from pipectl.capture.stage import Receive, StageCode
from pipectl.runtime.layout import Tensors
from pipectl.runtime.saved_tensors import (
    SavedTensors,
    run_backward,
    sparse_error,
    unpack,
    zeros_behind,
)
from pipectl.runtime.stage_code import WeightHalf, split_backwards
from pipectl.runtime.versions import Version
from pipectl.runtime.written import copy_written, keep_written
from pipectl.torch_api import edge_of


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


class ForwardInputs(NamedTuple):
    """What a forward of a micro-batch computes with, which a recomputation uses again.

    Args:
        inputs: the tensors of the batch that it reads, by name.
        arrived: activations by the slot of their message.
        buffers: values before the forward of the buffers that it writes, by index of the state
            argument.
        version: of the weights; None if there is only one.
    """

    micro_batch: MicroBatch
    inputs: Mapping[str, Any]
    arrived: Mapping[Slot, Any]
    buffers: Mapping[int, Tensor]
    version: Version | None = None

    def map_tensors(self, change: Callable[[Any], Any]) -> ForwardInputs:
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
        self, leaves: Iterable[Tensor], gradients: Tensors, weight: float | None, scale: float
    ) -> Tensors:
        """Run the backward of the graph; returns the gradients of received values.

        Args:
            weight: see :meth:`Segment.backward`.
        """
        roots: list[Tensor | GradientEdge] = []
        seeds: list[Tensor] = []
        if self.loss is not None:
            roots.append(self.loss)
            form = tuple(self.loss.shape), self.loss.dtype, self.loss.device
            assert weight is not None
            seeds.append(_seed(*form, scale, weight))
        for slot, gradient in gradients.items():
            root = self.roots.get(slot)
            if root is not None and gradient is not None:
                roots.append(root)
                seeds.append(gradient)
        if roots:
            later = () if self.weight_half is None else self.weight_half.gradients
            others = chain(seeds, gradients.values(), self.caught.values(), later)
            adds_nothing = weight == 0
            if self.weight_half is not None:
                self.weight_half.adds_nothing = adds_nothing
            with zeros_behind(self.edges) if adds_nothing else nullcontext():
                run_backward(roots, seeds, leaves, others, retain_graph=self.is_lasting)
        return self.caught


@lru_cache(16)
def _seed(
    sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, scale: float, weight: float
) -> Tensor:
    """The gradient of a loss; micro-batches with the same weight share it."""
    return torch.full(sizes, scale, dtype=dtype, device=device) * weight


@dataclass
class BoundCode:
    """The code that a segment runs for micro-batches of one size, and what it is called with.

    Args:
        arguments: the parameters and buffers that it is called with.
        received: slots that it reads, each with the slot of its message and whether it has a
            gradient.
        returning: slots of the gradients with which its backward begins, in the order in which
            autograd adds them.
        written: indices of the buffers that must not be written in place.
        draws: whether it has random operators, and so needs a seed.
    """

    code: StageCode
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
        self.codes: dict[Span, BoundCode] = {}
        for span, cut in cuts.items():
            graph = cut.graph
            code = change(build_stage(cut, number, span, device), graph)
            names = graph.written if recomputes else graph.rewritten
            assert isinstance(code.module, fx.GraphModule)
            self.codes[span] = BoundCode(
                code,
                cut,
                [argument(cut, slot) for slot in code.states],
                [(s, Slot(s.value), graph.requires_grad[s.value]) for s in code.received],
                cut.returning(number),
                [index for index, slot in enumerate(code.states) if slot.value in names],
                Slot(graph.loss),
                any(node.target in SEEDERS for node in code.module.graph.nodes),
            )
        arguments = (t for bound in self.codes.values() for t in bound.arguments)
        trained = (tensor for tensor in arguments if tensor.requires_grad)
        self.leaves = list({id(tensor): tensor for tensor in trained}.values())
        self.kept: dict[int, ForwardInputs | Live | WeightHalf] = {}
        self._splits = False
        self._weight_half = WeightHalf()

    def forward(self, forward: ForwardInputs, pool: SavedTensors | None) -> dict[Slot, Tensor]:
        """Run a training forward and keep what its backward needs; returns the results.

        Args:
            forward: of the stage; the segment reads its part of it.
        """
        micro_batch = forward.micro_batch.number
        if not self.recomputes:
            self.kept[micro_batch], results = self.run(forward, again=False, pool=pool)
            return results
        bound = self.codes[forward.micro_batch.span]
        # The forward does not keep the memory of buffers: see keep_written().
        buffers = {index: bound.arguments[index].detach() for index in bound.written}
        inputs = {name: forward.inputs[name] for name in bound.code.inputs}
        arrived = {source: forward.arrived[source] for _, source, _ in bound.received}
        forward = forward._replace(inputs=inputs, arrived=arrived, buffers=buffers)
        origin = forward._replace(inputs=copy_written_inputs(bound.cut.graph, inputs))
        self.kept[micro_batch] = origin if pool is None else origin.map_tensors(pool.pack)
        # Its graph ends here. Gradients stay enabled, since operators may choose their kernels by
        # whether their inputs have one.
        return self.run(forward, again=False)[1]

    def recompute(self, micro_batch: int) -> None:
        """Run a forward again, just before its backward; buffers do not change."""
        forward = self.kept.pop(micro_batch)
        assert isinstance(forward, ForwardInputs)
        self.kept[micro_batch], _ = self.run(forward.map_tensors(unpack), again=True)

    def backward(
        self, micro_batch: int, gradients: Tensors, weight: float | None, scale: float
    ) -> tuple[Tensors, Version | None]:
        """Run the backward of a micro-batch; parameter gradients accumulate.

        Args:
            weight: of the micro-batch in the loss, if the stage computes it; else None. If it is 0,
                all gradients of the stage are zeros.

        Returns:
            Gradients of received values, and the version of the weights.
        """
        live = self.kept.pop(micro_batch)
        assert isinstance(live, Live)
        leaves = self.leaves if live.version is None else live.version.leaves.values()
        try:
            returned = live.backward(leaves, gradients, weight, scale)
        except RefusedError as error:
            if error.refusal is not Refusal.SPARSE:
                raise
            raise sparse_error(self._sparse(live.version)) from None
        if live.weight_half is not None and live.weight_half.roots:
            self.kept[micro_batch] = live.weight_half
        return returned, live.version

    def _sparse(self, version: Version | None) -> str:
        """Name the first parameter that has a sparse gradient."""
        for bound in self.codes.values():
            states: Sequence[Tensor] = bound.arguments
            used = states if version is None else version.replaced_in(states)
            for slot, leaf in zip(bound.code.states, used, strict=True):
                if leaf.grad is not None and leaf.grad.layout is not torch.strided:
                    return own_name(bound.cut.graph.states[slot.value].name)
        return ""

    def finish_backward(self, micro_batch: int) -> None:
        """Run the second half of a backward: the deferred gradients of weights."""
        half = self.kept.pop(micro_batch, None)
        if half is not None:
            assert isinstance(half, WeightHalf)
            half.run()

    def run(
        self, forward: ForwardInputs, *, again: bool, pool: SavedTensors | None = None
    ) -> tuple[Live, dict[Slot, Tensor]]:
        """A training forward; if ``again``, it was run before and changes no buffer."""
        micro_batch, version = forward.micro_batch, forward.version
        bound = self.codes[micro_batch.span]
        caught: dict[Slot, Tensor | None] = {}
        values: dict[Slot, Tensor] = {}
        for slot, source, has_gradient in bound.received:
            tensor = forward.arrived[source]
            values[slot] = (
                Receive.apply(self._anchor, tensor, caught, slot)  # type: ignore[no-untyped-call]
                if has_gradient
                else tensor
            )
        weight_half = None
        if self._splits:
            weight_half = self._weight_half = WeightHalf()
        states: Sequence[Tensor] = bound.arguments
        if again:  # its writes to buffers are dropped
            states = [forward.buffers.get(i, state) for i, state in enumerate(states)]
        elif bound.written:
            states = copy_written(states, bound.written)
        used = states if version is None else version.replaced_in(states)
        with nullcontext() if pool is None else pool.hooks():
            results = self.call(bound, micro_batch.seed, used, forward.inputs, values.values())
        if bound.written and not again:
            keep_written(bound.arguments, bound.written, states)
        values.update(results)
        roots = {}
        for slot in bound.returning:
            value = values.get(slot)
            if value is not None and value.requires_grad:
                roots[slot] = edge_of(value)
        return Live(roots, results.get(bound.loss), caught, weight_half, version), results

    def call(
        self,
        bound: BoundCode,
        seed: int,
        states: Sequence[Tensor],
        inputs: Mapping[str, Tensor],
        received: Iterable[Any],
    ) -> dict[Slot, Tensor]:
        """Call a code; returns its results by slot."""
        batch, module = [inputs[name] for name in bound.code.inputs], bound.code.module
        run = module.forward if isinstance(module, fx.GraphModule) else module  # it has no hooks
        with self._arithmetic:
            results = run(seed, *states, *batch, *received)
        return dict(zip(bound.code.results, results, strict=True))

    def split_backwards(self) -> None:
        """Defer the gradients of weights of every backward to :meth:`finish_backward`."""
        self._splits = True
        for bound in self.codes.values():
            states = bound.cut.graph.states
            bound.code = split_backwards(bound.code, states, lambda: self._weight_half)
