"""The process beside a rank: ``python -m pipectl.watch.watcher``, started by the rank itself.

It reads what the rank does from memory that both share, and tells rank 0's watcher once a second.
That one decides whether a rank is lost, writes down which and why, and has all others end theirs.
A watcher lives as long as its rank, and some seconds more if that did not end as it should.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipectl.watch.board import Sight, mapped
from pipectl.watch.charge import Charge
from pipectl.watch.head import Head, interval_s
from pipectl.watch.report import report
from pipectl.watch.signals import outlive_signals
from pipectl.watch.verdict import RESUME, Verdict, limit_s
from pipectl.watch.wire import Address, Wire, listen, resolve
from pipectl.watch.words import Names

_PIPE = 0
_TICK_S, _SHORT_TICK_S = 1.0, 0.1
_GRACE_S = 5.0
"""For launchers, which end all ranks when one has died."""
_LEAVE_S = 7.0
"""After which rank 0's watcher ends, though others may have been lost."""
_UNHEARD_S = 2.0
"""After which a watcher that gets no answer reports the end of its rank itself."""
_WITHOUT_HEAD = 2.0
"""Times the limit that a rank may be still while rank 0's watcher is silent."""


class Watcher:
    """Watches one rank.

    Args:
        given: what the rank told when it started this process; see :mod:`pipectl.runtime.watching`.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._names = Names(given["kinds"], given["lanes"])
        self._charge = Charge(
            given["rank"],
            given["pid"],
            _PIPE,
            mapped(given["board"]),
            secret=given["secret"],
            script=given["script"],
            launched=given["launched"],
        )
        own = socket.socket(fileno=given["socket"]) if given["socket"] >= 0 else listen()
        self._wire = Wire(own, given["secret"])
        self._target = resolve(Address(given["hosts"], given["port"], given["secret"]))
        self._interval_s = interval_s(given["size"])
        self._now, self._told_at = 0.0, float("-inf")
        self._answered_at: float | None = None
        self._noted = self._ordered = False
        self._moves, self._moved_at = 0, 0.0
        self._launcher = ""
        self._lost_at: float | None = None

    def watch(self) -> None:
        """Until the rank has ended."""
        before = time.monotonic()
        while not self._turn():
            wait_s = self._tick_s
            handles = [] if self._charge.ended_at else self._charge.handles
            select.select([self._wire.socket.fileno(), *handles], [], [], wait_s)
            # Time is counted by wake-ups: none passes while this process is stopped.
            after = time.monotonic()
            self._now += min(after - before, 2 * wait_s)
            before = after
        if self._charge.ended_at:
            self._charge.clean_up()

    @property
    def _is_ending(self) -> bool:
        return self._lost_at is not None

    @property
    def _tick_s(self) -> float:
        return _SHORT_TICK_S if self._is_ending else _TICK_S

    def _turn(self) -> bool:
        """Look around and act; whether all is over."""
        charge = self._charge
        charge.look()
        self._launcher = self._launcher or charge.abandoned()
        if self._lost_at is None and (charge.ended_at or self._launcher):
            self._lost_at = self._now
        self._tell()
        for content, source in self._wire.receive():
            self._hear(content, source)
        if charge.said_goodbye or self._fails_alone:
            return True
        self._act()
        return self._is_over()

    @property
    def _fails_alone(self) -> bool:
        """Whether its error is the caller's matter: no other rank waits for it."""
        return self._given["size"] == 1 and self._charge.explains

    def _act(self) -> None:
        """What follows from the end of the own rank, or from that of rank 0's watcher."""
        if self._ordered:
            self._charge.kill()
        elif self._lost_at is not None and self._now - self._lost_at > _UNHEARD_S:
            death = self._charge.death(self._launcher)
            if not (self._noted or death.asked or self._charge.explains):
                self._report(death.verdict)
            self._ordered = True
        elif self._is_without_head():
            verdict = Verdict(0, "nothing is heard of its node: it is gone", RESUME)
            step, node = self._charge.sight.step, self._given["hosts"][-1]
            self._report(verdict, Sight(step=step), node)
            self._ordered = True

    def _is_over(self) -> bool:
        ended = bool(self._charge.ended_at)
        return ended and (self._ordered or self._noted or self._charge.explains)

    def _is_without_head(self) -> bool:
        sight = self._charge.sight
        if sight.moves != self._moves:
            self._moves, self._moved_at = sight.moves, self._now
        if self._answered_at is None:
            return False
        limit = limit_s(self._given["least_s"], self._given["predicted_s"], sight.pace_s)
        still_s = min(self._now - self._answered_at, self._now - self._moved_at)
        return still_s > _WITHOUT_HEAD * limit

    def _tell(self) -> None:
        """Say how the rank is, or how it ended."""
        ends = self._lost_at is not None or self._charge.said_goodbye or self._charge.explains
        if not ends and self._now - self._told_at < self._interval_s:
            return
        self._told_at = self._now
        self._deliver(self._content())

    def _deliver(self, content: Mapping[str, Any]) -> None:
        self._wire.send(self._target, content)

    def _content(self) -> dict[str, Any]:
        charge = self._charge
        content: dict[str, Any] = {
            "says": "beat",
            "rank": charge.rank,
            "sight": charge.sight,
            "stopped": charge.stopped,
            "node": self._given["node"],
        }
        if charge.said_goodbye:
            return {**content, "says": "bye"}
        if charge.explains:
            return {**content, "says": "failed" if charge.ended_at else "failing"}
        if self._lost_at is None:
            return content
        return {**content, "says": "died", **charge.death(self._launcher)._asdict()}

    def _hear(self, content: Mapping[str, Any], source: tuple[str, int]) -> None:  # noqa: ARG002
        """An answer of rank 0's watcher."""
        self._answered_at = self._now
        self._noted |= content.get("says") == "noted"
        self._ordered |= content.get("says") == "end"

    def _report(self, verdict: Verdict, sight: Sight | None = None, node: str = "") -> None:
        path = Path(self._given["errors"]) / f"rank-{verdict.rank:04d}.json"
        own = verdict.rank == self._charge.rank
        seen = sight or (self._charge.sight if own else Sight())
        report(path, verdict, seen, node or self._given["node"], self._names)


class Leader(Watcher):
    """Watches rank 0, and all others by what their watchers tell."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._head = Head(given["size"], given["least_s"], given["predicted_s"], self._names)
        self._others: dict[int, tuple[str, int]] = {}
        self._end_at: float | None = None
        self._reported = False
        self._judged_at = float("-inf")

    @property
    def _is_ending(self) -> bool:
        return self._end_at is not None or self._head.is_ending or super()._is_ending

    def _deliver(self, content: Mapping[str, Any]) -> None:
        self._head.hears(content, self._now)

    def _hear(self, content: Mapping[str, Any], source: tuple[str, int]) -> None:
        self._head.hears(content, self._now)
        self._others[int(content["rank"])] = source
        said = "heard" if content["says"] == "beat" else "noted"
        self._wire.send(source, {"says": said})

    def _act(self) -> None:
        """At most once a tick, as it looks at all ranks and messages are many; and at the end."""
        if self._now - self._judged_at >= self._tick_s or self._is_over():
            self._judged_at = self._now
            self._judge()

    def _judge(self) -> None:
        verdict = None if self._reported else self._head.verdict(self._now)
        over = self._head.is_over(self._now)
        if verdict is not None:
            self._reported = True
            known = self._head.sight(verdict.rank)
            self._report(verdict, known, self._head.node(verdict.rank))
        elif warning := self._head.warning(self._now):
            sys.stderr.write(f"pipectl: {warning}\n")
        if self._end_at is None and (over or verdict is not None):
            self._end_at = self._now + (_GRACE_S if over else 0.0)
        if self._end_at is not None and self._now >= self._end_at:
            for rank in self._left():
                self._wire.send(self._others[rank], {"says": "end"})
            self._charge.kill()

    def _is_over(self) -> bool:
        if not self._charge.ended_at or self._end_at is None:
            return False
        return not self._left() or self._now > self._end_at + _LEAVE_S

    def _left(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank in self._others if not self._head.has_ended(rank)]


def main() -> None:
    """Watch the rank that is on the other side of the standard input."""
    outlive_signals()
    line = b""
    while not line.endswith(b"\n"):
        letter = os.read(_PIPE, 1)
        if not letter:
            return
        line += letter
    os.set_blocking(_PIPE, False)
    given = json.loads(line)
    (Leader if given["rank"] == 0 else Watcher)(given).watch()


if __name__ == "__main__":
    main()
