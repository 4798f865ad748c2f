"""Optimizer state shared out among the replicas of a stage (ZeRO stage 1).

Every parameter has one replica that gets the sum of its gradients, keeps its optimizer state and
updates it; the others receive the parameter. A parameter stays whole, so that any optimizer works,
and one that several operators use is updated by all its holders alike. The bits are those of
replicas that all update everything. (Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", SC 2020.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipectl.plan import owners
from pipectl.runtime.exchange import Exchange, Received, Sent


def owners_of(parameters: Mapping[str, Tensor], replicas: int) -> dict[str, int]:
    """The replica that updates each parameter, by the rule that plans count its state by."""
    return owners.owners_of({name: each.nbytes for name, each in parameters.items()}, replicas)


class Sharing:
    """Updated parameters of one stage on their way from their owners to the other replicas.

    Args:
        parameters: by name, the same on all replicas.
        owners: the replica that updates each.
    """

    def __init__(
        self, exchange: Exchange, parameters: Mapping[str, Tensor], owners: Mapping[str, int]
    ) -> None:
        self._exchange = exchange
        self._parameters = [
            (tag, parameters[name], owner) for tag, (name, owner) in enumerate(owners.items())
        ]

    def share(self) -> None:
        """Give every replica the parameters that others have updated."""
        sent: list[Sent] = []
        received: list[tuple[Tensor, Received]] = []
        for tag, parameter, owner in self._parameters:
            if owner == self._exchange.replica:
                vector = parameter.detach().contiguous().view(-1)
                sent += [self._exchange.send(vector, other, tag) for other in self._exchange.others]
            else:
                found = self._exchange.receive(parameter.numel(), parameter.dtype, owner, tag)
                received.append((parameter, found))
        self._exchange.wait([*sent, *(message for _, message in received)])
        with torch.no_grad():
            for parameter, message in received:
                parameter.copy_(self._exchange.arrived(message).view(parameter.shape))
