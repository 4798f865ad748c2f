"""Gradients at the end of a step: shared ones, their norms, and clipping by global norm.

All give the same bits in every plan: sums and norms are formed in model order, never by rank.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from pipectl.capture import Slot
from pipectl.runtime.loss_scale import alike
from pipectl.runtime.waiting import gather_all, wait

Uses = list[tuple[Slot, int]]
"""Uses of one parameter in graph order, each with its stage."""


class _Use(NamedTuple):
    """A use, with the ranks of its stage; ``branches`` if some steps may leave it out."""

    slot: Slot
    ranks: tuple[int, ...]
    branches: bool


class SharedGradients:
    """Gradients of parameters that several operators use (tied embeddings, for example).

    Each use accumulates on its own over the micro-batches; at the end of the step every rank that
    holds the parameter adds all uses in graph order. So neither the number of stages nor the place
    of the uses changes a bit.

    Args:
        communicator: of its own.
        shared: uses of every such parameter by full name, in model order.
        ranks_of_stage: the ranks of every stage, one a replica; each use's gradients are summed
            over them before.
        leaves: this rank's leaf of every use it computes.
        parameters: this rank's parameters by full name.
        branching: the stages in which a use may have a gradient in some steps only; whether it has
            travels with it.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        shared: Mapping[str, Uses],
        ranks_of_stage: Sequence[Sequence[int]],
        leaves: Mapping[Slot, Tensor],
        parameters: Mapping[str, nn.Parameter],
        branching: Container[int] = (),
    ) -> None:
        self._communicator = communicator
        self._leaves = leaves
        self._parameters = parameters
        self._users = {
            name: [
                _Use(slot, tuple(ranks_of_stage[stage]), stage in branching) for slot, stage in uses
            ]
            for name, uses in shared.items()
        }
        self._with_gradient: set[Slot] = set()

    def learn(self) -> None:
        """Agree, after a first backward, on the uses that a gradient reaches. Collective.

        Those that one reached in an earlier backward stay.
        """
        mine = [slot for slot, leaf in self._leaves.items() if leaf.grad is not None]
        self._with_gradient.update(*gather_all(self._communicator, mine))

    def reduce(self) -> None:
        """Give every parameter with several uses its whole gradient. Collective among holders."""
        for name, users in self._users.items():
            parameter = self._parameters.get(name)
            if parameter is not None and parameter.requires_grad:
                active = [use for use in users if use.branches or use.slot in self._with_gradient]
                holders = {rank for use in users for rank in use.ranks}
                gradients = self._exchange(parameter, active, holders)
                parameter.grad = _sum_in_order(gradients, parameter)
        for leaf in self._leaves.values():
            leaf.grad = None

    def _exchange(
        self, parameter: nn.Parameter, users: Sequence[_Use], holders: set[int]
    ) -> list[Tensor]:
        """The gradients of the uses, in graph order; others' from their first rank."""
        me = self._communicator.rank
        requests: list[MPI.Request] = []
        gradients: dict[int, Tensor | None] = {}
        messages: dict[int, np.ndarray[Any, Any]] = {}
        for index, use in enumerate(users):
            if me not in use.ranks:
                messages[index] = np.empty(parameter.nbytes + use.branches, dtype=np.uint8)
                requests.append(self._communicator.Irecv(messages[index], use.ranks[0], index))
                continue
            gradients[index] = self._leaves[use.slot].grad
            readers = sorted(holders - set(use.ranks)) if me == use.ranks[0] else []
            if readers:
                messages[index] = _packed(gradients[index], parameter, use)
            requests += [
                self._communicator.Isend(messages[index], other, index) for other in readers
            ]
        wait(requests)
        for index, use in enumerate(users):
            if index not in gradients:
                gradients[index] = _unpacked(messages[index], parameter, use)
        found = (gradients[index] for index in range(len(users)))
        return [gradient.to(parameter.device) for gradient in found if gradient is not None]


def _packed(gradient: Tensor | None, parameter: nn.Parameter, use: _Use) -> np.ndarray[Any, Any]:
    """The gradient of a use as a message; where it may be missing, a byte behind says if it is."""
    if not use.branches:
        assert gradient is not None
        return _bytes(gradient)
    message = np.zeros(parameter.nbytes + 1, dtype=np.uint8)
    if gradient is not None:
        message[:-1], message[-1] = _bytes(gradient), 1
    return message


def _unpacked(message: np.ndarray[Any, Any], parameter: nn.Parameter, use: _Use) -> Tensor | None:
    """What :func:`_packed` was given, on the host."""
    if use.branches and not message[-1]:
        return None
    found = torch.from_numpy(message[: parameter.nbytes])
    return found.view(parameter.dtype).view(parameter.shape)


def _sum_in_order(gradients: Sequence[Tensor], parameter: nn.Parameter) -> Tensor | None:
    """The sum from the first on, in the parameter's layout; None without gradients."""
    if not gradients:
        return None
    total = torch.empty_like(parameter).copy_(gradients[0])
    for gradient in gradients[1:]:
        total += gradient
    return total


def _bytes(gradient: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a gradient on the host, its own where it lies there in one piece."""
    host = gradient.detach().contiguous().cpu()
    return host.view(-1).view(torch.uint8).numpy()


def gradient_norms(parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """The norm of every gradient by the parameter's name; gradients are read once."""
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    norms: dict[int, float] = {}
    for same in alike(gradients.values()):
        values = torch.stack(torch._foreach_norm(same)).double().tolist()
        norms.update(zip(map(id, same), values, strict=True))
    return {name: norms[id(gradient)] for name, gradient in gradients.items()}


def not_finite(parameters: Mapping[str, nn.Parameter], norms: Mapping[str, float]) -> list[str]:
    """The parameters whose gradient has an element that is not finite.

    A norm is finite only if all elements are; it may be infinite though they are finite.
    """
    suspects = (name for name in parameters if not math.isfinite(norms.get(name, 0.0)))
    gradients = ((name, parameters[name].grad) for name in suspects)
    return [name for name, grad in gradients if grad is not None and not grad.isfinite().all()]


def total_norm(norms: Sequence[float | None], dtypes: Sequence[torch.dtype]) -> Tensor:
    """The norm of all gradients by torch's formula.

    Args:
        norms: of each gradient in model order, tied parameters once; None without a gradient.
            Float64 holds the norm of a narrower type to the bit.
        dtypes: of the parameters.
    """
    pairs = zip(norms, dtypes, strict=True)
    given = [(norm, dtype) for norm, dtype in pairs if norm is not None]
    types = [dtype for _, dtype in given]
    values = torch.tensor([norm for norm, _ in given], dtype=torch.float64)[_grouped(types)]
    widest = reduce(torch.promote_types, types or [torch.float32])
    norm: Tensor = torch.linalg.vector_norm(values.to(widest))
    return norm


def clip_gradients(parameters: Iterable[nn.Parameter], total: Tensor, max_norm: float) -> None:
    """Scale gradients so that a norm of ``total`` becomes at most ``max_norm``."""
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))


def _grouped(dtypes: Sequence[torch.dtype]) -> list[int]:
    """The order in which torch takes gradients of these types: one type after another."""
    if len(set(dtypes)) < 2:
        return list(range(len(dtypes)))
    columns: list[list[Tensor | None]] = [[torch.empty(0, dtype=dtype) for dtype in dtypes]]
    groups = _group_tensors_by_device_and_dtype(columns, with_indices=True)
    return [index for _, indices in groups.values() for index in indices]
