"""The half of a stage that computes its backward and updates its weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipectl.capture import Slot
from pipectl.capture.slices import Samples
from pipectl.runtime.apart.agreement import Agreement
from pipectl.runtime.apart.ends import Ends, lasting_states, values_received, written_states
from pipectl.runtime.apart.half import Half
from pipectl.runtime.apart.trace import Graph
from pipectl.runtime.layout import Tensors


class BackwardHalf(Half):
    """Runs backwards of what the other half sends, and sends it the updated weights.

    A micro-batch's backward runs through the stage's graph without values; where the stage
    recomputes, its forward runs here first. Weights of its forward that are older than the newest
    are kept here: they are the stage's :attr:`versions`.

    Args:
        ends: of the messages between the halves.
        others: see :class:`~pipectl.runtime.stage.StageRuntime`; the cuts are those of training.
    """

    runs_forwards = False

    def __init__(self, ends: Ends, *args: Any) -> None:
        super().__init__(ends, *args)
        self._graphs: dict[int, Graph] = {}
        self._arrived: dict[int, tuple[int, int, list[Tensor | None]]] = {}

    def inputs(self, training: bool, size: Samples) -> tuple[str, ...]:  # noqa: ARG002
        """None: it reads no batches."""
        return ()

    @property
    def reads(self) -> bool:
        """Never: what forwards read is not needed here."""
        return False

    def leaving(self, _micro_batch: int) -> Tensors:
        """The parameters that training changes."""
        trained = sorted((n, p) for n, p in self.parameters.items() if p.requires_grad)
        return {Slot(name): parameter.detach() for name, parameter in trained}

    def arriving(self, micro_batch: int, size: int, seed: int, message: Tensors) -> None:
        """Take what the forward of a micro-batch has left for its backward.

        Args:
            seed: of the micro-batch, for random operators.

        Raises:
            MismatchError: the code of this stage cannot have its backward here.
        """
        self._agreement(size)
        self._arrived[micro_batch] = size, seed, list(message.values())

    def recompute(self, micro_batch: int, age: int = 0) -> None:
        """Run the forward of a micro-batch, from what the other half started it from."""
        size, seed, values = self._unpacked(micro_batch, age)
        left = iter([value.data for value in values])  # each may be written, also of one memory
        code = self.codes[True, size]
        inputs = {name: next(left) for name in code.inputs}
        arrived: Tensors = {slot: next(left) for slot in values_received(code)}
        for _, buffer in written_states(self, size):
            buffer.data = next(left)
        self.forward(micro_batch, size, seed, inputs, arrived, age)

    def backward(
        self,
        micro_batch: int,
        gradients: Tensors,
        loss: Slot,
        weight: float,
        scale: float = 1.0,
        age: int = 0,
    ) -> Tensors:
        """Run the backward of a micro-batch; parameter gradients accumulate.

        Args:
            age: of the weights that its forward used, in updates.
        """
        if self._ends.recomputes:
            return super().backward(micro_batch, gradients, loss, weight, scale, age)
        size, _, values = self._unpacked(micro_batch, age)
        graph = self._graphs[size]
        roots: dict[Slot, Tensor] = {}
        if loss in self.codes[True, size].results:
            roots[loss] = graph.filled(loss, scale) * weight
        given = {slot: found for slot, found in gradients.items() if found is not None}
        roots |= {slot: gradient for slot, gradient in given.items() if graph.has(slot)}
        return graph.backward(values, roots)

    def forget(self) -> None:
        """Drop gradients and unfinished micro-batches."""
        super().forget()
        self._arrived.clear()

    def _unpacked(self, micro_batch: int, age: int) -> tuple[int, int, list[Tensor]]:
        """Samples, seed and saved tensors of a micro-batch; weights among them at their age."""
        size, seed, message = self._arrived.pop(micro_batch)
        states = lasting_states(self, size)
        if self.versions is not None:
            used = self.versions.of_age(age).among(list(states.values()))
            states = dict(zip(states, used, strict=True))
        return size, seed, self._agreed[size].contents.unpack(message, states)

    def _agreement(self, size: int) -> Agreement:
        if size not in self._agreed:
            agreed = self._ends.announcements.hear(self.index, self._ends.other_rank)
            self._agreed[size] = agreed
            if not self._ends.recomputes:
                self._graphs[size] = self._graph(size, agreed)
        return self._agreed[size]

    def _graph(self, size: int, agreed: Agreement) -> Graph:
        key = True, size
        graph = Graph(
            self.index,
            self.codes[key],
            self._arguments[key],
            agreed.given,
            self._precision,
            self._device.torch_device,
        )
        agreed.check(self.index, graph)
        return graph
