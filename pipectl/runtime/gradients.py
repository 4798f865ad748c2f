"""Gradients at the end of a step: shared ones, norms, clipping by global norm, scales of float16.

All results have the same bits in every plan: sums and norms are formed in model order, never by
rank.

Gradients of float16 values easily underflow, so the loss is multiplied by a scale before the
backward, by the rule of ``torch.amp.GradScaler``. If that makes a gradient infinite, on any rank,
no rank may step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial, reduce

import torch
from torch import Tensor, nn

from pipectl.capture import Cut, Slot
from pipectl.capture.stage import uses_of_parameter
from pipectl.runtime.finite import alike, norms_of
from pipectl.runtime.manifest import LossScaleState
from pipectl.runtime.optimizer import refuse_half_parameters
from pipectl.runtime.transport import Transfer, Wire
from pipectl.spec.models import LossScale as LossScaleSpec
from pipectl.torch_api import order_in_groups, unscale, update_scale

Uses = list[tuple[Slot, int]]
"""Uses of one parameter in graph order, each with its stage."""


def shared_uses(cut: Cut) -> dict[str, Uses]:
    """Parameters with several uses: for each, its uses in graph order with their stages."""
    shared: dict[str, Uses] = {}
    for placeholder, state in cut.graph.states.items():
        users = uses_of_parameter(cut.graph, placeholder)
        if users:
            shared[state.name] = [(Slot(state.name, user), cut.stage_of[user]) for user in users]
    return shared


class SharedGradients:
    """Gradients of parameters that several operators use (tied embeddings, for example).

    Each use accumulates separately over the micro-batches; at the end of the step, every rank that
    holds the parameter adds all uses in graph order. So neither the number of stages nor the place
    of the uses changes a bit. A number after the gradient of a use says whether there is one.

    Args:
        wire: between all ranks.
        shared: uses of every such parameter by full name, in model order.
        ranks_of_stage: the ranks of every stage, one per replica; the gradients of each use are
            already summed over them.
        leaves: this rank's leaf of every use that it computes.
        parameters: this rank's parameters by full name.
    """

    def __init__(
        self,
        wire: Wire,
        shared: Mapping[str, Uses],
        ranks_of_stage: Sequence[Sequence[int]],
        leaves: Mapping[Slot, Tensor],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self._wire = wire
        self._leaves = leaves
        self._uses = [
            (parameters[name], [(slot, ranks_of_stage[stage]) for slot, stage in uses])
            for name, uses in shared.items()
            if name in parameters and parameters[name].requires_grad
        ]

    def reduce(self) -> None:
        """Sum the gradient of every parameter with several uses. Collective among its holders."""
        for parameter, uses in self._uses:
            gradients, total = self._exchange(parameter, uses), None
            if gradients:
                total = torch.empty_like(parameter).copy_(gradients[0])
                for gradient in gradients[1:]:
                    total += gradient
            parameter.grad = total
        for leaf in self._leaves.values():
            leaf.grad = None

    def _exchange(
        self, parameter: nn.Parameter, uses: Sequence[tuple[Slot, Sequence[int]]]
    ) -> list[Tensor]:
        """The gradients of the uses, in graph order; those of other ranks from the first rank."""
        wire, count = self._wire, parameter.numel() + 1
        holders = {rank for _, ranks in uses for rank in ranks}
        incoming: dict[int, Transfer] = {}
        sent: list[Transfer] = []
        for tag, (slot, ranks) in enumerate(uses):
            if wire.rank not in ranks:
                what = partial("the gradient of a use of {}".format, slot.value)
                incoming[tag] = wire.receive(count, parameter.dtype, ranks[0], tag, what)
                continue
            readers = sorted(holders - set(ranks)) if wire.rank == ranks[0] else []
            if readers:
                message, gradient = parameter.new_zeros(count), self._leaves[slot].grad
                if gradient is not None:
                    message[:-1].copy_(gradient.reshape(-1))
                    message[-1] = 1
                sent += [wire.send(message, reader, tag) for reader in readers]
        wire.wait([*incoming.values(), *sent])
        gradients: list[Tensor | None] = []
        for tag, (slot, _) in enumerate(uses):
            if tag not in incoming:
                gradients.append(self._leaves[slot].grad)
                continue
            message = wire.arrived(incoming[tag])
            gradients.append(message[:-1].view(parameter.shape) if message[-1] else None)
        return [gradient for gradient in gradients if gradient is not None]


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients of the parameters that have one."""
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def gradient_norms(parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """The norm of every gradient by the parameter's name; gradients are read once."""
    return norms_of(gradients_of(parameters))


def total_norm(norms: Sequence[float | None], dtypes: Sequence[torch.dtype]) -> Tensor:
    """The norm of all gradients by torch's formula.

    Args:
        norms: of each gradient in model order, tied parameters once; None without a gradient.
            Float64 represents the norm of a narrower type exactly.
        dtypes: of the parameters.
    """
    pairs = zip(norms, dtypes, strict=True)
    pairs_with_norm = [(norm, dtype) for norm, dtype in pairs if norm is not None]
    types = [dtype for _, dtype in pairs_with_norm]
    order: Sequence[int] = range(len(types))
    if len(set(types)) > 1:  # torch handles one type after another
        columns: list[list[Tensor | None]] = [[torch.empty(0, dtype=dtype) for dtype in types]]
        order = order_in_groups(columns)
    values = torch.tensor([pairs_with_norm[index][0] for index in order], dtype=torch.float64)
    widest = reduce(torch.promote_types, types or [torch.float32])
    norm: Tensor = torch.linalg.vector_norm(values.to(widest))
    return norm


def clip_gradients(parameters: Iterable[nn.Parameter], total: Tensor, max_norm: float) -> None:
    """Scale gradients so that a total norm of ``total`` becomes at most ``max_norm``."""
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)  # a number of the host, for which no accelerator waits


GROWTH, BACKOFF = 2.0, 0.5
"""Factors by which the scale grows and shrinks; the defaults of ``GradScaler``."""


class LossScale:
    """The scale of a training, the same on all ranks at all times.

    Args:
        parameters: this rank's trained parameters, by full name.

    Raises:
        CaptureError: a parameter is in float16 itself, so that its gradient cannot be unscaled.
    """

    def __init__(self, spec: LossScaleSpec, parameters: Mapping[str, nn.Parameter]) -> None:
        refuse_half_parameters(parameters)
        self._parameters = tuple(parameters.values())
        self._interval = spec.growth_interval
        self._scale = torch.tensor(spec.initial, dtype=torch.float32)
        self._steps_since = torch.zeros((), dtype=torch.int32)

    @property
    def value(self) -> float:
        """The factor of the next step's loss."""
        return float(self._scale)

    @property
    def state(self) -> LossScaleState:
        """The state for a checkpoint."""
        return LossScaleState(float(self._scale), int(self._steps_since))

    def restore(self, state: LossScaleState) -> None:
        """Continue from a checkpoint."""
        self._scale.fill_(state.scale)
        self._steps_since.fill_(state.steps_since)

    def unscale(self) -> bool:
        """Divide this rank's gradients by the scale; returns whether one is infinite or NaN."""
        inverse = self._scale.double().reciprocal().float()
        overflow = False
        for gradients in alike(p.grad for p in self._parameters if p.grad is not None):
            is_infinite = unscale(gradients, inverse.to(gradients[0].device))
            overflow = overflow or bool(is_infinite)
        return overflow

    def update(self, *, overflow: bool) -> None:
        """Choose the scale of the next step.

        Args:
            overflow: whether a gradient overflowed on any rank.
        """
        update_scale(
            self._scale,
            self._steps_since,
            torch.tensor(float(overflow)),
            GROWTH,
            BACKOFF,
            self._interval,
        )
