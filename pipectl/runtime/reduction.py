"""Sums of gradients over the replicas of a stage, under way while the rank computes.

The gradients of a stage travel in buckets, the last layers' first, because a backward makes them
first. A bucket starts as soon as the stage's last backward of the step has made all of it, the rest
right after that backward. Autograd adds to a parameter once per backward, so a gradient is whole
when its hook is called. The sums are awaited at the end of the step, after the backwards of the
rank's other stages. Whatever moves the pipeline's messages moves these, too.

Who sends whom what is in :mod:`pipectl.plan.sums`. Half precision is added in float32, which MPI
cannot do, and rounded once.

"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from mpi4py import MPI
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pipectl.plan.sums import BUCKET_BYTES, parts_of_bucket
from pipectl.runtime.device import Device
from pipectl.runtime.transport import Progress
from pipectl.runtime.transport.transfer import Transfer, memory
from pipectl.runtime.waiting import gather_all


@dataclass
class Sent:
    """A vector on its way; holds its memory."""

    transfer: Transfer
    buffer: Tensor


@dataclass
class Received:
    """A vector that arrives in ``buffer``."""

    transfer: Transfer
    buffer: Tensor


class Exchange:
    """Point-to-point messages of one stage's replicas.

    Args:
        communicator: of these replicas alone, in their order.
    """

    def __init__(self, communicator: MPI.Comm, device: Device, progress: Progress) -> None:
        self._communicator = communicator
        self._device = device
        self._progress = progress
        self.replica = communicator.rank
        self.replicas = communicator.size

    @property
    def others(self) -> list[int]:
        """All other replicas, ascending."""
        return [index for index in range(self.replicas) if index != self.replica]

    def send(self, vector: Tensor, replica: int, tag: int) -> Sent:
        """Begin to send a contiguous vector, which must not change until it has left."""
        pieces, communicator = self._progress.pieces, self._communicator
        buffer = self._device.to_message(vector, pieces.size_bytes)

        def start(offset: int, size_bytes: int) -> MPI.Request | None:
            if not buffer.is_free(offset // pieces.size_bytes):
                return None
            return communicator.Isend(memory(buffer.vector, offset, size_bytes), replica, tag)

        size_bytes = buffer.vector.nbytes
        begun = self._progress.begin(lambda: Transfer.send(start, size_bytes, pieces))
        return Sent(begun, buffer.vector)

    def receive(self, count: int, dtype: torch.dtype, replica: int, tag: int) -> Received:
        """Begin to receive a vector."""
        pieces, communicator = self._progress.pieces, self._communicator
        buffer = self._device.message_buffer(count, dtype)

        def start(offset: int, size_bytes: int) -> MPI.Request | None:
            if not buffer.is_free(offset // pieces.size_bytes):
                return None
            return communicator.Irecv(memory(buffer.vector, offset, size_bytes), replica, tag)

        def what() -> str:
            return f"a sum of gradients, from replica {replica} of the stage to {self.replica},"

        total_bytes = buffer.vector.nbytes
        begun = self._progress.begin(lambda: Transfer.receive(start, total_bytes, pieces, what))
        return Received(begun, buffer.vector)

    def arrived(self, received: Received) -> Tensor:
        """A vector that has arrived, on the device."""
        return self._device.from_message(received.buffer)

    def are_complete(self, messages: Sequence[Sent | Received]) -> bool:
        """Whether messages were complete when all messages last advanced."""
        return all(message.transfer.done for message in messages)

    def wait(self, messages: Sequence[Sent | Received]) -> None:
        """Return when messages are complete."""
        self._progress.wait([message.transfer for message in messages])

    def agreed(self, names: Sequence[str]) -> set[str]:
        """What any replica names. Collective."""
        return set().union(*gather_all(self._communicator, list(names)))


def group_of(communicator: MPI.Comm, ranks: Sequence[int], tag: int) -> MPI.Comm:
    """A communicator of some ranks, in this order; collective among them."""
    assert isinstance(communicator, MPI.Intracomm)
    return communicator.Create_group(communicator.group.Incl(list(ranks)), tag)


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


class StageReduction:
    """The sums of one stage.

    Args:
        leaves: by a name that all replicas give them, in model order: what the stage accumulates
            gradients in.
        owners: the replica that alone gets the sum of a leaf; all get those of others.
        branches: whether a step may leave some leaves without gradient: those that no replica has
            one of get none.
    """

    def __init__(
        self,
        stage: int,
        exchange: Exchange,
        leaves: Mapping[str, Tensor],
        owners: Mapping[str, int] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        branches: bool = False,
    ) -> None:
        self.stage = stage
        self._branches = branches
        self._known: set[str] = set()
        self._exchange = exchange
        self._leaves = leaves
        self._owners = owners or {}
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        self._arriving: list[Bucket] = []
        self._missing: dict[int, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._armed = False

    def learn(self) -> None:
        """Agree, after a first backward, on what has gradients, with what had some in earlier ones.

        Collective among the replicas.
        """
        mine = [name for name, leaf in self._leaves.items() if leaf.grad is not None]
        self._known |= self._exchange.agreed(mine)
        known = self._leaves if self._branches else self._known
        names = [name for name in reversed(list(self._leaves)) if name in known]
        groups = _groups(names, self._leaves, self._owners, self._bucket_bytes)
        self._buckets = [
            self._bucket([self._leaves[name] for name in group], owner, index)
            for index, (owner, group) in enumerate(groups)
        ]
        for handle in self._hooks:
            handle.remove()
        self._hooks = [
            leaf.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, bucket in enumerate(self._buckets)
            for leaf in bucket.leaves
        ]

    def _bucket(self, leaves: Sequence[Tensor], owner: int | None, index: int) -> Bucket:
        return Bucket(self._exchange, leaves, owner, 2 * index, with_flags=self._branches)

    def arm(self) -> None:
        """The next backward is the last one of the step."""
        self._missing = {i: len(bucket.leaves) for i, bucket in enumerate(self._buckets)}
        self._armed = True

    def start(self) -> None:
        """All gradients are there: start what has not started."""
        self._armed = False
        for bucket in self._buckets:
            if not bucket.started:
                self._start(bucket)

    def advance(self) -> None:
        """Go on with what has arrived: looks once at every bucket that is on its way."""
        self._arriving = [bucket for bucket in self._arriving if not bucket.advance()]

    def finish(self) -> None:
        """Return when every gradient is the sum over all replicas."""
        for bucket in self._arriving:
            bucket.settle()
        self._arriving = []
        for bucket in self._buckets:
            bucket.finish()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda _: self._made(index)

    def _made(self, index: int) -> None:
        """A leaf of a bucket has its gradient."""
        if not self._armed:
            return
        self._missing[index] -= 1
        if not self._missing[index]:
            self._start(self._buckets[index])

    def _start(self, bucket: Bucket) -> None:
        bucket.start()
        self._arriving.append(bucket)


class Reducer:
    """The sums of all stages of a rank that have replicas."""

    def __init__(self, stages: Iterable[StageReduction]) -> None:
        self._stages = {item.stage: item for item in stages}

    def learn(self) -> None:
        """See :meth:`StageReduction.learn`; before that, nothing is summed."""
        for item in self._stages.values():
            item.learn()

    def arm(self, stage: int) -> None:
        """The next backward of a stage is its last one."""
        self._stages[stage].arm()

    def start(self, stage: int) -> None:
        """Begin to sum a stage's gradients."""
        self._stages[stage].start()

    def finish(self, stage: int) -> None:
        """Wait for the sums of a stage, while those of others go on."""
        self._stages[stage].finish()

    def advance(self) -> None:
        """Go on with what has arrived; called between actions, after messages have advanced."""
        for item in self._stages.values():
            item.advance()


def _groups(
    names: Sequence[str],
    leaves: Mapping[str, Tensor],
    owners: Mapping[str, int],
    bucket_bytes: int,
) -> list[tuple[int | None, list[str]]]:
    """Names in buckets of one owner, type and device, each closed when it is large enough."""
    found: list[tuple[int | None, list[str]]] = []
    open_: dict[object, list[str]] = {}
    for name in names:
        leaf, owner = leaves[name], owners.get(name)
        key = owner, leaf.dtype, leaf.device
        if key not in open_:
            open_[key] = []
            found.append((owner, open_[key]))
        open_[key].append(name)
        if sum(leaves[other].nbytes for other in open_[key]) >= bucket_bytes:
            del open_[key]
    return found
