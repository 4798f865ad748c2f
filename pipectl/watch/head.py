"""What the watcher of rank 0 knows of all ranks, and decides. It is told the time, and has none.

Time is counted by its own wake-ups: while a whole job is suspended, none passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipectl.watch.board import Sight
from pipectl.watch.verdict import RESUME, Seen, Verdict, judge, limit_s, waiting_words
from pipectl.watch.words import Names

SETTLE_S = 0.3
"""After a death: others may be older, or a rank may have said why it fails."""
MISSED = 4
"""Intervals after a death: a rank that is not heard of since then has lost its node."""
LONGEST_S = 11.0
"""After a death, however many ranks there are: rank 0's watcher ends a second later. Until then,
ranks that live are told to end, and say so."""
_MESSAGES_PER_S = 1000
"""That rank 0's watcher gets; with more ranks, each tells it more rarely."""
_MEMORY = "set pipeline.memory_limit below what a rank gets, and plan again; pipectl resume goes on"


class Death(NamedTuple):
    """The end of a rank that it did not announce.

    Args:
        at: seconds since the epoch, when its watcher saw it.
        earlier: how many ranks of its node had ended before.
        asked: whether it had been sent a signal to end, as launchers do.
        words: its last, if it had any.
        for_memory: whether the kernel killed a process of its machine for memory just then.
        launcher: what is gone that started it, in words, while it still lived; else empty.
        with_launcher: whether the launcher was gone when this was noticed.
    """

    rank: int
    at: float
    earlier: int = 0
    asked: bool = False
    words: str = ""
    for_memory: bool = False
    launcher: str = ""
    with_launcher: bool = False

    @property
    def verdict(self) -> Verdict:
        """In words, and when it was."""
        return self._told._replace(at=self.at, earlier=self.earlier)

    @property
    def _told(self) -> Verdict:
        if self.launcher:
            cure = "it was killed, or its node is gone; " + RESUME
            return Verdict(self.rank, f"{self.launcher} that started it is gone", cure)
        if self.words:
            message = f"its process crashed: {self.words.splitlines()[0]}"
            return Verdict(self.rank, message, RESUME, self.words)
        if self.asked:
            message = "its process was sent a signal to end (SIGTERM or SIGINT), by itself"
            return Verdict(self.rank, message, RESUME)
        if self.for_memory:
            message = "killed by the kernel, for lack of memory on its node"
            return Verdict(self.rank, message, _MEMORY)
        message = "its process was killed (SIGKILL, say), or ended without a word"
        if self.with_launcher:
            message += "; the launcher is gone, too"
        return Verdict(self.rank, message, RESUME)


def interval_s(size: int) -> float:
    """Between two messages of one of so many ranks, in seconds."""
    return max(1.0, size / _MESSAGES_PER_S)


class Head:
    """Knows all ranks by what is heard of them.

    Args:
        size: number of ranks.
        least_s: a rank is never missed sooner, see :func:`limit_s`.
        predicted_s: a step.
    """

    def __init__(self, size: int, least_s: float, predicted_s: float, names: Names) -> None:
        self._size = size
        self._least_s, self._predicted_s = least_s, predicted_s
        self._names = names
        self._sights: dict[int, Sight] = {}
        self._nodes: dict[int, str] = {}
        self._heard: dict[int, float] = {}
        self._moved: dict[int, float] = {}
        self._stopped: dict[int, float] = {}
        self._over: set[int] = set()
        self._deaths: list[Death] = []
        self._first_death = 0.0
        self._explained = False
        self._warned = 0.0

    def hears(self, content: Mapping[str, Any], now: float) -> None:
        """Take in a message."""
        rank, sight = int(content["rank"]), Sight(*content["sight"])
        before = self._sights.get(rank)
        if before is None or (before.moves, before.step) != (sight.moves, sight.step):
            self._moved[rank] = now
        self._sights[rank], self._heard[rank] = sight, now
        self._nodes[rank] = str(content["node"])
        if content["stopped"]:
            self._stopped.setdefault(rank, now)
        else:
            self._stopped.pop(rank, None)
        self._hears_of_the_end(content, rank, now)

    def verdict(self, now: float) -> Verdict | None:
        """Why the run cannot go on; None while it can, or where the ranks said so themselves."""
        if self._explained:
            return None
        if self._deaths:
            return self._of_deaths(now)
        return judge(self._seen(now), self.limit_s, self._names)

    def is_over(self, now: float) -> bool:
        """Whether a rank has ended, so that all others must."""
        return self._explained or bool(self._deaths and now - self._first_death >= SETTLE_S)

    @property
    def is_ending(self) -> bool:
        """Whether a rank has ended, or fails, so that all others soon must."""
        return self._explained or bool(self._deaths)

    def warning(self, now: float) -> str:
        """Who waits for whom, when for too long no rank moves on; once, then ever more rarely."""
        seen = self._seen(now)
        still_s = min((known.still_s for known in seen.values()), default=0.0)
        if still_s < self.limit_s:
            self._warned = 0.0
            return ""
        if self._over or self._deaths or still_s < 2 * self._warned:
            return ""
        self._warned = still_s
        words = waiting_words(seen, self._names)
        return f"no rank has moved on for {still_s:.0f} s; {words}" if words else ""

    @property
    def limit_s(self) -> float:
        """How long a rank may be missed."""
        pace_s = max((sight.pace_s for sight in self._sights.values()), default=0.0)
        return limit_s(self._least_s, self._predicted_s, pace_s)

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's watcher has told so."""
        return rank in self._over

    def sight(self, rank: int) -> Sight:
        """What a rank was last seen doing."""
        return self._sights.get(rank, Sight())

    def node(self, rank: int) -> str:
        """Where it runs."""
        return self._nodes.get(rank, "")

    def _hears_of_the_end(self, content: Mapping[str, Any], rank: int, now: float) -> None:
        says = content["says"]
        if says in ("failing", "failed"):
            self._explained = True
        if says in ("bye", "died", "failed"):
            self._over.add(rank)
        if says == "died" and all(death.rank != rank for death in self._deaths):
            if not self._deaths:
                self._first_death = now
            fields = {name: content[name] for name in Death._fields if name != "rank"}
            self._deaths.append(Death(rank, **fields))

    def _of_deaths(self, now: float) -> Verdict | None:
        """The first; none if all were asked to end, as when a job is cancelled.

        Where a node is gone, launchers kill all ranks but those: that one is not heard of is what
        tells.
        """
        since_s = now - self._first_death
        if since_s < SETTLE_S or all(death.asked for death in self._deaths):
            return None
        missed_s = min(MISSED * interval_s(self._size), LONGEST_S)
        for rank, at in self._heard.items():
            if at < self._first_death and rank not in self._over:
                return self._gone(rank) if since_s > missed_s else None
        return self._first().verdict

    def _first(self) -> Death:
        """Of each node the first to end, and of those the one that was seen first."""
        nodes: dict[str, list[Death]] = {}
        for death in self._deaths:
            nodes.setdefault(self._nodes[death.rank], []).append(death)
        firsts = [
            min(ended, key=lambda death: (death.earlier, death.at)) for ended in nodes.values()
        ]
        return min(firsts, key=lambda death: death.at)

    def _gone(self, rank: int) -> Verdict:
        where = f" on {self._nodes[rank]}" if self._nodes[rank] else ""
        return Verdict(rank, f"nothing is heard of it{where} any more: the node is gone", RESUME)

    def _seen(self, now: float) -> dict[int, Seen]:
        return {
            rank: Seen(
                self._sights[rank],
                self._nodes[rank],
                still_s=now - self._moved[rank],
                stopped_s=now - self._stopped[rank] if rank in self._stopped else 0.0,
                silent_s=now - self._heard[rank],
            )
            for rank in sorted(self._sights.keys() - self._over)
        }
