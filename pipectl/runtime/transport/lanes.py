"""Messages of tensors over MPI: nonblocking, without copies, without headers.

A lane (one direction between two stages) carries the same tensors for every micro-batch of one
size. Their layouts are announced once, in the first exchange of that size between two ranks. All
tensors of a lane have one tag, since MPI matches messages to receives in the order in which these
were posted: while the layouts of one receive are unknown, later ones are not posted either.

If :data:`CHECK_VARIABLE` is set, the sender describes each message in a small message of its own.
A difference means that the ranks run different programs, that memory was changed while it was sent,
or that MPI damaged it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import Slot
from pipectl.errors import WorkerError
from pipectl.lanes import Lane
from pipectl.runtime.device import Device
from pipectl.runtime.layout import Layout, Tensors
from pipectl.runtime.transport.transfer import Progress, Transfer, Wire

CHECK_VARIABLE = "PIPECTL_CHECK_MESSAGES"
"""If set on rank 0, every message is checked, which is slow."""
Shape = tuple[int, int]
"""The number of samples of a micro-batch, and the length of its sequences."""
_TAGS = 3
"""Per lane: for tensors, headers and notes. MPI guarantees 32768 tags, enough for any plan."""


class Note(NamedTuple):
    """The description of a message by one of its sides.

    Args:
        tensors: name and layout of the tensor in every slot, in words, and the CRC-32 of its
            bytes; None if there is no tensor, or not yet.
    """

    name: str
    tensors: tuple[tuple[str, str, int | None], ...]

    def difference(self, arrived: Note) -> str:
        """The first difference between the sender's note (this one) and the receiver's; or ""."""
        if self.name != arrived.name:
            return f"the sender sent the {self.name}, the receiver expects the {arrived.name}"
        counts = len(self.tensors), len(arrived.tensors)
        if counts[0] != counts[1]:
            return "{}: {} tensors were sent, {} expected".format(self.name, *counts)
        for (*one, first), (*other, second) in zip(self.tensors, arrived.tensors, strict=True):
            words = f"{self.name}: sent was {one[1]}"
            if one != other:
                return f"{words}, arrived is {other[1]}"
            if None not in (first, second) and first != second:
                return f"{words}, checksum {first:08x}, arrived is checksum {second:08x}"
        return ""


def crc_of(buffer: Tensor) -> int:
    """CRC-32 of a contiguous tensor's bytes."""
    host = buffer.cpu().view(-1)
    return zlib.crc32(host.view(torch.uint8).numpy().data) if host.numel() else 0


class SlotLayout(NamedTuple):
    """A slot in the messages of a lane and one shape of micro-batch.

    Args:
        layout: None if no message has a tensor there.
        name: in words.
    """

    slot: Slot
    layout: Layout | None
    name: Callable[[], str]


@dataclass(slots=True)
class Posted:
    """A message under way. Keeps the memory that MPI reads or writes until it is complete.

    Args:
        shape: of the micro-batch.
        layouts: None while they are unknown, in which case the receive is not posted.
        transfers: of the slots that have a tensor, in order.
    """

    micro_batch: int
    shape: Shape
    layouts: Sequence[SlotLayout] | None = None
    transfers: Sequence[Transfer] = ()
    note: Note | None = None

    @property
    def buffers(self) -> list[Tensor]:
        """The memory that MPI reads or writes, of the slots that have a tensor."""
        return [transfer.buffer for transfer in self.transfers]


class Line:
    """A lane between this rank and another.

    Args:
        tag: the first of its tags.
        check: whether to compare every message with its sender's description.
    """

    def __init__(
        self, wire: Wire, lane: Lane, slots: list[Slot], rank: int, tag: int, check: bool
    ) -> None:
        self._wire, self._lane, self._slots = wire, lane, slots
        self._rank, self._check = rank, check
        self._tag, self._header_tag, self._note_tag = range(tag, tag + _TAGS)
        # By the shape of the micro-batch.
        self._layouts: dict[Shape, Sequence[SlotLayout]] = {}
        # Receives in the order in which they started.
        self._unposted: deque[Posted] = deque()
        self._without_note: deque[Posted] = deque()

    def start_send(self, micro_batch: int, shape: Shape, tensors: Tensors) -> Posted:
        """Start sending, without waiting for the device or the other rank.

        ``tensors`` must not change until the message has left.

        Raises:
            WorkerError: a tensor has another type or shape than in earlier messages.
        """
        layouts = self._layouts.get(shape)
        if layouts is None:
            known = [tensors.get(slot) for slot in self._slots]
            own = [None if tensor is None else Layout.of(tensor) for tensor in known]
            self._wire.send_object(own, self._rank, self._header_tag)
            layouts = self._layouts[shape] = self._layouts_of(own)
        send, rank, tag = self._wire.send, self._rank, self._tag
        transfers: list[Transfer] = []
        vectors: list[Tensor] = []
        for each in layouts:
            vector = self._flat(each, tensors.get(each.slot))
            if vector is not None:
                vectors.append(vector)
                transfers.append(send(vector, rank, tag))
        posted = Posted(micro_batch, shape, layouts, transfers)
        if self._check:
            # Describes the tensors, not the buffers: copies to the buffers may still be under way.
            posted.note = self._note(posted, vectors)
            self._wire.send_object(posted.note, rank, self._note_tag)
        return posted

    def finish_send(self, posted: Posted) -> None:
        """Wait until the memory of a message may be reused.

        Raises:
            WorkerError: messages are checked, and this one changed while it was sent.
        """
        self._wire.wait(posted.transfers)
        if posted.note is not None:
            now = self._note(posted, posted.buffers)
            for before, after in zip(posted.note.tensors, now.tensors, strict=True):
                if before != after:
                    raise WorkerError(
                        f"{before[0]!r} changed while it was sent ({now.name})",
                        hint="an operator of the model writes to a value that it does not own",
                    )

    def start_receive(self, micro_batch: int, shape: Shape) -> Posted:
        """Post the buffers of a message; messages arrive in the order in which they are sent.

        Buffers of unknown layouts are posted once the layouts are known.
        """
        layouts = None if self._unposted else self._layouts.get(shape)
        posted = Posted(micro_batch, shape, layouts, () if layouts is None else self._post(layouts))
        if layouts is None:
            self._unposted.append(posted)
        if self._check:
            self._without_note.append(posted)
        return posted

    def finish_receive(self, posted: Posted) -> Tensors:
        """Wait for a message; each of its tensors has its own memory.

        Raises:
            WorkerError: messages are checked, and this one differs from what its sender sent.
        """
        while posted.layouts is None:
            sent = self._wire.receive_object(self._rank, self._header_tag)
            if len(sent) != len(self._slots):
                raise WorkerError(
                    f"the {self._lane.kind} {self._way} has {len(sent)} tensors there and "
                    f"{len(self._slots)} here",
                    hint="the two ranks run different programs: make sure that all nodes have the "
                    "same versions and files",
                )
            self._layouts[self._unposted[0].shape] = self._layouts_of(sent)
            # Post receives up to the first with unknown layouts.
            waiting = self._unposted
            while waiting and (layouts := self._layouts.get(waiting[0].shape)) is not None:
                first = waiting.popleft()
                first.layouts, first.transfers = layouts, self._post(layouts)
        if self._check:  # a receive of a message that is too short might never complete
            self._compare(posted)
        self._wire.wait(posted.transfers)
        if self._check:
            self._compare(posted, posted.buffers)
        transfers = iter(posted.transfers)
        tensors: Tensors = {}
        for slot, layout, _ in posted.layouts:
            if layout is None:
                tensors[slot] = None
                continue
            tensor = self._wire.arrived(next(transfers))
            tensors[slot] = tensor if layout.is_contiguous else layout.unflatten(tensor)
        return tensors

    @property
    def _way(self) -> str:
        lane, me = self._lane, self._wire.rank
        return f"from stage {lane.source} (rank {self._rank}) to stage {lane.target} (rank {me})"

    def _layouts_of(self, of_tensors: Sequence[Layout | None]) -> list[SlotLayout]:
        return [
            SlotLayout(slot, layout, partial(self._name, slot))
            for slot, layout in zip(self._slots, of_tensors, strict=True)
        ]

    def _post(self, layouts: Sequence[SlotLayout]) -> list[Transfer]:
        """Start receiving the tensors of a message."""
        receive, rank, tag = self._wire.receive, self._rank, self._tag
        transfers: list[Transfer] = []
        for _, layout, name in layouts:
            if layout is not None:
                transfers.append(receive(layout.message_sizes, layout.dtype, rank, tag, name))
        return transfers

    def _note(self, posted: Posted, buffers: Sequence[Tensor] = ()) -> Note:
        """This side's description of a message; for a receive, what it expects.

        Args:
            buffers: of the slots that have a tensor; none if they have not arrived.
        """
        checksums = map(crc_of, buffers)
        tensors: list[tuple[str, str, int | None]] = []
        for each in posted.layouts or ():
            value, layout = each.slot.value, each.layout
            if layout is None:
                tensors.append((value, f"nothing for {value!r}", None))
            else:
                tensors.append((value, f"{value!r}, {layout}", next(checksums, None)))
        lane, number = self._lane, posted.micro_batch
        name = f"{lane.kind} of micro-batch {number} from stage {lane.source} to {lane.target}"
        return Note(name, tuple(tensors))

    def _name(self, slot: Slot) -> str:
        return f"the {self._lane.kind} of {slot.value!r} {self._way}"

    def _compare(self, posted: Posted, buffers: Sequence[Tensor] = ()) -> None:
        """Compare a message with its note; notes arrive in the order of the messages."""
        while posted.note is None:
            note = self._wire.receive_object(self._rank, self._note_tag)
            self._without_note.popleft().note = note
        difference = posted.note.difference(self._note(posted, buffers))
        if difference:
            raise WorkerError(
                f"a message {self._way} is not what was sent: {difference}",
                hint="ranks have different plans or versions, or the MPI damages messages: "
                "see docs/troubleshooting.md",
            )

    def _flat(self, each: SlotLayout, tensor: Tensor | None) -> Tensor | None:
        """A tensor in the form in which it is sent; None if the slot never has one."""
        layout = each.layout
        if (
            tensor is not None
            and layout is not None
            and tensor.dtype is layout.dtype
            and tensor.shape == layout.sizes
        ):
            if tensor.requires_grad:
                tensor = tensor.detach()
            in_order = layout.is_contiguous and tensor.stride() == layout.strides
            if in_order and not (tensor.is_conj() or tensor.is_neg()):
                return tensor  # it is contiguous
            return layout.flatten(tensor)
        if tensor is not None or layout is not None:
            lane, is_now = self._lane, None if tensor is None else Layout.of(tensor)
            raise WorkerError(
                f"the {lane.kind} of {each.slot.value!r} from stage {lane.source} "
                f"to {lane.target} should be {layout or 'nothing'}, but is {is_now or 'nothing'}",
                hint="a model where shapes, or which tensors have a gradient, depend on the data "
                "cannot be split here",
            )
        return None


class Transport:
    """Sends and receives along the lanes of one cut.

    Args:
        communicator: used for nothing else, so that no other message can match.
        lanes: every lane of the cut with its slots, the same on all ranks.
        progress: advances messages; by default they do not advance while the rank computes.
        check: whether to compare every message with its sender's description; the same on all
            ranks.

    Attributes:
        line: returns the line of a lane to, or from, a rank.
        advance: lets MPI make progress; to be called between actions.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        device: Device,
        lanes: dict[Lane, list[Slot]],
        progress: Progress | None = None,
        *,
        check: bool = False,
    ) -> None:
        wire = Wire(communicator, device, progress, device.message_pages)
        self.advance = wire.progress.advance
        tags = {lane: _TAGS * index for index, lane in enumerate(lanes)}
        self.line = cache(lambda lane, rank: Line(wire, lane, lanes[lane], rank, tags[lane], check))
