"""One stage on its rank: parameters, and the forward and backward of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge

from pipectl.capture import CapturedGraph, Cut, Slot, build_stage
from pipectl.capture.batch import spared
from pipectl.capture.regions import arithmetic
from pipectl.capture.slices import Samples
from pipectl.capture.stage import Receive
from pipectl.runtime.compiling import compile_stage
from pipectl.runtime.device import Device
from pipectl.runtime.halves import Deferred, split_backwards
from pipectl.runtime.in_flight import Live, Start
from pipectl.runtime.layout import Tensors
from pipectl.runtime.memories import kept_apart
from pipectl.runtime.offload import Pool, StageOffload
from pipectl.runtime.stage_states import StageStates, before, rewriting
from pipectl.runtime.ticks import insert_ticks
from pipectl.runtime.versions import Version, Versions


class StageRuntime:
    """The part of the model that one stage computes.

    Args:
        index: of the stage.
        cuts: by (training, samples), for all that it will compute at once.
        states: the model's parameters and buffers by full name; those of this stage are moved to
            the device in place.
        precision: as in the spec.
        recompute: whether a forward keeps only what it starts from, until :meth:`recompute`.
        offload: takes what forwards keep; None if it stays.

    Attributes:
        runs_forwards: whether forwards and evaluations run here, and not only backwards.
        codes: what it runs, by (training, samples).
        versions: of the weights, where steps are not flushed; see :meth:`keep_versions`.
    """

    runs_forwards = True

    def __init__(
        self,
        index: int,
        cuts: Mapping[tuple[bool, Samples], Cut],
        states: Mapping[str, Tensor],
        device: Device,
        precision: str = "float32",
        *,
        recompute: bool = False,
        offload: StageOffload | None = None,
    ) -> None:
        self.index = index
        self.offload = offload
        self._recompute = recompute
        self._device = device
        self._precision = precision
        self.codes = {
            key: build_stage(cut, index, key[1], device.torch_device) for key, cut in cuts.items()
        }
        self._cuts = cuts
        self._anchor = torch.zeros((), requires_grad=True)
        self._live: dict[int, Live] = {}
        self._deferring = Deferred()
        self._deferred: dict[int, Deferred] = {}
        self._starts: dict[int, Start] = {}
        self.versions: Versions | None = None
        own = StageStates(states, device)
        self.parameters, self.buffers, self.uses = own.parameters, own.buffers, own.uses
        self._arguments = {k: own.arguments(cuts[k], code) for k, code in self.codes.items()}
        self._leaves = self._trained()

    def inputs(self, training: bool, size: Samples) -> tuple[str, ...]:
        """Names of the batch tensors this stage reads."""
        return self.codes[training, size].inputs

    @property
    def reads(self) -> bool:
        """Whether it reads the batch in training."""
        return any(code.inputs for (training, _), code in self.codes.items() if training)

    def arguments(self, size: int) -> list[Tensor]:
        """The state arguments of its training code for micro-batches of a size."""
        return self._arguments[True, size]

    def graph(self, size: int) -> CapturedGraph:
        """The captured graph for micro-batches of a size."""
        return self._cuts[True, size].graph

    def forward(
        self,
        micro_batch: int,
        size: Samples,
        seed: int,
        inputs: Mapping[str, Tensor],
        arrived: Tensors,
        age: int = 0,
    ) -> Tensors:
        """Run the training forward of a micro-batch and keep what its backward needs.

        Args:
            seed: of (run, step, micro-batch), for random operators.
            inputs: the batch tensors by name.
            arrived: activations by the slot of their message.
            age: of the weights, in updates.

        Returns:
            The stage's results by slot.
        """
        version = None if self.versions is None else self.versions.of_age(age)
        start = Start(size, seed, inputs, arrived, {}, version)
        pool = self._pool(micro_batch, size, version)
        if self._recompute:
            kept = self._preserved(start)
            self._starts[micro_batch] = kept if pool is None else kept.packed(pool)
            # Its graph ends here. Gradients stay on, since operators may choose their kernels by
            # whether their inputs have one.
            _, results = self._run(start, again=False)
        else:
            self._live[micro_batch], results = self._run(start, again=False, pool=pool)
        return {slot: tensor.detach() for slot, tensor in results.items()}

    def recompute(self, micro_batch: int, age: int = 0) -> None:  # noqa: ARG002
        """Run a forward once more, just before its backward; buffers stay as they are.

        Args:
            age: of the weights by now, in updates; where the forward ran here, they are known.
        """
        start = self._starts.pop(micro_batch).unpacked()
        self._live[micro_batch], _ = self._run(start, again=True)

    def backward(
        self,
        micro_batch: int,
        gradients: Tensors,
        loss: Slot,
        weight: float,
        scale: float = 1.0,
        age: int = 0,  # noqa: ARG002
    ) -> Tensors:
        """Run the backward of a micro-batch, or its first half; parameter gradients accumulate.

        Args:
            gradients: of the stage's results and of received values that later stages use too.
            loss: slot of the loss, seeded with ``weight`` where this stage computes it.
            scale: of the loss, in float16; so are then all gradients.
            age: see :meth:`recompute`.

        Returns:
            Gradients of what the stage received, by slot.
        """
        live = self._live.pop(micro_batch)
        if self.offload is not None:
            self.offload.end(micro_batch)
        roots, seeds = live.seeded(gradients, loss, scale, weight)
        others = chain(gradients.values(), live.caught.values(), live.deferred.gradients)
        leaves = self._leaves if live.version is None else live.version.leaves.values()
        if roots:
            with kept_apart(leaves, others):
                torch.autograd.backward(roots, seeds)
        if self.versions is not None and live.version is not None:
            self.versions.collect(live.version)
        if live.deferred.roots:
            self._deferred[micro_batch] = live.deferred
        return live.caught

    def finish_backward(self, micro_batch: int) -> None:
        """Run the second half of a backward: the gradients of weights that were put off."""
        deferred = self._deferred.pop(micro_batch, None)
        if deferred is not None:
            deferred.run()

    def evaluate(
        self, size: int, seed: int, inputs: Mapping[str, Tensor], arrived: Tensors
    ) -> Tensors:
        """Run the evaluation forward of a micro-batch; returns the results by slot."""
        received = {slot: arrived[slot] for slot in self.codes[False, size].received}
        with torch.no_grad(), self._rewriting((False, size)) as states:
            return dict(self._call((False, size), seed, states, inputs, received))

    def split_backwards(self) -> None:
        """Have every backward leave work for :meth:`finish_backward`."""
        for (training, size), code in self.codes.items():
            if training:
                states = self._cuts[training, size].graph.states
                split_backwards(code, states, lambda: self._deferring)

    def compile(self) -> None:
        """Have ``torch.compile`` compile the training code, each size when it is first run."""
        for key in self.codes:
            if key[0]:
                self.codes[key] = compile_stage(self.codes[key])

    def keep_versions(self, kept: int) -> None:
        """From now on, forwards can use the weights of up to ``kept`` - 1 updates ago."""
        self.versions = Versions(self.parameters.values(), kept)

    def restart_versions(self) -> None:
        """Drop all versions of the weights but the newest, between stretches."""
        assert self.versions is not None
        self.versions.restart()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around an update of the parameters, while backwards of older versions are to come."""
        assert self.versions is not None
        waiting: list[Live | Start] = [*self._live.values(), *self._starts.values()]
        self.versions.before_update([each.version for each in waiting if each.version is not None])
        yield
        self.versions.after_update()

    def let_advance(self, advance: Callable[[], None]) -> None:
        """Have ``advance`` called between operators, forward and backward."""
        for code in self.codes.values():
            assert isinstance(code.module, fx.GraphModule)
            insert_ticks(code.module, advance)

    def forget(self) -> None:
        """Drop gradients and unfinished micro-batches."""
        self._live.clear()
        self._deferred.clear()
        self._starts.clear()
        if self.offload is not None:
            self.offload.forget()
        for tensor in (*self.parameters.values(), *self.uses.values()):
            tensor.grad = None
        if self.versions is not None:
            self.versions.forget()

    def _trained(self) -> list[Tensor]:
        """What training gives gradients."""
        found = [tensor for key, each in self._arguments.items() if key[0] for tensor in each]
        return list({id(tensor): tensor for tensor in found if tensor.requires_grad}.values())

    def _pool(self, micro_batch: int, size: Samples, version: Version | None) -> Pool | None:
        """What takes what a micro-batch keeps."""
        if self.offload is None:
            return None
        states = self._arguments[True, size]
        return self.offload.pool(micro_batch, states if version is None else version.among(states))

    def _run(
        self, start: Start, *, again: bool, pool: Pool | None = None
    ) -> tuple[Live, dict[Slot, Tensor]]:
        """A training forward; ``again`` if it was run before and is to leave no trace."""
        key = True, start.size
        caught: dict[Slot, Tensor | None] = {}
        received = self._entered(start, caught)
        self._deferring = deferring = Deferred()
        arguments = self._arguments[key]
        states_of = before(arguments, start.buffers) if again else self._rewriting(key)
        with states_of as states, nullcontext() if pool is None else pool.hooks():
            used = states if start.version is None else start.version.among(states)
            results = self._call(key, start.seed, used, start.inputs, received)
        loss = Slot(self._cuts[key].graph.loss)
        losses = {loss: results[loss]} if loss in results else {}
        values = {**received, **results}.items()
        roots = {slot: get_gradient_edge(value) for slot, value in values if value.requires_grad}
        return Live(roots, losses, caught, deferring, start.version), results

    def _entered(self, start: Start, caught: dict[Slot, Tensor | None]) -> dict[Slot, Tensor]:
        """What arrived, as values of a graph that catches their gradients."""
        code, graph = self.codes[True, start.size], self._cuts[True, start.size].graph
        received: dict[Slot, Tensor] = {}
        for slot in code.received:
            tensor = start.arrived[Slot(slot.value)]
            assert tensor is not None
            received[slot] = (
                Receive.apply(self._anchor, tensor, caught, slot)  # type: ignore[no-untyped-call]
                if graph.requires_grad[slot.value]
                else tensor
            )
        return received

    def _call(
        self,
        key: tuple[bool, Samples],
        seed: int,
        states: list[Tensor],
        inputs: Mapping[str, Tensor],
        received: Mapping[Slot, Tensor | None],
    ) -> dict[Slot, Tensor]:
        code = self.codes[key]
        batch = [inputs[name] for name in code.inputs]
        values = [received[slot] for slot in code.received]
        with arithmetic(self._precision, self._device.torch_device):
            results = code.module(seed, *states, *batch, *values)
        return dict(zip(code.results, results, strict=True))

    def _rewriting(self, key: tuple[bool, Samples]) -> AbstractContextManager[list[Tensor]]:
        return rewriting(self._arguments[key], self._written(key))

    def _preserved(self, start: Start) -> Start:
        """What a forward starts from, safe from what it writes."""
        key = True, start.size
        inputs = spared(self._cuts[key].graph, start.inputs)
        # The forward leaves this memory behind: see rewriting().
        buffers = {index: self._arguments[key][index].detach() for index in self._written(key)}
        return replace(start, inputs=inputs, buffers=buffers)

    def _written(self, key: tuple[bool, Samples]) -> list[int]:
        """The buffers among the state arguments that must not be written where they are."""
        graph = self._cuts[key].graph
        names = graph.written if self._recompute and key[0] else graph.rewritten
        return [index for index, slot in enumerate(self.codes[key].states) if slot.value in names]
