"""``rehearsal.json``: how long the ranks of a rehearsal wait, where a training computes and sends.

Written by whoever starts a rehearsal, so that its ranks need neither the simulator nor the model.
All times are those of the plan; ``stretch`` says how many times as long the ranks take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipectl.fields import Reader
from pipectl.files import read_json, write_json

VERSION = 1
_CURE = "rehearse the job again"


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
class Rehearsal:
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

    stretch: float
    message_share: float
    pause_s: float
    late_s: float
    steps: int
    predicted_s: float
    work_s: Mapping[str, tuple[float, ...]]
    update_s: tuple[float, ...]
    speed: tuple[float, ...]
    messages: tuple[Passage, ...]
    meetings: tuple[Meeting, ...]

    def save(self, path: Path) -> None:
        """Write ``rehearsal.json`` whole."""
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object."""
        return {
            "version": VERSION,
            **{name: getattr(self, name) for name in _NUMBERS},
            "work_s": {kind: list(times) for kind, times in self.work_s.items()},
            "update_s": list(self.update_s),
            "speed": list(self.speed),
            "messages": [list(passage) for passage in self.messages],
            "meetings": [
                {**item._asdict(), "passage": list(item.passage)} for item in self.meetings
            ],
        }

    @classmethod
    def load(cls, path: Path) -> Rehearsal:
        """Read and check it.

        Raises:
            DataFileError: naming the file and the field.
        """
        reader = Reader(read_json(path, cure=_CURE), file=str(path), cure=_CURE)
        reader.check_version(VERSION)
        works: dict[str, list[float]] = reader.value("work_s")
        return cls(
            stretch=reader.positive("stretch"),
            message_share=reader.positive("message_share"),
            pause_s=reader.positive("pause_s"),
            late_s=reader.positive("late_s"),
            steps=reader.integer("steps", minimum=1),
            predicted_s=reader.number("predicted_s"),
            work_s={kind: tuple(times) for kind, times in works.items()},
            update_s=tuple(reader.value("update_s")),
            speed=tuple(reader.value("speed")),
            messages=tuple(Passage(*row) for row in reader.rows("messages", 3)),
            meetings=tuple(_meeting(item) for item in reader.items("meetings")),
        )


_NUMBERS = ("stretch", "message_share", "pause_s", "late_s", "steps", "predicted_s")


def _meeting(item: Reader) -> Meeting:
    return Meeting(
        item.integer("rank", minimum=0),
        item.text("kind"),
        item.integer("stage", minimum=0),
        Passage(*item.value("passage")),
        item.integers("ranks"),
    )
