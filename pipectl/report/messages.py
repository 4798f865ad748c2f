"""Messages of a timeline: when they could leave, and when somebody waited for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipectl.graph import TransferKind
from pipectl.schedule import Channel
from pipectl.timeline import Event, Timeline

Message = tuple[int, int]
"""Channel and micro-batch."""

_MADE_BY = {
    TransferKind.ACTIVATION: ("forward",),
    TransferKind.GRADIENT: ("backward", "backward_input"),
    TransferKind.SAVED: ("forward",),
}
_READ_BY = {
    TransferKind.ACTIVATION: ("forward",),
    TransferKind.GRADIENT: ("backward", "backward_input"),
    TransferKind.SAVED: ("backward",),
}


class Computed:
    """The computations of a timeline by what they are."""

    def __init__(self, timeline: Timeline) -> None:
        self._events = {(e.rank, e.kind, e.stage, e.micro_batch): e for e in timeline.events}

    def source(self, channel: Channel, micro_batch: int) -> Event | None:
        """What made a message."""
        return self._find(_MADE_BY, channel, channel.source_rank, channel.source_stage, micro_batch)

    def target(self, channel: Channel, micro_batch: int) -> Event | None:
        """What a message is for."""
        return self._find(_READ_BY, channel, channel.target_rank, channel.target_stage, micro_batch)

    def _find(
        self,
        kinds: Mapping[TransferKind, Sequence[str]],
        channel: Channel,
        rank: int,
        stage: int,
        micro_batch: int,
    ) -> Event | None:
        names = kinds.get(channel.kind, ())
        found = (self._events.get((rank, name, stage, micro_batch)) for name in names)
        return next((event for event in found if event is not None), None)


def sent_at(timeline: Timeline, channels: Sequence[Channel]) -> dict[Message, float]:
    """When each message that somebody waited for was sent, where that is known.

    Simulated timelines hold no starts; there it is the end of what made the message. Weights are
    those of the step before.
    """
    started = {(e.channel, e.micro_batch): e for e in timeline.events if e.kind == "send_start"}
    computed = Computed(timeline)
    found: dict[Message, float] = {}
    for event in timeline.events:
        message = event.channel, event.micro_batch
        if event.kind != "receive_wait" or not 0 <= event.channel < len(channels):
            continue
        if message in started:
            found[message] = started[message].start_s
        elif channels[event.channel].kind is TransferKind.WEIGHT:
            found[message] = 0.0
        elif (made := computed.source(channels[event.channel], event.micro_batch)) is not None:
            found[message] = made.end_s
    return found
