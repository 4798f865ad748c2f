"""The half of a stage that computes its forward and sends what its backward needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipectl.capture import Slot
from pipectl.capture.batch import spared
from pipectl.capture.slices import Samples
from pipectl.errors import WorkerError
from pipectl.runtime.apart.agreement import Agreement
from pipectl.runtime.apart.ends import Ends, lasting_states, values_received, written_states
from pipectl.runtime.apart.half import Half
from pipectl.runtime.apart.packet import pack
from pipectl.runtime.apart.trace import TOGETHER, Given, structure_of
from pipectl.runtime.layout import Layout, Tensors
from pipectl.runtime.memories import memory_of


class ForwardHalf(Half):
    """Runs forwards and evaluations, with the weights that the other half sends.

    Args:
        ends: of the messages between the halves.
        others: see :class:`~pipectl.runtime.stage.StageRuntime`.
    """

    def __init__(self, ends: Ends, *args: Any) -> None:
        super().__init__(ends, *args)
        self._leaving: dict[int, Tensors] = {}

    def forward(
        self,
        micro_batch: int,
        size: Samples,
        seed: int,
        inputs: Mapping[str, Tensor],
        arrived: Tensors,
        age: int = 0,
    ) -> Tensors:
        """Run the training forward of a micro-batch; what its backward needs waits to be sent."""
        assert isinstance(size, int)
        assert age == 0  # it holds the weights that arrived last, and no others
        given = micro_batch, size, seed, inputs, arrived
        if self._ends.recomputes:
            started = self._started(size, inputs, arrived)
            made = super().forward(*given)
            del self._live[micro_batch]
            self._leave(micro_batch, size, started, Given())
            return made
        saved: list[Tensor] = []
        # The graph holds the hooks: with its own values in their list, nothing would free it.
        with saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), _refuse):
            made = super().forward(*given)
        live = self._live.pop(micro_batch)
        structure: list[str] = []
        if size not in self._agreed:
            structure = structure_of(live.roots.values())
        changing = {memory_of(buffer) for _, buffer in written_states(self, size)}
        kept = [t.clone() if memory_of(t) in changing else t for t in saved]
        self._leave(micro_batch, size, kept, self._given(size, inputs, arrived), structure)
        return made

    def leaving(self, micro_batch: int) -> Tensors:
        """What the backward of a micro-batch needs, once."""
        return self._leaving.pop(micro_batch)

    def arriving(self, _micro_batch: int, _size: int, _seed: int, weights: Tensors) -> None:
        """Take the weights that the other half has updated.

        The parameters move there: messages of earlier micro-batches may still leave from the old.
        One with several uses stays, since these are leaves in its memory; it goes only with
        schedules that flush.
        """
        several = {slot.value for slot in self.uses}
        for slot, tensor in weights.items():
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
        micro_batch: int,
        size: int,
        saved: Sequence[Tensor],
        given: Given,
        structure: Sequence[str] = (),
    ) -> None:
        """Put what a backward needs into a message that both halves understand.

        Raises:
            WorkerError: it lies otherwise in memory than that of an earlier micro-batch.
        """
        contents, message = pack(saved, lasting_states(self, size), self._ends.places)
        if size not in self._agreed:
            forms = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in saved)
            self._agreed[size] = Agreement(given, contents, forms, tuple(structure))
            self._ends.announcements.tell(self.index, self._ends.other_rank, self._agreed[size])
        if contents != self._agreed[size].contents:
            raise WorkerError(
                f"stage {self.index} saves other tensors for its backward than before, so that "
                "they cannot be sent to another rank",
                cure=TOGETHER,
            )
        self._leaving[micro_batch] = {
            Slot(str(place)): tensor for place, tensor in enumerate(message)
        }

    def _started(self, size: int, inputs: Mapping[str, Tensor], arrived: Tensors) -> list[Tensor]:
        """What a forward starts from, safe from what it writes."""
        code, own = self.codes[True, size], spared(self.graph(size), inputs)
        batch = [own[name] for name in code.inputs]
        buffers = [buffer.clone() for _, buffer in written_states(self, size)]
        found = [*batch, *(arrived[slot] for slot in values_received(code)), *buffers]
        return [tensor for tensor in found if tensor is not None]

    def _given(self, size: int, inputs: Mapping[str, Tensor], arrived: Tensors) -> Given:
        """How the stage's code was called."""
        code, graph = self.codes[True, size], self._cuts[True, size].graph
        received = []
        for slot in code.received:
            tensor = arrived[Slot(slot.value)]
            assert tensor is not None
            received.append((Layout.of(tensor), graph.requires_grad[slot.value]))
        return Given(tuple(Layout.of(inputs[name]) for name in code.inputs), tuple(received))


def _refuse(_: Any) -> NoReturn:
    raise AssertionError("the backward of this stage runs on another rank")
