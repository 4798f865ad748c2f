"""The process that watches the ranks of one node: ``python -m pipectl.watch.watcher``.

The node's first rank starts it. It reads what the ranks do from memory that they share with it,
sees from the kernel how they end, and writes one file (:mod:`pipectl.watch.files`). The watcher of
the first node reads those of all others, decides whether a rank is lost, writes down which and why,
and says in its own file that all are to be ended. Every other watcher reads only that file, and
decides by what it knows if the file is not renewed any more. Watchers talk in no other way.
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
from pipectl.watch.files import (
    NodeFile,
    NodeReport,
    node_path,
    report_text,
    start_path,
    write_log,
    write_report,
)
from pipectl.watch.judge import (
    SETTLE_S,
    Names,
    Node,
    Verdict,
    action,
    describe_stall,
    interval_s,
    is_suspended,
    judge,
    limit_s,
)
from pipectl.watch.rank import DIED, FAILED, FAILS, LEFT, WatchedRank

_TO_ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Batch systems send these to all processes of a job; how ranks take them is to be seen."""
_LOG = 2
_TICK_S, _SHORT_TICK_S = 1.0, 0.1
_GRACE_S = 5.0
"""For launchers, which end all ranks when one has died."""
_LEAVE_S = 7.0
"""After which the first node's watcher ends, though others may have been lost."""
_UNHEARD_S = 5.0
"""After which, or three intervals, the first node's watcher counts as gone."""
_WITHOUT_FIRST = 2.0
"""Times the limit that ranks may be missed if the first node's watcher is gone."""


class Watcher:
    """Watches the ranks of one node.

    Args:
        settings: what the node's first rank says; see :mod:`pipectl.runtime.watching`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings, self._node = settings, settings["node"]
        self._names = Names(settings["kinds"], settings["lanes"])
        launch = {"launched": settings["launched"], "script": settings["script"]}
        self._ranks = [WatchedRank(**rank, **launch) for rank in settings["ranks"]]
        self._order = EndOrder()
        for each, rank in zip(settings["ranks"], self._ranks, strict=True):
            self._order.add(rank.rank, each["words"], rank.handle)
        self._interval_s = interval_s(settings["nodes"])
        others = range(1, settings["nodes"]) if self._node == 0 else [0]
        self._files = {node: self._file_of(node) for node in others}
        self._own_file = self._file_of(self._node)
        self._own = self._written = NodeReport(settings["name"])
        self._reports: dict[int, NodeReport] = {}
        self._heard_at: dict[int, float] = {}
        self._changed_at: dict[int, float] = {}
        self._suspended_at = float("-inf")
        self._faults: set[int] = set()
        self._now, self._written_at, self._read_at = 0.0, float("-inf"), float("-inf")
        self._ended_at: float | None = None
        self._kill_at: float | None = None
        self._decided = False
        self._warned_s = 0.0

    def watch(self) -> None:
        """Until all ranks of the node have ended, and there is nothing left to report."""
        before = time.monotonic()
        while not self._turn():
            wait_s = _SHORT_TICK_S if self._is_ending() else _TICK_S
            self._order.wait(wait_s)
            # Time is counted by wake-ups: none passes while this process is stopped.
            after = time.monotonic()
            self._now += min(after - before, 2 * wait_s)
            before = after
        for rank in self._ranks:
            rank.clean_up()

    def _turn(self) -> bool:
        """Look around and act; whether all is over."""
        ranks = [rank.look(self._now, self._order.before(rank.rank)) for rank in self._ranks]
        self._own = self._own._replace(ranks=tuple(ranks))
        self._notice_end(self._own)
        self._read_files()
        self._decide()
        if self._own.ends:
            for rank in self._ranks:
                rank.kill()
        is_news = self._own.events() != self._written.events()
        if is_news or self._now - self._written_at >= 0.9 * self._interval_s:
            if self._is_replaced():
                return True
            self._own_file.write(self._own, time.time())
            self._written, self._written_at = self._own, self._now
        states = {rank.state for rank in ranks}
        if states == {LEFT} or (self._settings["size"] == 1 and states & {FAILS, FAILED}):
            return True
        return all(rank.is_gone for rank in self._ranks) and self._is_finished()

    def _is_ending(self) -> bool:
        about_to_end = (rank for rank in self._ranks if rank.rank in self._order.ranks)
        ends = not all(rank.is_gone for rank in about_to_end)
        return ends or self._decided or self._ended_at is not None

    def _notice_end(self, report: NodeReport) -> None:
        """Remember when a rank was first seen to have ended, or to fail."""
        if self._ended_at is None and {r.state for r in report.ranks} & {FAILS, FAILED, DIED}:
            self._ended_at = self._now
            self._read_at = float("-inf")  # what others say from now on, they say after it
            self._own = self._own._replace(knows=True)

    def _read_files(self) -> None:
        """What the watchers of other nodes say."""
        pause_s = self._interval_s * (_SHORT_TICK_S if self._is_ending() else 1.0)
        if self._now - self._read_at < 0.9 * pause_s:
            return
        self._read_at = self._now
        for node, file in self._files.items():
            before, report = file.time, file.read()
            if report is not None:
                self._reports[node], self._heard_at[node] = report, self._now
                if file.time != before:
                    self._changed_at[node] = self._now
                if self._node == 0:
                    self._notice_end(report)
            elif file.fault and node not in self._faults and self._node == 0:
                self._faults.add(node)
                write_log(_LOG, f"pipectl: {file.fault}; it counts as no word from that node\n")

    def _decide(self) -> None:
        """Whether the run can go on: the first node's watcher decides, or if it is gone, this."""
        if self._node != 0 and (self._own.ends or self._first.ends or not self._is_alone()):
            self._own = self._own._replace(ends=self._own.ends or self._first.ends)
            return
        settings, now = self._settings, self._now
        reports = {**self._reports, self._node: self._own}
        nodes = [
            Node(report, now - self._heard_at.get(node, now), now - self._changed_at.get(node, now))
            for node, report in sorted(reports.items())
        ]
        if is_suspended(nodes):
            self._suspended_at = now
        awake_s = now - self._suspended_at
        limit = limit_s(nodes, settings["nodes"], settings["min_s"], settings["predicted_s"])
        limit *= _WITHOUT_FIRST if self._node else 1.0
        ended_s = None if self._ended_at is None else now - self._ended_at
        is_reported = self._node != 0 and self._first.knows
        complete = self._node == 0
        if not (self._decided or is_reported) and (
            verdict := judge(nodes, limit, self._names, ended_s, awake_s=awake_s, complete=complete)
        ):
            self._decided = True
            self._report(verdict)
        if self._kill_at is None and self._ended_at is not None:
            self._kill_at = self._ended_at + _GRACE_S
        elif self._kill_at is None and (self._decided or is_reported):
            self._kill_at = now
        self._own = self._own._replace(ends=self._kill_at is not None and now >= self._kill_at)
        if self._node == 0:
            self._warn(*describe_stall(nodes, limit, self._names, awake_s=awake_s))

    @property
    def _first(self) -> NodeReport:
        """What the first node's watcher said last."""
        return self._reports.get(0, NodeReport())

    def _is_alone(self) -> bool:
        """Whether the first node's watcher says no more: it is gone, or has done its work."""
        unheeded_s = 0.0 if self._ended_at is None else self._now - self._ended_at
        if unheeded_s > _GRACE_S + _LEAVE_S:  # it does not hear of this node
            return True
        since = max(self._heard_at.get(0, 0.0), self._ended_at or 0.0)
        return self._now - since > max(_UNHEARD_S, 3 * self._interval_s)

    def _is_finished(self) -> bool:
        """Whether nothing is left to be said, once the own ranks have ended."""
        if self._node != 0:
            return self._own.ends or self._first.knows
        if self._kill_at is None or self._ended_at is None:
            return False
        others_end = all(report.is_over for report in self._reports.values())
        settled = others_end and self._now - self._ended_at >= SETTLE_S
        return settled or self._now > self._kill_at + _LEAVE_S

    def _warn(self, still_s: float, words: str) -> None:
        """Say who waits for whom if no rank moves on; once, then ever more rarely."""
        if not still_s:
            self._warned_s = 0.0
            self._own = self._own._replace(stalled="")
        elif still_s >= 2 * self._warned_s and not self._decided:
            self._warned_s = still_s
            self._own = self._own._replace(stalled=words)
            write_log(_LOG, f"pipectl: {printable(words)}\n")

    def _is_replaced(self) -> bool:
        """Whether the ranks have been started again, so that nothing here is of interest."""
        try:
            word = start_path(Path(self._settings["folder"])).read_bytes()
        except OSError:
            return False
        return word.strip() != str(self._settings["start"]).encode()

    def _report(self, verdict: Verdict) -> None:
        """Write the error file, as ranks do that fail, and the same into the log."""
        if self._is_replaced():
            return
        rank, activity = verdict.rank.rank, verdict.rank.activity
        document = {
            "version": 1,
            "rank": rank,
            "stage": None if activity.stage < 0 else activity.stage,
            "step": activity.step,
            "action": action(activity, self._names),
            "host": verdict.node,
            "type": None,
            "message": verdict.message,
            "cure": verdict.cure,
            "traceback": verdict.stack,
            "time": time.time() if verdict.at is None else verdict.at,
            "earlier": None if verdict.at is None else verdict.rank.death.earlier,
            "exit_code": 1,
        }
        write_report(Path(self._settings["errors"]) / f"rank-{rank:04d}.json", document)
        write_log(_LOG, report_text(document))

    def _file_of(self, node: int) -> NodeFile:
        return NodeFile(node_path(Path(self._settings["folder"]), node), self._settings["start"])


class EndOrder:
    """In which order ranks end, as the kernel saw it, however late that is looked at.

    The death of one rank has its launcher kill all others within a millisecond, but what happens
    becomes ready in an epoll instance one after the other. A process gives back its files before it
    counts as ended, and launchers notice by that; so the file through which it speaks tells, too.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._rank_of: dict[int, int] = {}
        self.ranks: list[int] = []

    def add(self, rank: int, words: int, process: int | None) -> None:
        """Look after a rank by the pipe through which it speaks (-1 for none), and its process."""
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
            if rank not in self.ranks:
                self.ranks.append(rank)

    def before(self, rank: int) -> int:
        """How many have ended before it did, or so far."""
        return self.ranks.index(rank) if rank in self.ranks else len(self.ranks)


def main() -> None:
    """Watch the ranks that the standard input names."""
    for number in _TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    Watcher(json.load(sys.stdin)).watch()


if __name__ == "__main__":
    main()
