"""Parameters and buffers of a stage, as arguments of its code."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from pipectl.capture import Cut, Slot
from pipectl.capture.stage import StageCode, uses_of_parameter
from pipectl.runtime.device import Device, move


class StageStates:
    """Those of one stage, moved to the device in place when its code asks for them.

    Args:
        states: the model's parameters and buffers by full name.

    Attributes:
        parameters, buffers: of the stage, by full name.
        uses: leaves in the memory of parameters with several uses, one for each use.
    """

    def __init__(self, states: Mapping[str, Tensor], device: Device) -> None:
        self._states = states
        self._device = device
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self.uses: dict[Slot, Tensor] = {}

    def arguments(self, cut: Cut, code: StageCode) -> list[Tensor]:
        """The state arguments of some code of the stage."""
        return [self._state(cut, slot) for slot in code.states]

    def _state(self, cut: Cut, slot: Slot) -> Tensor:
        state = cut.graph.states[slot.value]
        if state.kind == "constant":
            constant: Tensor = cut.graph.constants[state.name]
            return constant.to(self._device.torch_device)
        tensor = self._states[state.name]
        move(tensor, self._device.torch_device)
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


def shared_uses(cut: Cut) -> dict[str, list[tuple[Slot, int]]]:
    """Parameters with several uses: for each, its uses in graph order with their stages."""
    found: dict[str, list[tuple[Slot, int]]] = {}
    for placeholder, state in cut.graph.states.items():
        users = uses_of_parameter(cut.graph, placeholder)
        if users:
            found[state.name] = [(Slot(state.name, user), cut.stage_of[user]) for user in users]
    return found


@contextmanager
def rewriting(arguments: Sequence[Tensor], written: Collection[int]) -> Iterator[list[Tensor]]:
    """The state arguments, where buffers that the call writes are copies, kept afterwards.

    Autograd may keep a buffer for a backward that comes after the next forward wrote it, and
    a forward that is run again starts from what stood in it.

    Args:
        written: indices of those buffers.
    """
    states = list(arguments)
    for index in written:
        states[index] = states[index].clone()
    yield states
    for index in written:
        arguments[index].data = states[index].detach()


@contextmanager
def before(arguments: Sequence[Tensor], buffers: Mapping[int, Tensor]) -> Iterator[list[Tensor]]:
    """The state arguments as they were before a forward; what it writes is dropped.

    Args:
        buffers: those that it wrote, by index, as they were.
    """
    yield [buffers.get(index, state) for index, state in enumerate(arguments)]
