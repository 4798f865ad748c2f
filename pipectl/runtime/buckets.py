"""One bucket of gradients on its way to their sum over all replicas.

Who sends whom what is in :mod:`pipectl.plan.sums`. Half precision is added in float32, which MPI
cannot do, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pipectl.plan.sums import parts_of_bucket
from pipectl.runtime.exchange import Exchange, Received, Sent


class Bucket:
    """Gradients that travel together.

    Args:
        leaves: tensors of one type and device, whose ``grad`` is summed; the same on all replicas.
        owner: the replica that owns all of it, and alone gets the sum; None if each owns a part,
            and all get everything.
        tag: of its messages, with the next.
        with_flags: whether a number for every leaf travels along, which tells if any replica has a
            gradient of it: where none has, none is made.
    """

    def __init__(
        self,
        exchange: Exchange,
        leaves: Sequence[Tensor],
        owner: int | None,
        tag: int,
        *,
        with_flags: bool = False,
    ) -> None:
        self._exchange = exchange
        self.leaves = tuple(leaves)
        self._owner = owner
        self._tag = tag
        ends = torch.tensor([0, *(leaf.numel() for leaf in leaves)]).cumsum(0).tolist()
        self._edges = list(pairwise(ends))
        self._flags = len(self.leaves) if with_flags else 0
        self._count = ends[-1] + self._flags
        self._parts = parts_of_bucket(self._count, exchange.replicas, owner)
        self._flat: Tensor | None = None
        self._incoming: list[tuple[int, Received]] = []
        self._sums: list[tuple[int, Received]] = []
        self._sent: list[Sent] = []
        self._summed = False

    @property
    def started(self) -> bool:
        """Whether it is on its way."""
        return self._flat is not None

    def start(self) -> None:
        """Send others their parts, and receive one's own."""
        first = self.leaves[0]
        flat = torch.empty(self._count, dtype=first.dtype, device=first.device)
        self._flat = flat
        for leaf, (start, stop) in zip(self.leaves, self._edges, strict=True):
            part = flat[start:stop].view(leaf.shape)
            part.zero_() if leaf.grad is None else part.copy_(leaf.grad)
        if self._flags:
            has = [leaf.grad is not None for leaf in self.leaves]
            flat[-self._flags :].copy_(torch.tensor(has))
        mine, exchange = self._parts[self._exchange.replica], self._exchange
        for replica in exchange.others:
            if len(mine):
                self._incoming.append(
                    (replica, exchange.receive(len(mine), first.dtype, replica, self._tag))
                )
            theirs = self._parts[replica]
            if len(theirs):
                part = flat[theirs.start : theirs.stop]
                self._sent.append(exchange.send(part, replica, self._tag))

    def advance(self) -> bool:
        """Add up one's own part once all have sent it, and send it on; whether that is done."""
        if not self._summed and self._exchange.are_complete([got for _, got in self._incoming]):
            self._sum()
        return self._summed

    def settle(self) -> None:
        """Wait for what one's own part needs."""
        if not self._summed:
            self._exchange.wait([message for _, message in self._incoming])
            self._sum()

    def finish(self) -> None:
        """Wait, and put the sums in the place of the gradients; without a sum, none stays."""
        self.settle()
        self._exchange.wait([*self._sent, *(message for _, message in self._sums)])
        assert self._flat is not None
        for replica, message in self._sums:
            part = self._parts[replica]
            self._flat[part.start : part.stop] = self._exchange.arrived(message)
        found = self._flat[-self._flags :].tolist() if self._flags else [True] * len(self.leaves)
        for leaf, (start, stop), has in zip(self.leaves, self._edges, found, strict=True):
            self._put(leaf, self._flat[start:stop].view(leaf.shape), bool(has))
        self._reset()

    def _put(self, leaf: Tensor, total: Tensor, has: bool) -> None:
        if not has or self._owner not in (None, self._exchange.replica):
            leaf.grad = None
        elif leaf.grad is None:
            leaf.grad = torch.empty_like(leaf).copy_(total)
        else:
            leaf.grad.copy_(total)

    def _sum(self) -> None:
        """One's own part; the others receive it, unless it is nobody else's."""
        assert self._flat is not None
        exchange, mine = self._exchange, self._parts[self._exchange.replica]
        if len(mine):
            own = self._flat[mine.start : mine.stop]
            arrived = {replica: exchange.arrived(message) for replica, message in self._incoming}
            own.copy_(_added([*(arrived[r] for r in arrived if r < exchange.replica), own,
                              *(arrived[r] for r in arrived if r > exchange.replica)]))  # fmt: skip
        self._incoming, self._summed = [], True
        if self._owner is None:
            self._share(mine)

    def _share(self, mine: range) -> None:
        assert self._flat is not None
        for replica in self._exchange.others:
            theirs = self._parts[replica]
            if len(theirs):
                dtype, tag = self._flat.dtype, self._tag + 1
                found = self._exchange.receive(len(theirs), dtype, replica, tag)
                self._sums.append((replica, found))
            if len(mine):
                part = self._flat[mine.start : mine.stop]
                self._sent.append(self._exchange.send(part, replica, self._tag + 1))

    def _reset(self) -> None:
        self._flat, self._summed = None, False
        self._sums, self._sent = [], []


def _added(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order given, in float32 at least."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total
