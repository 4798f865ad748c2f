"""The process that watches the ranks of one node: ``python -m pipectl.watch.watcher``.

The node's first rank starts it. It reads what the ranks do from memory that they share with it,
sees from the kernel how they end, and writes one file (:mod:`pipectl.watch.files`). The watcher of
the first node reads those of all others, decides whether a rank is lost, writes down which and why,
and says in its own file that all are to be ended. Watchers talk in no other way.
"""

from __future__ import annotations

import json
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipectl.printable import printable
from pipectl.watch.board import Sight
from pipectl.watch.files import (
    NodeFile,
    NodeReport,
    RankReport,
    node_path,
    report_text,
    write_log,
    write_report,
)
from pipectl.watch.judge import (
    RESUME,
    JobView,
    Names,
    Verdict,
    action,
    first_death,
    interval_s,
    judge_death,
    limit_s,
)
from pipectl.watch.rank import DIED, FAILED, FAILS, LEFT, LIVES, STOPPED, WatchedRank

_TO_ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Batch systems send these to all processes of a job; how ranks take them is to be seen."""
_LOG = 2
_TICK_S, _SHORT_TICK_S = 1.0, 0.1
_GRACE_S = 5.0
"""For launchers, which end all ranks when one has died."""
_LEAVE_S = 7.0
"""After which the first node's watcher ends, though others may have been lost."""
_UNHEARD_S = 5.0
"""After a death: if the first node's watcher says nothing, each reports that of its own rank."""
_WITHOUT_FIRST = 2.0
"""Times the limit that ranks may be still while the first node's watcher is silent."""


class Watcher:
    """Watches the ranks of one node.

    Args:
        given: what the node's first rank says; see :mod:`pipectl.runtime.watching`.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._names = Names(given["kinds"], given["lanes"])
        launch = {"launched": given["launched"], "script": given["script"]}
        self._ranks = {
            each["rank"]: WatchedRank(
                each["pid"], each["started"], each["board"], each["words"], **launch
            )
            for each in given["ranks"]
        }
        words = {each["rank"]: each["words"] for each in given["ranks"]}
        self._order = EndOrder({rank: (words[rank], it.handle) for rank, it in self._ranks.items()})
        self._interval_s = interval_s(given["nodes"])
        self._file = self._file_of(given["node"])
        self._now, self._written_at, self._looked_at = 0.0, float("-inf"), float("-inf")
        self._written: NodeReport | None = None
        self._lost_at: float | None = None
        self._ends = False

    def watch(self) -> None:
        """Until all ranks of the node have ended."""
        before = time.monotonic()
        while not self._turn():
            wait_s = _SHORT_TICK_S if self._is_ending() else _TICK_S
            self._order.wait(wait_s)
            # Time is counted by wake-ups: none passes while this process is stopped.
            after = time.monotonic()
            self._now += min(after - before, 2 * wait_s)
            before = after
        for rank in self._ranks.values():
            rank.clean_up()

    def _turn(self) -> bool:
        """Look around and act; whether all is over."""
        for number, rank in self._ranks.items():
            rank.look(self._order.before(number))
        states = {rank.state for rank in self._ranks.values()}
        if self._lost_at is None and states & {FAILS, FAILED, DIED}:
            self._lost_at = self._now
            self._looked_at = float("-inf")  # what others say from now on, they say after it
        pause_s = self._interval_s * (_SHORT_TICK_S if self._is_ending() else 1.0)
        if self._now - self._looked_at >= 0.9 * pause_s:
            self._looked_at = self._now
            self._hear()
        self._act()
        if self._ends:
            for rank in self._ranks.values():
                rank.kill()
        self._write()
        if states == {LEFT} or (self._given["size"] == 1 and states & {FAILS, FAILED}):
            return True
        return self._is_over() and all(
            rank.ended_at or rank.state == LEFT for rank in self._ranks.values()
        )

    def _is_ending(self) -> bool:
        return self._lost_at is not None or any(
            self._order.has(number) and rank.state in (LIVES, STOPPED)
            for number, rank in self._ranks.items()
        )

    def _hear(self) -> None:
        """What the watchers of other nodes say."""
        raise NotImplementedError

    def _act(self) -> None:
        """Find out whether the ranks must end, by what others say and became of the own ranks."""
        raise NotImplementedError

    def _is_over(self) -> bool:
        """Whether nothing is left to be said, once the own ranks have ended."""
        raise NotImplementedError

    def _content(self) -> NodeReport:
        ranks = {
            number: RankReport(rank.state, rank.sight, rank.death)
            for number, rank in self._ranks.items()
        }
        return NodeReport(self._given["name"], ranks, self._ends)

    def _write(self) -> None:
        """Write the file, when something has happened, and as a sign of life."""
        content, written = self._content(), self._written
        is_news = written is None or content.news() != written.news()
        if is_news or self._now - self._written_at >= 0.9 * self._interval_s:
            self._file.write(content, time.time())
            self._written, self._written_at = content, self._now

    def _report(self, verdict: Verdict, sight: Sight, node: str) -> None:
        document = report_document(verdict, sight, node, self._names)
        write_report(Path(self._given["errors"]) / f"rank-{verdict.rank:04d}.json", document)
        write_log(_LOG, report_text(document))

    def _file_of(self, node: int) -> NodeFile:
        return NodeFile(node_path(Path(self._given["folder"]), node), self._given["start"])


class FirstWatcher(Watcher):
    """Of the first node: knows all ranks, by what the watchers of the other nodes say."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._job = JobView(given["nodes"], given["min_s"], given["predicted_s"], self._names)
        self._others = {node: self._file_of(node) for node in range(1, given["nodes"])}
        self._faults: set[int] = set()
        self._end_at: float | None = None
        self._reported = False
        self._stalled = ""

    def _is_ending(self) -> bool:
        return self._end_at is not None or self._job.is_ending or super()._is_ending()

    def _hear(self) -> None:
        for node, file in self._others.items():
            report = file.read()
            if report is not None:
                self._job.hear(node, report, self._now)
            if file.fault and node not in self._faults:
                self._faults.add(node)
                write_log(_LOG, f"pipectl: {file.fault}; it counts as no word from that node\n")

    def _act(self) -> None:
        job, now = self._job, self._now
        job.hear(0, self._content(), now)
        verdict = None if self._reported else job.judge(now)
        if verdict is not None:
            self._reported = True
            self._report(verdict, job.sight(verdict.rank), job.node(verdict.rank))
        elif warning := job.warn(now):
            self._stalled = warning
            write_log(_LOG, f"pipectl: {printable(warning)}\n")
        if job.moves:
            self._stalled = ""
        if self._end_at is None and (verdict is not None or job.is_over(now)):
            self._end_at = now + (_GRACE_S if job.is_over(now) else 0.0)
        self._ends = self._end_at is not None and now >= self._end_at

    def _is_over(self) -> bool:
        if self._end_at is None:
            return False
        return self._job.all_have_ended(but=0) or self._now > self._end_at + _LEAVE_S

    def _content(self) -> NodeReport:
        return super()._content()._replace(knows=self._job.is_ending, stalled=self._stalled)


class OtherWatcher(Watcher):
    """Of any other node: does what the first one's says, and without it what it can."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._first_file = self._file_of(0)
        self._first = NodeReport("", {})
        self._heard_at = 0.0
        self._moves: list[int] = []
        self._moved_at = 0.0

    def _hear(self) -> None:
        report = self._first_file.read()
        if report is not None:
            self._first, self._heard_at = report, self._now

    def _act(self) -> None:
        if self._ends:
            return
        moves = [rank.sight.moves for rank in self._ranks.values()]
        if moves != self._moves:
            self._moves, self._moved_at = moves, self._now
        if self._first.ends:
            self._ends = True
        elif self._lost_at is not None:
            silent_s = self._now - max(self._lost_at, self._heard_at)
            late = self._now - self._lost_at > _GRACE_S + _LEAVE_S
            if late or silent_s > max(_UNHEARD_S, 3 * self._interval_s):
                self._ends = True
                self._report_alone(self._lost_at)
        elif not self._first.is_over:
            pace_s = max(rank.sight.pace_s for rank in self._ranks.values())
            limit = limit_s(self._given["min_s"], self._given["predicted_s"], pace_s)
            still_s = self._now - max(self._heard_at, self._moved_at)
            if still_s > _WITHOUT_FIRST * max(limit, 4 * self._interval_s):
                self._ends = True
                self._report_first()

    def _is_over(self) -> bool:
        return self._ends or self._first.knows

    def _report_alone(self, lost_at: float) -> None:
        """Why the own ranks end, if nobody else says so."""
        if self._first.knows:
            return
        if not self._first.is_over and self._heard_at < lost_at:
            self._report_first()
            return
        if any(rank.state in (FAILS, FAILED) for rank in self._ranks.values()):
            return
        deaths = {n: rank.death for n, rank in self._ranks.items() if rank.death is not None}
        if not deaths:  # what seemed dead has left properly
            return
        number, death = first_death(deaths, dict.fromkeys(deaths, 0))
        if not death.is_wanted:
            sight = self._ranks[number].sight
            self._report(judge_death(number, death), sight, self._given["name"])

    def _report_first(self) -> None:
        """That the first node is gone."""
        message = "nothing is heard of its node any more: it is gone"
        verdict = Verdict(min(self._first.ranks), message, RESUME)
        self._report(verdict, self._first.ranks[verdict.rank].sight, self._first.node)


class EndOrder:
    """In which order ranks end, as the kernel saw it, whenever that is looked at.

    The death of one rank has its launcher kill all others within a millisecond, but what happens
    becomes ready in an epoll instance one after the other. A process gives back its files before it
    counts as ended, and launchers notice by that; so the file through which it speaks tells, too.

    Args:
        handles: of every rank, what it speaks through, and its process.
    """

    def __init__(self, handles: Mapping[int, tuple[int, int | None]]) -> None:
        self._epoll = select.epoll()
        self._rank_of: dict[int, int] = {}
        self._ended: list[int] = []
        for rank, (words, process) in handles.items():
            if words >= 0:
                self._epoll.register(words, 0)  # its end is told without being asked for
                self._rank_of[words] = rank
            if process is not None:
                self._epoll.register(process, select.EPOLLIN)
                self._rank_of[process] = rank

    def wait(self, seconds: float) -> None:
        """Until a rank ends, or for so long."""
        if not self._rank_of:
            time.sleep(seconds)
            return
        for handle, _ in self._epoll.poll(seconds, len(self._rank_of)):
            self._epoll.unregister(handle)
            rank = self._rank_of.pop(handle)
            if rank not in self._ended:
                self._ended.append(rank)

    def has(self, rank: int) -> bool:
        """Whether it has ended, or is about to."""
        return rank in self._ended

    def before(self, rank: int) -> int:
        """How many have ended before it did, or so far."""
        return self._ended.index(rank) if rank in self._ended else len(self._ended)


def report_document(verdict: Verdict, sight: Sight, node: str, names: Names) -> dict[str, Any]:
    """The contents of an error file, as ranks write it that fail."""
    return {
        "version": 1,
        "rank": verdict.rank,
        "stage": None if sight.stage < 0 else sight.stage,
        "step": sight.step,
        "action": action(sight, names),
        "host": node,
        "type": None,
        "message": verdict.message,
        "cure": verdict.cure,
        "traceback": verdict.stack,
        "time": time.time() if verdict.at is None else verdict.at,
        "earlier": None if verdict.at is None else verdict.earlier,
        "exit_code": 1,
    }


def main() -> None:
    """Watch the ranks that the standard input names."""
    for number in _TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    given = json.load(sys.stdin)
    (OtherWatcher if given["node"] else FirstWatcher)(given).watch()


if __name__ == "__main__":
    main()
