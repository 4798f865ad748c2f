"""Sums of gradients over the replicas of a stage, under way while the rank computes.

The gradients of a stage travel in buckets, the last layers' first, because a backward computes them
first. A bucket starts as soon as the stage's last backward of the step has computed all of it; the
rest start right after that backward. Autograd adds to a parameter once per backward, so a gradient
is complete when its hook is called. The sums are awaited at the end of the step, after the
backwards of the rank's other stages. They advance together with the pipeline's messages.

:mod:`pipectl.lanes` defines which rank sends what. Half precision, in which MPI cannot add, is
summed in float32 and rounded once.

Optimizer state may be sharded over the replicas (ZeRO stage 1). One replica per bucket then gets
its sums, keeps the optimizer state of its parameters and updates them; the others receive the
parameters. Parameters are not split, so that any optimizer works; one that several operators use is
updated by all its holders alike. The results are equal to the bit to those of replicas that all
update everything. (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020.)

In a reproducible training, a replica does not send the sum of its gradients but those of its roots
(:mod:`pipectl.schedule.sum_tree`), one after another, and the owner of a part adds the roots of all
replicas in the order of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from mpi4py import MPI
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pipectl.lanes import BUCKET_BYTES, ROUNDS, parts_of_bucket
from pipectl.runtime.sums import GradientSums
from pipectl.runtime.transport import Transfer, Wire
from pipectl.schedule.sum_tree import Node, total

Roots = Sequence[Sequence[Node]]
"""The roots of every replica in a step."""


def group_of(communicator: MPI.Comm, ranks: Sequence[int], tag: int) -> MPI.Comm:
    """A communicator of some ranks, in this order; collective among them."""
    assert isinstance(communicator, MPI.Intracomm)
    return communicator.Create_group(communicator.group.Incl(list(ranks)), tag)


class Bucket:
    """Gradients that travel together.

    One number per leaf travels along, which says whether any replica has a gradient of it: if none
    has, none is made.

    Args:
        wire: between the replicas, in their order.
        leaves: tensors of one type and device, whose ``grad`` is summed; the same on all replicas.
        owner: the replica that owns the whole bucket and alone gets the sum; None if each replica
            owns a part, and all get the sum.
        tag: of its messages; ``tag + 1`` is used too.
        sums: the gradients of the leaves, in a reproducible training.

    Attributes:
        roots: of the step, in a reproducible training.
    """

    def __init__(
        self,
        wire: Wire,
        leaves: Sequence[Tensor],
        owner: int | None,
        tag: int,
        sums: GradientSums | None = None,
    ) -> None:
        self._sums_of_roots = sums
        self.roots: Roots = [[(0, replica)] for replica in range(wire.size)]
        self._wire = wire
        self.leaves = tuple(leaves)
        self._owner = owner
        self._tag = tag
        ends = torch.tensor([0, *(leaf.numel() for leaf in leaves)]).cumsum(0).tolist()
        self._edges = list(pairwise(ends))
        self._parts = parts_of_bucket(ends[-1] + len(self.leaves), wire.size, owner)
        self._flat: Tensor | None = None
        """A row for each root, then the result in the first; a number per leaf at the end."""
        self._incoming: dict[int, Transfer] = {}
        self._sums: dict[int, Transfer] = {}
        self._sent: list[Transfer] = []
        self._summed = False

    @property
    def started(self) -> bool:
        """Whether it has started."""
        return self._flat is not None

    def start(self) -> None:
        """Send the other replicas their parts, and receive this replica's."""
        first, count = self.leaves[0], self._edges[-1][1] + len(self.leaves)
        own, others = self.roots[self._wire.rank], self._wire.others
        shape = max(1, len(own)), count
        self._flat = flat = torch.empty(shape, dtype=first.dtype, device=first.device)
        flags = flat[:, -len(self.leaves) :].fill_(1)  # no copy from the host, which would wait
        if self._sums_of_roots is not None:
            self._sums_of_roots.add(self.leaves)
        for index, (leaf, (start, stop)) in enumerate(zip(self.leaves, self._edges, strict=True)):
            for row, root in enumerate(own):
                gradient = self._gradient(leaf, root)
                if gradient is not None:
                    flat[row, start:stop].view(leaf.shape).copy_(gradient)
                else:
                    flat[row, start:stop].fill_(self._nothing)
                    flags[row, index].zero_()
        mine = len(self._parts[self._wire.rank])
        incoming = {replica: mine * len(self.roots[replica]) for replica in others}
        outgoing = {replica: self._part(replica, len(own)).reshape(-1) for replica in others}
        self._incoming = self._exchange(self._tag, incoming, outgoing)

    def advance(self) -> bool:
        """Sum and send this replica's part once all have sent it; returns whether that is done."""
        if not self._summed and all(transfer.done for transfer in self._incoming.values()):
            self._sum()
        return self._summed

    def settle(self) -> None:
        """Wait for the messages that this replica's part needs."""
        if not self._summed:
            self._wire.wait(self._incoming.values())
            self._sum()

    def finish(self) -> None:
        """Wait, and replace the gradients by the sums; without a sum, the gradient is None."""
        self.settle()
        self._wire.wait([*self._sent, *self._sums.values()])
        assert self._flat is not None
        for replica, transfer in self._sums.items():
            self._part(replica)[0].copy_(self._wire.arrived(transfer))
        is_here = self._owner in (None, self._wire.rank)
        flags = self._flat[0, -len(self.leaves) :].tolist() if is_here else [0] * len(self.leaves)
        for leaf, (start, stop), flag in zip(self.leaves, self._edges, flags, strict=True):
            if not flag:
                leaf.grad = None
                continue
            if leaf.grad is None:
                leaf.grad = torch.empty_like(leaf)
            leaf.grad.copy_(self._flat[0, start:stop].view(leaf.shape))
        self._flat, self._summed = None, False
        self._sums, self._sent = {}, []

    def start_sharing(self) -> None:
        """Send the leaves from their owner to the other replicas."""
        wire, owner = self._wire, self._owner
        if owner is None:
            return
        if owner != wire.rank:
            self._incoming = self._exchange(self._tag, {owner: self._edges[-1][1]}, {})
        else:
            vector = torch.cat([leaf.detach().reshape(-1) for leaf in self.leaves])
            self._exchange(self._tag, {}, dict.fromkeys(wire.others, vector))

    def finish_sharing(self) -> None:
        """Receive the leaves from their owner."""
        self._wire.wait([*self._sent, *self._incoming.values()])
        for transfer in self._incoming.values():
            vector = self._wire.arrived(transfer)
            with torch.no_grad():
                for leaf, (start, stop) in zip(self.leaves, self._edges, strict=True):
                    leaf.copy_(vector[start:stop].view(leaf.shape))
        self._incoming, self._sent = {}, []

    def _sum(self) -> None:
        """Sum this replica's part, and send it to the others unless it owns the whole bucket."""
        wire, mine = self._wire, self._part(self._wire.rank, len(self.roots[self._wire.rank]))
        own = self._part(self._wire.rank)[0]
        if len(own):
            parts = {replica: wire.arrived(each) for replica, each in self._incoming.items()}
            parts[wire.rank] = mine
            rows = {
                root: row
                for replica, part in sorted(parts.items())
                for root, row in zip(
                    self.roots[replica],
                    part.view(len(self.roots[replica]), len(own)),
                    strict=True,
                )
            }
            plain = self._sums_of_roots is None
            own.copy_(_added([*rows.values()]) if plain else total(rows, torch.add))
        self._incoming, self._summed = {}, True
        if self._owner is None:
            incoming = {replica: len(self._parts[replica]) for replica in wire.others}
            outgoing = dict.fromkeys(wire.others, own)
            self._sums = self._exchange(self._tag + 1, incoming, outgoing)

    @property
    def _nothing(self) -> float:
        """What stands for a gradient that is missing; adding -0.0 changes no bit of any number."""
        return 0.0 if self._sums_of_roots is None else -0.0

    def _gradient(self, leaf: Tensor, root: Node) -> Tensor | None:
        return leaf.grad if self._sums_of_roots is None else self._sums_of_roots.take(leaf, root)

    def _part(self, replica: int, rows: int = 1) -> Tensor:
        """The part of a replica in the first rows."""
        assert self._flat is not None
        part = self._parts[replica]
        return self._flat[:rows, part.start : part.stop]

    def _exchange(
        self, tag: int, incoming: Mapping[int, int], outgoing: Mapping[int, Tensor]
    ) -> dict[int, Transfer]:
        """Start sending vectors to replicas, and receiving vectors of some lengths from them."""
        wire, dtype = self._wire, self.leaves[0].dtype
        what = "a bucket of gradients or parameters, from replica {} of the stage to {},".format
        received = {
            replica: wire.receive(count, dtype, replica, tag, partial(what, replica, wire.rank))
            for replica, count in incoming.items()
            if count
        }
        self._sent += [
            wire.send(each, replica, tag) for replica, each in outgoing.items() if len(each)
        ]
        return received


def _added(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order of ``parts``, in float32 at least."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total


class StageReduction:
    """The sums of one stage.

    Args:
        wire: between the replicas, in their order.
        leaves: tensors in which the stage accumulates gradients, by a name that is the same on all
            replicas, in model order.
        owners: by leaf, the replica that alone gets its sum and updates it; the sums of other
            leaves go to all.
        sums: the gradients of the leaves, in a reproducible training.
        roots_of: returns the roots of all replicas in a step of so many micro-batches, then.
    """

    def __init__(
        self,
        wire: Wire,
        leaves: Mapping[str, Tensor],
        owners: Mapping[str, int] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        sums: GradientSums | None = None,
        roots_of: Callable[[int], Roots] | None = None,
    ) -> None:
        self._roots_of = roots_of
        groups: list[tuple[int | None, list[Tensor]]] = []
        open_: dict[object, list[Tensor]] = {}
        for name in reversed([*leaves]):
            leaf, owner = leaves[name], (owners or {}).get(name)
            key = owner, leaf.dtype, leaf.device
            if key not in open_:
                open_[key] = []
                groups.append((owner, open_[key]))
            open_[key].append(leaf)
            if sum(each.nbytes for each in open_[key]) >= bucket_bytes:
                del open_[key]
        self._buckets = [
            Bucket(wire, group, owner, ROUNDS * index, sums)
            for index, (owner, group) in enumerate(groups)
        ]
        self._arriving: list[Bucket] = []
        self._missing: dict[int, int] = {}
        self._armed = False
        self._hooks: list[RemovableHandle] = []

    def begin(self, micro_batches: int) -> None:
        """Prepare for a step of so many micro-batches."""
        if self._roots_of is not None:
            roots = self._roots_of(micro_batches)
            for bucket in self._buckets:
                bucket.roots = roots

    def arm(self) -> None:
        """Announce that the next backward is the last one of the step.

        Its hooks start sums. On accelerators, autograd calls them in a thread of its own while this
        one waits; if MPI does not allow calls from there, all sums start after the backward.
        """
        is_called_here = all(bucket.leaves[0].device.type == "cpu" for bucket in self._buckets)
        if not is_called_here and MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            return
        if not self._hooks:  # not earlier, to distinguish hooks of user code
            for index, bucket in enumerate(self._buckets):
                for leaf in bucket.leaves:
                    count = partial(self._count, index)
                    hook = leaf.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)
        self._missing = {i: len(bucket.leaves) for i, bucket in enumerate(self._buckets)}
        self._armed = True

    def close(self) -> None:
        """Remove its hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def start(self) -> None:
        """Start the remaining sums: all gradients are complete."""
        self._armed = False
        for bucket in self._buckets:
            if not bucket.started:
                self._start(bucket)

    def advance(self) -> None:
        """Advance every bucket that has started, once."""
        self._arriving = [bucket for bucket in self._arriving if not bucket.advance()]

    def finish(self) -> None:
        """Return when every gradient is the sum over all replicas."""
        for bucket in self._arriving:
            bucket.settle()
        self._arriving = []
        for bucket in self._buckets:
            bucket.finish()

    def share(self) -> None:
        """Send the parameters that their owners have updated to every replica."""
        for bucket in self._buckets:
            bucket.start_sharing()
        for bucket in self._buckets:
            bucket.finish_sharing()

    def _count(self, index: int, _: Tensor) -> None:
        """Hook: a leaf of a bucket has its gradient."""
        if self._armed:
            self._missing[index] -= 1
            if not self._missing[index]:
                self._start(self._buckets[index])

    def _start(self, bucket: Bucket) -> None:
        bucket.start()
        self._arriving.append(bucket)
