"""``rehearsal.json``: how long the ranks of a rehearsal wait instead of computing and sending.

The process that starts a rehearsal writes this file, so the ranks need neither the simulator nor
the model. Times are those of the plan; the ranks multiply them by ``stretch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pipectl.fields import Count, DataFile, Positive


class Passage(NamedTuple):
    """Time to move the data of one full micro-batch.

    Args:
        hold_s: time in which nothing else moves the same way.
        latency_s: time from then until the arrival.
    """

    size_bytes: float
    hold_s: float
    latency_s: float


class Meeting(NamedTuple):
    """A background operation of a rank for a stage, other than a message.

    Args:
        kind: kind of its rows without ``_START`` or ``_WAIT``: ``REDUCE``, ``OFFLOAD``, ``FETCH``.
        ranks: ranks that take part; for copies only the rank itself.
    """

    rank: int
    kind: str
    stage: int
    passage: Passage
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Rehearsal(DataFile):
    """The waiting times of all ranks.

    Args:
        stretch: time of the rehearsal relative to that of the plan.
        message_share: bytes of messages relative to those of the plan.
        pause_s: pause between two polls of messages, in time of the rehearsal.
        late_s: maximum delay of a wake-up that a rank makes up for, in time of the rehearsal.
        steps: number of steps.
        predicted_s: predicted step time if ranks share no cores or links, as in a rehearsal.
        work_s: seconds per full micro-batch on a device of speed 1, by kind, then by stage.
        update_s: seconds of an update by rank, on a device of speed 1.
        speed: speed of the device of each rank.
        messages: by channel.
        meetings: background operations other than messages.
    """

    hint: ClassVar[str] = "rehearse the job again"
    stretch: Positive
    message_share: Positive
    pause_s: Positive
    late_s: Positive
    steps: Count
    predicted_s: float
    work_s: Mapping[str, tuple[float, ...]]
    update_s: tuple[float, ...]
    speed: tuple[float, ...]
    messages: tuple[Passage, ...]
    meetings: tuple[Meeting, ...]

    @property
    def expected_s(self) -> float:
        """Approximate seconds of all steps, in time of the rehearsal."""
        return self.steps * self.stretch * self.predicted_s
