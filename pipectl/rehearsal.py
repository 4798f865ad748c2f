"""``rehearsal.json``: how long the ranks of a rehearsal wait, where a training computes and sends.

Written by whoever starts a rehearsal, so that its ranks need neither the simulator nor the model.
All times are those of the plan; ``stretch`` says how many times as long the ranks take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pipectl.fields import Count, DataFile, Positive


class Passage(NamedTuple):
    """What moving one full micro-batch of something takes.

    Args:
        hold_s: in which nothing else moves the same way.
        latency_s: from then on until it has arrived.
    """

    size_bytes: float
    hold_s: float
    latency_s: float


class Meeting(NamedTuple):
    """What a rank does of a stage in the background, besides messages.

    Args:
        kind: of its rows, without ``_START`` or ``_WAIT``: ``REDUCE``, ``OFFLOAD``, ``FETCH``.
        ranks: that take part; the rank alone for copies.
    """

    rank: int
    kind: str
    stage: int
    passage: Passage
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Rehearsal(DataFile):
    """The waits of all ranks.

    Args:
        stretch: time of the rehearsal over time of the plan.
        message_share: bytes of messages over those of the plan.
        pause_s: between two looks at messages on their way, in time of the rehearsal.
        late_s: a rank that wakes up so much too late makes up for it, likewise.
        steps: to rehearse.
        predicted_s: what the simulator expects of a step where ranks share no cores or links, as
            here.
        work_s: of a full micro-batch on a device of speed 1, by kind, then by stage.
        update_s: by rank, on a device of speed 1.
        speed: of every rank's device.
        messages: by channel.
        meetings: what else ranks start and wait for.
    """

    cure: ClassVar[str] = "rehearse the job again"
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
        """About how long all steps take, in time of the rehearsal."""
        return self.steps * self.stretch * self.predicted_s
