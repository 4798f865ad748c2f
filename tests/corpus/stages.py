"""Training the stages of a cut in one process, each with memory of its own, as ranks have it.

Forwards run in the order of the stages, backwards in the reverse order; every value between two
stages passes through the form it has in a message. A stage may also have its backward apart, as on
another rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedJob, Cut, Slot, evaluation_stages
from pipectl.capture.randomness import seed_of
from pipectl.capture.slices import Span
from pipectl.lanes import TransferKind
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.gradients import shared_uses
from pipectl.runtime.layout import Layout
from pipectl.runtime.pipefb import BackwardHalf, ForwardHalf, places_of
from pipectl.runtime.segment import MicroBatch
from pipectl.runtime.stage import Stage

RATE, MOMENTUM = 0.001, 0.9
Batch = tuple[Any, Any]


class _Own(dict[str, Tensor]):
    """Copies of the parameters and buffers that a stage asks for."""

    def __init__(self, states: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._states = states

    def __missing__(self, name: str) -> Tensor:
        tensor = self._states[name]
        copy = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
        self[name] = copy
        return copy


class _Wire:
    """To the other half of a stage, in this process."""

    def __init__(self) -> None:
        self._objects: defaultdict[int, list[Any]] = defaultdict(list)

    def send_object(self, value: Any, _rank: int, tag: int) -> None:
        self._objects[tag].append(deepcopy(value))

    def receive_object(self, _rank: int, tag: int) -> Any:
        return self._objects[tag].pop(0)


class Stages:
    """The stages of a cut.

    Args:
        size: samples of a micro-batch.
        stage_of: stage of every operator of the training graph.
        recompute: whether backwards compute the forward again.
        evaluates: whether :meth:`evaluate` is called.
        apart: whether every stage has two halves, as on two ranks.
    """

    def __init__(
        self,
        job: CapturedJob,
        size: int,
        stage_of: Mapping[str, int],
        *,
        recompute: bool = False,
        evaluates: bool = True,
        apart: bool = False,
    ) -> None:
        training = job.training_graph(size)
        self.cut = Cut(training, stage_of, training=True)
        self._job, self._span, self._recompute = job, Span.of(size), recompute
        cuts = {(True, self._span): self.cut}
        given = CpuDevice(), job.spec.training.precision
        if evaluates:
            evaluation = job.evaluation_graph(size)
            in_evaluation = evaluation_stages(evaluation, training, stage_of)
            self.evaluation_cut = Cut(evaluation, in_evaluation, training=False)
            cuts[False, self._span] = self.evaluation_cut
        wire: Any = _Wire()
        self.forwards: list[Stage] = []
        self.backwards: list[Stage] = []
        for index in range(1 + max(stage_of.values())):
            ways: list[Any] = [partial(ForwardHalf, wire, 0), partial(BackwardHalf, wire, 0)]
            halves = [
                way(index, cuts, _Own(job.states), *given, recompute=recompute)
                for way in (ways if apart else [Stage])
            ]
            self.forwards.append(halves[0])
            self.backwards.append(halves[-1])
        self._drawn: dict[int, MicroBatch] = {}
        self._saved: dict[tuple[int, int], dict[Slot, Tensor | None]] = {}
        self._returned: list[tuple[Tensor, Tensor]] = []
        """Gradients that left a stage, and copies made then: they must stay as they were, though
        autograd may add to a parameter's gradient in the same memory."""
        self._loss = Slot(training.loss)
        self._arrived: defaultdict[tuple[TransferKind, int, int], dict[Slot, Tensor | None]]
        self._arrived = defaultdict(dict)
        self._shared = shared_uses(self.cut)
        trained = [[p for p in s.parameters.values() if p.requires_grad] for s in self.backwards]
        self._optimizers = [
            torch.optim.SGD(some, lr=RATE, momentum=MOMENTUM) for some in trained if some
        ]

    def step(self, number: int, micro_batches: list[Batch]) -> dict[str, Tensor]:
        """One optimizer step; returns losses and gradients by name."""
        found: dict[str, Tensor] = {}
        # as GPipe; else one forward, one backward
        forwards_first = number % 2 == 1 or self._recompute
        for index, batch in enumerate(micro_batches):
            seed = seed_of("step", number, index)
            found[f"step {number} loss {index}"] = self._forward(index, seed, batch)
            if not forwards_first:
                self._backward(index, 1 / len(micro_batches))
        for index in range(len(micro_batches) if forwards_first else 0):
            self._backward(index, 1 / len(micro_batches))
        self._add_uses()
        assert all(torch.equal(gradient, copy) for gradient, copy in self._returned)
        self._returned.clear()
        for stage in self.backwards:
            for name, parameter in stage.parameters.items():
                if parameter.grad is not None:
                    _note(found, f"step {number} gradient of {name}", parameter.grad)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._hand_over_weights()
        return found

    def states(self) -> dict[str, Tensor]:
        """Parameters and buffers by full name; several copies of one must agree."""
        found: dict[str, Tensor] = {}
        for front, back in zip(self.forwards, self.backwards, strict=True):
            parameters = (*front.parameters.items(), *back.parameters.items())
            for name, tensor in (*parameters, *front.buffers.items()):
                _note(found, name, tensor.detach())
        return found

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Loss and outputs of the evaluation graph, by name."""
        cut = self.evaluation_cut
        known = dict(zip(cut.graph.inputs, pytree.tree_leaves(batch), strict=True))
        arrived: dict[int, dict[Slot, Tensor | None]] = defaultdict(dict)
        for index, stage in enumerate(self.forwards):
            inputs = {name: known[name] for name in stage.inputs(False, self._span)}
            made = stage.evaluate(
                MicroBatch(0, self._span, seed_of("evaluation")), inputs, arrived[index]
            )
            arrived[index].update(made)
            for lane, slots in cut.lanes.items():
                if lane.source == index:
                    arrived[lane.target].update({s: _sent(made.get(s)) for s in slots})
        last = {**known, **{slot.value: t for slot, t in arrived[cut.loss_stage].items()}}
        outputs = [last[o] for o in cut.graph.outputs if isinstance(o, str)]
        tensors = {f"evaluation output {i}": output for i, output in enumerate(outputs)}
        return {"evaluation loss": last[cut.graph.loss], **tensors}

    def _forward(self, micro_batch: int, seed: int, batch: Batch) -> Tensor:
        known = dict(zip(self.cut.graph.inputs, pytree.tree_leaves(batch), strict=True))
        loss: Tensor | None = None
        drawn = self._drawn[micro_batch] = MicroBatch(micro_batch, self._span, seed)
        for index, stage in enumerate(self.forwards):
            inputs = {name: known[name] for name in stage.inputs(True, self._span)}
            given = self._arrived.pop((TransferKind.ACTIVATION, index, micro_batch), {})
            made = stage.forward(drawn, inputs, given)
            loss = made.get(self._loss, loss)
            places = (Slot(str(place)) for place in range(places_of(self.cut, index)))
            self._saved[index, micro_batch] = {slot: made.get(slot) for slot in places}
            self._deliver(TransferKind.ACTIVATION, index, micro_batch, made)
        assert loss is not None
        return loss.clone()

    def _backward(self, micro_batch: int, weight: float) -> None:
        self._hand_over_saved(micro_batch)
        for index, stage in reversed(list(enumerate(self.backwards))):
            gradients = self._arrived.pop((TransferKind.GRADIENT, index, micro_batch), {})
            latest_first = dict(sorted(gradients.items(), key=self._latest_use, reverse=True))
            if self._recompute:
                stage.recompute(MicroBatch(micro_batch, self._span))
            made = stage.backward(MicroBatch(micro_batch, self._span), latest_first, weight)
            self._returned += [(t, t.clone()) for t in made.values() if t is not None]
            self._deliver(TransferKind.GRADIENT, index, micro_batch, made)

    def _deliver(
        self, kind: TransferKind, stage: int, micro_batch: int, made: Mapping[Slot, Tensor | None]
    ) -> None:
        for lane, slots in self.cut.lanes.items():
            if lane.kind is kind and lane.source == stage:
                sent = {slot: _sent(made.get(slot)) for slot in slots}
                self._arrived[kind, lane.target, micro_batch].update(sent)

    def _latest_use(self, item: tuple[Slot, Any]) -> int:
        users = self.cut.graph.users.get(item[0].value, ("",))
        return self.cut.graph.position.get(users[-1], -1)

    def _hand_over_saved(self, micro_batch: int) -> None:
        """From halves whose next forwards may have run while it was on its way."""
        for index, (front, back) in enumerate(zip(self.forwards, self.backwards, strict=True)):
            if isinstance(front, ForwardHalf):
                left = self._saved.pop((index, micro_batch))
                sent = {slot: _sent(tensor) for slot, tensor in left.items()}
                back.arriving(self._drawn[micro_batch], sent)

    def _hand_over_weights(self) -> None:
        """From the halves that train them."""
        for front, back in zip(self.forwards, self.backwards, strict=True):
            if isinstance(front, ForwardHalf):
                weights = {slot: _sent(tensor) for slot, tensor in back.weights().items()}
                front.arriving(MicroBatch(0, self._span), weights)

    def _add_uses(self) -> None:
        """Sum the gradients of a parameter's uses in graph order, for every stage's copy."""
        for name, uses in self._shared.items():
            leaves = [self.backwards[stage].uses[slot] for slot, stage in uses]
            gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
            for stage in self.backwards:
                parameter = stage.parameters.get(name)
                if parameter is not None and gradients:
                    parameter.grad = torch.empty_like(parameter).copy_(gradients[0])
                    for gradient in gradients[1:]:
                        parameter.grad += gradient
            for leaf in leaves:
                leaf.grad = None


def _sent(tensor: Tensor | None) -> Tensor | None:
    """What arrives of a tensor that is sent."""
    if tensor is None:
        return None
    layout = Layout.of(tensor)
    return layout.unflatten(layout.flatten(tensor).clone())


def _note(found: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    assert name not in found or torch.equal(found[name], tensor), f"{name} differs among stages"
    found[name] = tensor.detach().clone()
