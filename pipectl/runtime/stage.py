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

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipectl.capture import Cut, Slot
from pipectl.capture.casts import Casting
from pipectl.capture.graph import CapturedGraph, State
from pipectl.capture.opaque import Opaque
from pipectl.capture.slices import Span
from pipectl.capture.stage import StageCode
from pipectl.capture.tensors import is_equal
from pipectl.runtime.casts import SharedCasts
from pipectl.runtime.device import Device, move
from pipectl.runtime.layout import Tensors
from pipectl.runtime.offload import Mover
from pipectl.runtime.saved_tensors import SavedTensors
from pipectl.runtime.segment import BoundCode, ForwardInputs, Live, MicroBatch, Segment
from pipectl.runtime.stage_code import compile_stage, share_casts
from pipectl.runtime.sums import GradientSums
from pipectl.runtime.versions import Versions
from pipectl.runtime.written import StepWrites, copy_written, keep_written

Key = tuple[bool, Span]
"""(training, span): whether code is for training, and the samples that one call computes."""


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
        self._constants: dict[str, list[tuple[Tensor, Tensor]]] = {}
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
            names = (name for bound in self._codes(key) for name in bound.code.inputs)
            self._inputs[key] = tuple(dict.fromkeys(names))
        self._results: dict[Span, list[Slot]] = {}
        for span, cut in training.items():
            results = {slot for bound in self._codes((True, span)) for slot in bound.code.results}
            self._results[span] = [slot for slot in cut.sent(index) if slot in results]

    def draws(self, training: bool, span: Span) -> bool:
        """Whether it draws random numbers, so that its micro-batches need a seed."""
        return any(bound.draws for bound in self._codes((training, span)))

    @property
    def adds_once(self) -> bool:
        """Whether a backward adds to the gradient of each leaf once: not where functions of the
        user run backwards of their own.
        """
        of_training = (cut for (trains, _), cut in self.cuts.items() if trains)
        return not any(
            isinstance(node.target, Opaque) and node.target.outline.functions
            for cut in of_training
            for node in cut.graph.operators
            if cut.stage_of[node.name] == self.index
        )

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
            states = [state for bound in codes for state in bound.arguments]
            used = states if version is None else version.replaced_in(states)
            pool = self._pool(micro_batch.number, used)
        before = None if self.writes is None else self.writes.begin()
        values = dict(arrived)
        for segment in self.segments:
            results = segment.forward(ForwardInputs(micro_batch, inputs, values, {}, version), pool)
            for slot, tensor in results.items():
                values[slot] = tensor.detach()
        if self.writes is not None and before is not None:
            self.writes.end(micro_batch.number, before)
        return {slot: values[slot] for slot in self._results[micro_batch.span]}

    def recompute(self, micro_batch: MicroBatch) -> None:
        """Run a forward again; if the stage has several segments, that of the last one."""
        self.segments[-1].recompute(micro_batch.number)

    def backward(
        self, micro_batch: MicroBatch, gradients: Tensors, weight: float | None, scale: float = 1.0
    ) -> Tensors:
        """Run the backward of a micro-batch, or its first half; parameter gradients accumulate.

        Args:
            gradients: of the stage's results, and of received values that later stages use too.
            weight: of the micro-batch in the loss, if this stage computes the loss; else None.
            scale: of the loss, in float16; it scales all gradients too.

        Returns:
            Gradients of what the stage received, by slot.
        """
        number = micro_batch.number
        self.saved.pop(number, None)  # none of it is offloaded after this
        returned = dict(gradients)
        if self.sums is not None:
            self.sums.micro_batch = number
        for segment in reversed(self.segments):
            if segment is not self.segments[-1]:
                segment.recompute(number)
            slots = segment.codes[micro_batch.span].returning
            entering = {slot: returned.pop(slot) for slot in slots if slot in returned}
            caught, version = segment.backward(number, entering, weight, scale)
            returned |= caught
            if self.sums is not None:
                self.sums.add(segment.leaves)
        if self.versions is not None and version is not None:
            self.versions.collect(version)
        if self.versions is not None:
            del version
            self.casts.drop([])  # if no further backward uses these weights
        return returned

    def finish_backward(self, micro_batch: int) -> None:
        """Run the second half of a backward: the deferred gradients of weights."""
        if self.sums is not None:
            self.sums.micro_batch = micro_batch
        for segment in reversed(self.segments):
            segment.finish_backward(micro_batch)
            if self.sums is not None:
                self.sums.add(segment.leaves)

    def evaluate(
        self, micro_batch: MicroBatch, inputs: Mapping[str, Tensor], arrived: Tensors
    ) -> Tensors:
        """Run the evaluation forward of a micro-batch; returns the results by slot."""
        bound = self._evaluation.codes[micro_batch.span]
        received = [arrived[slot] for slot in bound.code.received]
        states = copy_written(bound.arguments, bound.written)
        with torch.no_grad():
            results = self._evaluation.call(bound, micro_batch.seed, states, inputs, received)
        keep_written(bound.arguments, bound.written, states)
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
            for bound in segment.codes.values():
                bound.code = compile_stage(bound.code, mode=mode if isinstance(mode, str) else None)

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
        waiting = [each.version for each in kept if isinstance(each, Live | ForwardInputs)]
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

    def _codes(self, key: Key) -> list[BoundCode]:
        trains, span = key
        segments = self.segments if trains else [self._evaluation]
        return [segment.codes[span] for segment in segments]

    def share_casts(self, code: StageCode, graph: CapturedGraph) -> StageCode:
        """Let code of this stage take the casts of weights that its micro-batches share."""

        def tensor_of(state: State) -> Tensor:
            return (graph.constants if state.kind == "constant" else self._states)[state.name]

        return share_casts(code, graph, tensor_of, self._casting, self.casts)

    def _constant(self, name: str, tensor: Tensor) -> Tensor:
        """A constant of a graph on the device: one copy for all graphs, of training and evaluation
        and of each size, in which it is the same. Names count the constants of one graph.
        """
        known = self._constants.setdefault(name, [])
        for original, there in known:
            if original is tensor or is_equal(original, tensor):
                return there
        known.append((tensor, tensor.to(self.device)))
        return known[-1][1]

    def argument(self, cut: Cut, slot: Slot) -> Tensor:
        """A parameter or buffer of this stage, moved to the device in place."""
        state = cut.graph.states[slot.value]
        if state.kind == "constant":
            return self._constant(state.name, cut.graph.constants[state.name])
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

    def _pool(self, micro_batch: int, staying: Sequence[Tensor]) -> SavedTensors | None:
        """The pool for what a micro-batch keeps, if that is offloaded."""
        if self._mover is None:
            return None
        self.saved[micro_batch] = SavedTensors(staying, self.device, self._mover, self.casts)
        return self.saved[micro_batch]
