"""Messages of tensors over MPI: nonblocking, without copies, without headers.

A lane (one direction between two stages) carries the same tensors for every micro-batch of one
size. Their layouts are announced once, in the first exchange of that size between two ranks
(``learn``), and known to both from then on. MPI gives messages to receives in the order in which
these were posted: so while the layouts of one receive are unknown, those started behind it are not
posted either.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import Lane, Slot
from pipectl.errors import MismatchError, WorkerError
from pipectl.runtime.device import Device
from pipectl.runtime.layout import Layout, Tensors
from pipectl.runtime.transport.checks import Message, Note, differences, note_of
from pipectl.runtime.transport.progress import Progress
from pipectl.runtime.transport.transfer import Transfer
from pipectl.runtime.transport.wire import Flight, Wire

Layouts = dict[Slot, Layout | None]
_HEADER, _NOTE, _EXTRA = 0, 1, 2
"""Tags of a lane behind those of its slots."""


@dataclass
class Posted:
    """A message under way. Holds the memory MPI reads or writes until it is complete.

    Args:
        size: of the micro-batch, where the message is received.
        known: whether its layouts are, so that its receive is posted.
    """

    size: int = 0
    known: bool = False
    flights: dict[Slot, Flight] = field(default_factory=dict)
    layouts: Layouts = field(default_factory=dict)
    note: Note | None = None

    @property
    def buffers(self) -> dict[Slot, Tensor]:
        """The memory that MPI reads or writes."""
        return {slot: flight.buffer for slot, flight in self.flights.items()}


class Transport:
    """Sends and receives along the lanes of one cut.

    Args:
        communicator: of its own, so that no other message can match.
        lanes: every lane of the cut with its slots, the same on all ranks.
        progress: keeps messages moving; by default nobody does while the rank computes.
        check: whether every message is compared with what its sender says of it; the same on all
            ranks.

    Raises:
        MismatchError: the cut has more kinds of messages than MPI has tags.
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
        self._wire = Wire(communicator, device, progress)
        self._lanes = lanes
        self._check = check
        self._tags = _tags(lanes, largest_tag(communicator))
        self._layouts: dict[tuple[Lane, int, int], Layouts] = {}
        # By rank and tag; of one that is over, no memory is held.
        self._last_sent: dict[tuple[int, int], Transfer] = {}
        self._last_received: dict[tuple[int, int], Transfer] = {}
        # Of each lane and rank, receives in the order in which they started.
        self._unposted: defaultdict[tuple[Lane, int], deque[Posted]] = defaultdict(deque)
        self._without_note: defaultdict[tuple[Lane, int], deque[Posted]] = defaultdict(deque)

    def start_send(self, message: Message, size: int, rank: int, tensors: Tensors) -> Posted:
        """Begin to send, without waiting for the device or the other rank.

        ``tensors`` must not change until the message has left.
        """
        layouts = self._layouts.get((message.lane, rank, size))
        posted = Posted()
        if layouts is None:
            layouts = self._announce(message.lane, size, rank, tensors)
        tags = self._tags[message.lane]
        vectors = {
            slot: _flat(message.lane, slot, layout, tensors.get(slot))
            for slot, layout in layouts.items()
        }
        for (slot, vector), tag in zip(vectors.items(), tags, strict=False):
            if vector is not None:
                before = self._last_sent.get((rank, tag))
                posted.flights[slot] = self._wire.send(vector, rank, tag, before)
                self._last_sent[rank, tag] = posted.flights[slot].transfer
        if self._check:
            # Of the tensors, not of the buffers: copies to these may still be under way.
            present = {slot: vector for slot, vector in vectors.items() if vector is not None}
            posted.note = note_of(message, layouts, present)
            self._wire.send_object(posted.note, rank, tags[~_NOTE])
        return posted

    def start_receive(self, message: Message, size: int, rank: int) -> Posted:
        """Post the buffers of a message, which come in the order in which they are sent.

        Those of whose layouts nothing is known yet are posted when they are learnt.
        """
        posted = Posted(size)
        self._unposted[message.lane, rank].append(posted)
        if self._check:
            self._without_note[message.lane, rank].append(posted)
        self._post_known(message.lane, rank)
        return posted

    def finish_receive(self, message: Message, rank: int, posted: Posted) -> Tensors:
        """Wait for a message; its tensors lie in memory of their own.

        Raises:
            WorkerError: messages are checked, and this one is not what its sender sent.
        """
        while not posted.known:
            self._learn(message.lane, self._unposted[message.lane, rank][0].size, rank)
            self._post_known(message.lane, rank)
        said = self._read_note(message, rank, posted) if self._check else None
        self._wire.wait([*posted.flights.values()])
        if said is not None:
            self._compare(said, message, rank, posted)
        found: Tensors = {}
        for slot, layout in posted.layouts.items():
            found[slot] = None
            if layout is not None:
                found[slot] = layout.unflatten(self._wire.arrived(posted.flights[slot]))
        return found

    def finish_send(self, posted: Posted) -> None:
        """Wait until the memory of a message may be reused.

        Raises:
            WorkerError: messages are checked, and this one changed while it was sent.
        """
        self._wire.wait([*posted.flights.values()])
        if posted.note is not None:
            posted.note.check_unchanged(posted.buffers)

    def progress(self) -> None:
        """Let MPI work on what is under way; to be called between actions."""
        self._wire.progress.advance()

    def _post_known(self, lane: Lane, rank: int) -> None:
        """Post receives up to the first of whose layouts nothing is known."""
        waiting = self._unposted[lane, rank]
        while waiting and (layouts := self._layouts.get((lane, rank, waiting[0].size))) is not None:
            self._post(waiting.popleft(), lane, layouts, rank)

    def _post(self, posted: Posted, lane: Lane, layouts: Layouts, rank: int) -> None:
        posted.known, posted.layouts = True, layouts
        for (slot, layout), tag in zip(layouts.items(), self._tags[lane], strict=False):
            if layout is None:
                continue

            def what(slot: Slot = slot) -> str:
                return f"the {lane.kind} of {slot.value!r} {self._way(lane, rank)}"

            before = self._last_received.get((rank, tag))
            form = layout.count, layout.dtype
            posted.flights[slot] = self._wire.receive(*form, rank, tag, what, before)
            self._last_received[rank, tag] = posted.flights[slot].transfer

    def _way(self, lane: Lane, rank: int) -> str:
        me = self._wire.rank
        return f"from stage {lane.source} (rank {rank}) to stage {lane.target} (rank {me})"

    def _announce(self, lane: Lane, size: int, rank: int, tensors: Tensors) -> Layouts:
        layouts = {slot: _layout(tensors.get(slot)) for slot in self._lanes[lane]}
        self._wire.send_object([*layouts.values()], rank, self._tags[lane][~_HEADER])
        self._layouts[lane, rank, size] = layouts
        return layouts

    def _learn(self, lane: Lane, size: int, rank: int) -> None:
        found = self._wire.receive_object(rank, self._tags[lane][~_HEADER])
        slots = self._lanes[lane]
        if len(found) != len(slots):
            raise WorkerError(
                f"the {lane.kind} {self._way(lane, rank)} has {len(found)} tensors there and "
                f"{len(slots)} here",
                cure="the two ranks run different programs: see that all nodes have the same "
                "versions and files",
            )
        self._layouts[lane, rank, size] = dict(zip(slots, found, strict=True))

    def _read_note(self, message: Message, rank: int, posted: Posted) -> Note:
        """What the sender says of a message; compared with what was expected before it arrives.

        A message that is too short for its buffers might never end. Notes come in the order of the
        messages, which may be read in another.
        """
        while posted.note is None:
            note = self._wire.receive_object(rank, self._tags[message.lane][~_NOTE])
            self._without_note[message.lane, rank].popleft().note = note
        said = posted.note
        self._refuse(differences(said.outline, note_of(message, posted.layouts)), message, rank)
        return said

    def _compare(self, said: Note, message: Message, rank: int, posted: Posted) -> None:
        arrived = note_of(message, posted.layouts, posted.buffers)
        self._refuse(differences(said, arrived), message, rank)

    def _refuse(self, found: list[str], message: Message, rank: int) -> None:
        if found:
            raise WorkerError(
                f"a message {self._way(message.lane, rank)} is not what was sent: "
                f"{'; '.join(found)}",
                cure="ranks with different plans or versions, or an MPI that damages messages: "
                "see docs/troubleshooting.md",
            )


def largest_tag(communicator: MPI.Comm) -> int:
    """The largest tag that this MPI takes; the standard grants 32767."""
    found = communicator.Get_attr(MPI.TAG_UB)
    return 32767 if found is None else int(found)


def _tags(lanes: dict[Lane, list[Slot]], largest: int) -> dict[Lane, range]:
    """Tags of every lane: one a slot, one for the note, one for the header.

    Raises:
        MismatchError: MPI has fewer.
    """
    found: dict[Lane, range] = {}
    first = 0
    for lane, slots in lanes.items():
        found[lane] = range(first, first + len(slots) + _EXTRA)
        first = found[lane].stop
    if first - 1 > largest:
        raise MismatchError(
            f"the plan has {first} kinds of messages, but this MPI has tags for {largest + 1}",
            cure="plan fewer stages, or use another MPI",
        )
    return found


def _layout(tensor: Tensor | None) -> Layout | None:
    return None if tensor is None else Layout.of(tensor)


def _flat(lane: Lane, slot: Slot, layout: Layout | None, tensor: Tensor | None) -> Tensor | None:
    """A tensor as it is sent; None where there never is one."""
    if (
        tensor is not None
        and layout is not None
        and tensor.dtype is layout.dtype
        and tensor.shape == layout.sizes
    ):
        return layout.flatten(tensor.detach() if tensor.requires_grad else tensor)
    expected = None if layout is None else (layout.dtype, layout.sizes)
    found = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
    if found != expected:
        raise WorkerError(
            f"the {lane.kind} of {slot.value!r} from stage {lane.source} to {lane.target} should "
            f"be {_words(expected)}, but is {_words(found)}",
            cure="a model where shapes, or which tensors have a gradient, depend on the data "
            "cannot be split here",
        )
    return None


def _words(form: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "nothing" if form is None else f"{form[0]} {list(form[1])}"
