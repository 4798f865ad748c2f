"""Messages of tensors over MPI: nonblocking, without copies, without headers.

A lane (one direction between two stages) carries the same tensors for every micro-batch of one
size. Their layouts are announced once, in the first exchange of that size between two ranks
(``learn``), and known to both from then on. MPI gives messages to receives in the order in which
these were posted: so while the layouts of one receive are unknown, those started behind it are not
posted either.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

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


class _Line:
    """A lane between this rank and another.

    Attributes:
        layouts: of its messages, by the size of the micro-batch.
        sent, received: the last transfer by tag; of one that is over, no memory is held.
        unposted, without_note: receives in the order in which they started.
    """

    def __init__(self, lane: Lane, rank: int, tags: range) -> None:
        self.lane, self.rank, self.tags = lane, rank, tags
        self.layouts: dict[int, Layouts] = {}
        self.sent: dict[int, Transfer] = {}
        self.received: dict[int, Transfer] = {}
        self.unposted: deque[Posted] = deque()
        self.without_note: deque[Posted] = deque()


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
        self._lines: dict[tuple[Lane, int], _Line] = {}

    def start_send(self, message: Message, size: int, rank: int, tensors: Tensors) -> Posted:
        """Begin to send, without waiting for the device or the other rank.

        ``tensors`` must not change until the message has left.
        """
        line = self._line(message.lane, rank)
        layouts = line.layouts.get(size)
        if layouts is None:
            known = ((slot, tensors.get(slot)) for slot in self._lanes[message.lane])
            layouts = {slot: None if t is None else Layout.of(t) for slot, t in known}
            self._wire.send_object([*layouts.values()], rank, line.tags[~_HEADER])
            line.layouts[size] = layouts
        posted, vectors = Posted(), dict[Slot, Tensor]()
        for (slot, layout), tag in zip(layouts.items(), line.tags, strict=False):
            vector = _flat(message.lane, slot, layout, tensors.get(slot))
            if vector is not None:
                vectors[slot] = vector
                flight = self._wire.send(vector, rank, tag, line.sent.get(tag))
                posted.flights[slot], line.sent[tag] = flight, flight.transfer
        if self._check:
            # Of the tensors, not of the buffers: copies to these may still be under way.
            posted.note = note_of(message, layouts, vectors)
            self._wire.send_object(posted.note, rank, line.tags[~_NOTE])
        return posted

    def start_receive(self, message: Message, size: int, rank: int) -> Posted:
        """Post the buffers of a message, which come in the order in which they are sent.

        Those of whose layouts nothing is known yet are posted when they are learnt.
        """
        line, posted = self._line(message.lane, rank), Posted(size)
        line.unposted.append(posted)
        if self._check:
            line.without_note.append(posted)
        self._post_known(line)
        return posted

    def finish_receive(self, message: Message, rank: int, posted: Posted) -> Tensors:
        """Wait for a message; its tensors lie in memory of their own.

        Raises:
            WorkerError: messages are checked, and this one is not what its sender sent.
        """
        while not posted.known:
            line = self._line(message.lane, rank)
            self._learn(line, line.unposted[0].size)
            self._post_known(line)
        said = self._read_note(message, rank, posted) if self._check else None
        self._wire.wait(posted.flights.values())
        if said is not None:
            self._compare(said, message, rank, posted)
        tensors: Tensors = dict.fromkeys(posted.layouts)
        for slot, flight in posted.flights.items():
            layout = posted.layouts[slot]
            assert layout is not None
            tensors[slot] = layout.unflatten(self._wire.arrived(flight))
        return tensors

    def finish_send(self, posted: Posted) -> None:
        """Wait until the memory of a message may be reused.

        Raises:
            WorkerError: messages are checked, and this one changed while it was sent.
        """
        self._wire.wait(posted.flights.values())
        if posted.note is not None:
            posted.note.check_unchanged(posted.buffers)

    def progress(self) -> None:
        """Let MPI work on what is under way; to be called between actions."""
        self._wire.progress.advance()

    def _line(self, lane: Lane, rank: int) -> _Line:
        line = self._lines.get((lane, rank))
        if line is None:
            line = self._lines[lane, rank] = _Line(lane, rank, self._tags[lane])
        return line

    def _post_known(self, line: _Line) -> None:
        """Post receives up to the first of whose layouts nothing is known."""
        while line.unposted and (layouts := line.layouts.get(line.unposted[0].size)) is not None:
            posted = line.unposted.popleft()
            posted.known, posted.layouts = True, layouts
            for (slot, layout), tag in zip(layouts.items(), line.tags, strict=False):
                if layout is not None:
                    what = partial(self._name, line, slot)
                    form, before = (layout.count, layout.dtype), line.received.get(tag)
                    flight = self._wire.receive(*form, line.rank, tag, what, before)
                    posted.flights[slot], line.received[tag] = flight, flight.transfer

    def _name(self, line: _Line, slot: Slot) -> str:
        return f"the {line.lane.kind} of {slot.value!r} {self._way(line.lane, line.rank)}"

    def _way(self, lane: Lane, rank: int) -> str:
        me = self._wire.rank
        return f"from stage {lane.source} (rank {rank}) to stage {lane.target} (rank {me})"

    def _learn(self, line: _Line, size: int) -> None:
        layouts = self._wire.receive_object(line.rank, line.tags[~_HEADER])
        slots = self._lanes[line.lane]
        if len(layouts) != len(slots):
            raise WorkerError(
                f"the {line.lane.kind} {self._way(line.lane, line.rank)} has {len(layouts)} "
                f"tensors there and {len(slots)} here",
                cure="the two ranks run different programs: see that all nodes have the same "
                "versions and files",
            )
        line.layouts[size] = dict(zip(slots, layouts, strict=True))

    def _read_note(self, message: Message, rank: int, posted: Posted) -> Note:
        """What the sender says of a message; compared with what was expected before it arrives.

        A message that is too short for its buffers might never end. Notes come in the order of the
        messages, which may be read in another.
        """
        while posted.note is None:
            line = self._line(message.lane, rank)
            note = self._wire.receive_object(rank, line.tags[~_NOTE])
            line.without_note.popleft().note = note
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
