"""One stage on its rank: parameters, and the forward and backward of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from pipectl.capture import Cut, Slot, build_stage
from pipectl.capture.precision import arithmetic
from pipectl.capture.stage import Receive, uses_of_parameter
from pipectl.runtime.device import Device
from pipectl.runtime.halves import Deferred, split_backwards
from pipectl.runtime.transport import Tensors
from pipectl.runtime.transport.ticks import insert_ticks


@dataclass
class _Live:
    """A micro-batch between its forward and its backward."""

    received: dict[Slot, Tensor]
    results: dict[Slot, Tensor]
    caught: dict[Slot, Tensor | None]
    deferred: Deferred


class StageRuntime:
    """The part of the model that one stage computes.

    Args:
        index: of the stage.
        cuts: by (training, micro-batch size), for every size that will occur.
        states: the model's parameters and buffers by full name; those of this stage are moved to
            the device in place.
        precision: as in the spec.

    Attributes:
        codes: what it runs, by (training, micro-batch size).
    """

    def __init__(
        self,
        index: int,
        cuts: Mapping[tuple[bool, int], Cut],
        states: Mapping[str, Tensor],
        device: Device,
        precision: str = "float32",
    ) -> None:
        self.index = index
        self._device = device
        self._precision = precision
        self._states = states
        self.codes = {key: build_stage(cut, index, key[1]) for key, cut in cuts.items()}
        self._cuts = cuts
        self._anchor = torch.zeros((), requires_grad=True)
        self._live: dict[int, _Live] = {}
        self._deferring = Deferred()
        self._deferred: dict[int, Deferred] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self.uses: dict[Slot, Tensor] = {}
        self._arguments = {key: self._bind(key) for key in self.codes}

    def inputs(self, training: bool, size: int) -> tuple[str, ...]:
        """Names of the batch tensors this stage reads."""
        return self.codes[training, size].inputs

    def forward(
        self, micro_batch: int, size: int, seed: int, inputs: Mapping[str, Tensor], arrived: Tensors
    ) -> Tensors:
        """Run the training forward of a micro-batch and keep what its backward needs.

        Args:
            seed: of (run, step, micro-batch), for random operators.
            inputs: the batch tensors by name.
            arrived: activations by the slot of their message.

        Returns:
            The stage's results by slot.
        """
        code, cut = self.codes[True, size], self._cuts[True, size]
        caught: dict[Slot, Tensor | None] = {}
        received: dict[Slot, Tensor] = {}
        for slot in code.received:
            tensor = arrived[Slot(slot.value)]
            assert tensor is not None
            grad = cut.graph.requires_grad[slot.value]
            received[slot] = (
                Receive.apply(self._anchor, tensor, caught, slot) if grad else tensor  # type: ignore[no-untyped-call]
            )
        self._deferring = Deferred()
        results = self._call((True, size), seed, inputs, received)
        self._live[micro_batch] = _Live(received, results, caught, self._deferring)
        return {slot: tensor.detach() for slot, tensor in results.items()}

    def backward(
        self, micro_batch: int, gradients: Tensors, loss: Slot, weight: float, scale: float = 1.0
    ) -> Tensors:
        """Run the backward of a micro-batch, or its first half; parameter gradients accumulate.

        Args:
            gradients: of the stage's results and of received values that later stages use too.
            loss: slot of the loss, seeded with ``weight`` where this stage computes it.
            scale: of the loss, in float16; so are then all gradients.

        Returns:
            Gradients of what the stage received, by slot.
        """
        live = self._live.pop(micro_batch)
        roots, seeds = [], []
        for slot, gradient in gradients.items():
            root = live.results.get(slot, live.received.get(slot))
            if gradient is not None and root is not None:
                roots.append(root)
                seeds.append(gradient)
        if loss in live.results:
            roots.insert(0, live.results[loss])
            seeds.insert(0, torch.full_like(live.results[loss], scale) * weight)
        if roots:
            torch.autograd.backward(roots, seeds)
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
        with torch.no_grad():
            return dict(self._call((False, size), seed, inputs, received))

    def split_backwards(self) -> None:
        """Have every backward leave work for :meth:`finish_backward`."""
        for (training, size), code in self.codes.items():
            if training:
                states = self._cuts[training, size].graph.states
                split_backwards(code, states, lambda: self._deferring)

    def let_advance(self, advance: Callable[[], None]) -> None:
        """Have ``advance`` called between operators, forward and backward."""
        for code in self.codes.values():
            assert isinstance(code.module, fx.GraphModule)
            insert_ticks(code.module, advance)

    def forget(self) -> None:
        """Drop gradients and unfinished micro-batches."""
        self._live.clear()
        self._deferred.clear()
        for tensor in (*self.parameters.values(), *self.uses.values()):
            tensor.grad = None

    def _call(
        self,
        key: tuple[bool, int],
        seed: int,
        inputs: Mapping[str, Tensor],
        received: Mapping[Slot, Tensor | None],
    ) -> dict[Slot, Tensor]:
        code = self.codes[key]
        batch = [inputs[name] for name in code.inputs]
        values = [received[slot] for slot in code.received]
        precise = arithmetic(self._precision, self._device.torch_device)
        with precise, self._rewriting(key) as states:
            results = code.module(seed, *states, *batch, *values)
        return dict(zip(code.results, results, strict=True))

    @contextmanager
    def _rewriting(self, key: tuple[bool, int]) -> Iterator[list[Tensor]]:
        """The state arguments, where buffers that the call writes are copies, kept afterwards.

        Autograd may keep a buffer for a backward that comes after the next forward wrote it.
        """
        states, rewritten = list(self._arguments[key]), self._cuts[key].graph.rewritten
        slots = self.codes[key].states
        written = [index for index, slot in enumerate(slots) if slot.value in rewritten]
        for index in written:
            states[index] = states[index].clone()
        yield states
        for index in written:
            self._arguments[key][index].data = states[index].detach()

    def _bind(self, key: tuple[bool, int]) -> list[Tensor]:
        """The state arguments of a stage's code."""
        cut, code = self._cuts[key], self.codes[key]
        return [self._state(cut, slot) for slot in code.states]

    def _state(self, cut: Cut, slot: Slot) -> Tensor:
        state = cut.graph.states[slot.value]
        if state.kind == "constant":
            return self._moved(cut.graph.constants[state.name])
        tensor = self._states[state.name]
        tensor.data = self._moved(tensor.data)
        if not isinstance(tensor, nn.Parameter):
            self.buffers[state.name] = tensor
            return tensor
        self.parameters[state.name] = tensor
        return tensor if not slot.use else self._use(slot._replace(value=state.name), tensor)

    def _use(self, slot: Slot, parameter: nn.Parameter) -> Tensor:
        """A leaf of its own for one use of a parameter, in the parameter's memory."""
        if slot not in self.uses:
            leaf = parameter.detach().requires_grad_(parameter.requires_grad)
            self.uses[slot] = leaf
        return self.uses[slot]

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device.torch_device)


def shared_uses(cut: Cut) -> dict[str, list[tuple[Slot, int]]]:
    """Parameters with several uses: for each, its uses in graph order with their stages."""
    found: dict[str, list[tuple[Slot, int]]] = {}
    for placeholder, state in cut.graph.states.items():
        users = uses_of_parameter(cut.graph, placeholder)
        if users:
            found[state.name] = [(Slot(state.name, user), cut.stage_of[user]) for user in users]
    return found
