"""What the first node's watcher knows of all ranks, and decides. It is told the time, and has none.

Time is counted by its own wake-ups: while a whole job is suspended, none passes.
"""

from __future__ import annotations

from pipectl.watch.board import Sight
from pipectl.watch.node_file import NodeReport
from pipectl.watch.rank import FAILED, FAILS, OVER, STOPPED, Death
from pipectl.watch.verdict import (
    RESUME,
    Seen,
    Verdict,
    judge,
    judge_death,
    limit_s,
    waiting_words,
)
from pipectl.watch.words import Names

SETTLE_S = 0.3
"""After a death: others may be older, or a rank may have said why it fails."""
LONGEST_S = 11.0
"""After a death, however many nodes there are: the first node's watcher ends a second later."""
_MISSED, _MISSED_S = 4, 5.0
"""Intervals, and seconds, after a death: a node that is not heard of since then is gone."""
_FILES_PER_S = 32
"""That all watchers together write; with more nodes, each writes more rarely."""


def interval_s(nodes: int) -> float:
    """Between two signs of life of one of so many nodes, in seconds."""
    return max(1.0, nodes / _FILES_PER_S)


class JobView:
    """All ranks, by what their nodes' watchers say.

    Args:
        nodes: how many there are.
        min_s: a rank is never missed sooner, see :func:`limit_s`.
        predicted_s: a step.
    """

    def __init__(self, nodes: int, min_s: float, predicted_s: float, names: Names) -> None:
        self._interval_s = interval_s(nodes)
        self._min_s, self._predicted_s = min_s, predicted_s
        self._names = names
        self._nodes: dict[int, NodeReport] = {}
        self._heard: dict[int, float] = {}
        self._moved: dict[int, float] = {}
        self._stopped: dict[int, float] = {}
        self._deaths: dict[int, Death] = {}
        self._first_death = 0.0
        self._explained = False
        self._warned = 0.0

    def hears(self, node: int, report: NodeReport, now: float) -> None:
        """Take in what the watcher of a node says."""
        before = self._nodes.get(node)
        for rank, each in report.ranks.items():
            old = before.ranks.get(rank) if before is not None else None
            if old is None or _progress(old.sight) != _progress(each.sight):
                self._moved[rank] = now
            if each.state == STOPPED:
                self._stopped.setdefault(rank, now)
            else:
                self._stopped.pop(rank, None)
            self._explained |= each.state in (FAILS, FAILED)
            if each.death is not None and rank not in self._deaths:
                self._first_death = self._first_death if self._deaths else now
                self._deaths[rank] = each.death
        self._nodes[node], self._heard[node] = report, now

    def verdict(self, now: float) -> Verdict | None:
        """Why the run cannot go on; None while it can, or if the ranks said so themselves."""
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
        if len(seen) < self._ranks or self._deaths or still_s < 2 * self._warned:
            return ""
        self._warned = still_s
        words = waiting_words(seen, self._names)
        return f"no rank has moved on for {still_s:.0f} s: {words}"

    @property
    def moves(self) -> bool:
        """Whether no warning stands."""
        return self._warned == 0.0

    @property
    def limit_s(self) -> float:
        """How long a rank may be missed."""
        sights = [each.sight for report in self._nodes.values() for each in report.ranks.values()]
        pace_s = max((sight.pace_s for sight in sights), default=0.0)
        limit = limit_s(self._min_s, self._predicted_s, pace_s)
        return max(limit, (_MISSED * self._interval_s) if len(self._nodes) > 1 else 0.0)

    def all_have_ended(self, *, but: int) -> bool:
        """Whether no rank lives, apart from those of one node."""
        return all(_is_over(report) for node, report in self._nodes.items() if node != but)

    def sight(self, rank: int) -> Sight:
        """What a rank was last seen doing."""
        node = self._node_of(rank)
        return Sight() if node is None else self._nodes[node].ranks[rank].sight

    def name(self, rank: int) -> str:
        """Of the node that it runs on."""
        node = self._node_of(rank)
        return "" if node is None else self._nodes[node].node

    @property
    def _ranks(self) -> int:
        return sum(len(report.ranks) for report in self._nodes.values())

    def _node_of(self, rank: int) -> int | None:
        return next((node for node, report in self._nodes.items() if rank in report.ranks), None)

    def _of_deaths(self, now: float) -> Verdict | None:
        """The first; none if all were asked to end, as when a job is cancelled.

        If a node is gone, launchers kill all ranks but those: that it is not heard of is what
        tells. What was read together with the first death may have been written before it.
        """
        since_s = now - self._first_death
        if since_s < SETTLE_S or all(death.is_wanted for death in self._deaths.values()):
            return None
        missed_s = min(max(_MISSED * self._interval_s, _MISSED_S), LONGEST_S)
        for node, at in self._heard.items():
            if at <= self._first_death and not _is_over(self._nodes[node]):
                return self._gone(node) if since_s > missed_s else None
        firsts: dict[int | None, int] = {}
        for rank, _ in sorted(self._deaths.items(), key=lambda item: (item[1].earlier, item[1].at)):
            firsts.setdefault(self._node_of(rank), rank)
        first = min(firsts.values(), key=lambda rank: self._deaths[rank].at)
        return judge_death(first, self._deaths[first])

    def _gone(self, node: int) -> Verdict:
        report = self._nodes[node]
        where = f" on {report.node}" if report.node else ""
        message = f"nothing is heard of it{where} any more: the node is gone"
        return Verdict(min(report.ranks), message, RESUME)

    def _seen(self, now: float) -> dict[int, Seen]:
        return {
            rank: Seen(
                each.sight,
                report.node,
                still_s=now - self._moved[rank],
                stopped_s=now - self._stopped[rank] if rank in self._stopped else 0.0,
                silent_s=now - self._heard[node],
            )
            for node, report in sorted(self._nodes.items())
            for rank, each in sorted(report.ranks.items())
            if each.state not in OVER
        }


def _progress(sight: Sight) -> tuple[int, int]:
    return sight.moves, sight.step


def _is_over(report: NodeReport) -> bool:
    return all(each.state in OVER for each in report.ranks.values())
