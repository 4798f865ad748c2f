"""The process that watches the ranks of one node: ``python -m pipectl.watch.watcher``.

The node's first rank starts it. It reads what the ranks do from memory that they share with it,
sees from the kernel how they end, and writes one file (:mod:`pipectl.watch.files`). The watcher of
the first node reads those of all others, decides whether a rank is lost, writes down which and why,
and says in its own file that all are to be ended. Every other watcher reads only that file, and
decides by what it knows if the file is not renewed any more. Watchers talk in no other way.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    Node,
    describe_stall,
    interval_s,
    is_suspended,
    judge,
    limit_s,
)
from pipectl.watch.rank import DIED, FAILED, FAILS, LEFT, LocalRanks, RankReport

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


class Settings(NamedTuple):
    """What the node's first rank says to its watcher.

    Args:
        name: of the node.
        node: its number, of so many ``nodes``.
        size: ranks of the whole run.
        ranks: of this node, see :class:`LocalRanks`; so are ``launched`` and ``script``.
        start: the word for this start of the ranks.
        folder: of the watchers' files.
        errors: folder of error reports.
        min_s: for how long a rank may be missed, however short the steps are.
        predicted_s: a step, as the plan has it.
    """

    name: str
    node: int
    nodes: int
    size: int
    ranks: Sequence[Mapping[str, Any]]
    launched: bool
    script: int
    start: str
    folder: str
    errors: str
    min_s: float
    predicted_s: float


class Watcher:
    """Watches the ranks of one node.

    Raises:
        OSError: what a rank shares with it cannot be opened.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._is_first = settings, settings.node == 0
        self._ranks = LocalRanks(settings.ranks, launched=settings.launched, script=settings.script)
        self._interval_s = interval_s(settings.nodes)
        others = range(1, settings.nodes) if self._is_first else [0]
        self._files = {node: self._file_of(node) for node in others}
        self._own_file = self._file_of(settings.node)
        self._own = self._written = NodeReport(settings.name)
        self._nodes = {settings.node: Node(self._own)}
        self._now, self._written_at, self._read_at = 0.0, float("-inf"), float("-inf")
        self._ended_at: float | None = None
        self._kill_at: float | None = None
        self._is_decided = False
        self._warned_s = 0.0

    def watch(self) -> None:
        """Until all ranks of the node have ended, and there is nothing left to report."""
        before = time.monotonic()
        while not self._turn():
            wait_s = _SHORT_TICK_S if self._is_ending() else _TICK_S
            self._ranks.wait(wait_s)
            # Time is counted by wake-ups: none passes while this process is stopped.
            after = time.monotonic()
            self._now += min(after - before, 2 * wait_s)
            before = after
        self._ranks.clean_up()

    def _turn(self) -> bool:
        """Look around and act; whether all is over."""
        ranks = self._ranks.look(self._now)
        self._own = self._own._replace(ranks=ranks)
        self._nodes[self._settings.node].update(self._own, self._now)
        self._notice_end(self._own)
        self._read_files()
        self._decide()
        if self._own.ends:
            self._ranks.kill()
        is_news = self._own.news != self._written.news
        if is_news or self._now - self._written_at >= 0.9 * self._interval_s:
            if self._is_replaced():
                return True
            self._own_file.write(self._own)
            self._written, self._written_at = self._own, self._now
        states = {rank.state for rank in ranks}
        if states == {LEFT} or (self._settings.size == 1 and states & {FAILS, FAILED}):
            return True
        return self._ranks.are_gone and self._is_finished()

    def _is_ending(self) -> bool:
        return self._ranks.are_ending or self._is_decided or self._ended_at is not None

    def _notice_end(self, report: NodeReport) -> None:
        """Remember when a rank was first seen to have ended, or to fail."""
        if self._ended_at is None and {r.state for r in report.ranks} & {FAILS, FAILED, DIED}:
            self._ended_at = self._now
            self._read_at = float("-inf")  # what others say from now on, they say after it

    def _read_files(self) -> None:
        """What the watchers of other nodes say."""
        pause_s = self._interval_s * (_SHORT_TICK_S if self._is_ending() else 1.0)
        if self._now - self._read_at < 0.9 * pause_s:
            return
        self._read_at = self._now
        for node, file in self._files.items():
            report = file.read()
            if report is not None:
                self._nodes.setdefault(node, Node(NodeReport())).update(report, self._now)
                if self._is_first:
                    self._notice_end(report)

    def _decide(self) -> None:
        """Whether the run can go on: the first node's watcher decides, or if it is gone, this."""
        settings, now = self._settings, self._now
        first = self._nodes.get(0, Node(NodeReport()))
        ends = self._own.ends or first.report.ends
        if not self._is_first and (ends or not self._is_alone(first)):
            self._own = self._own._replace(ends=ends)
            return
        nodes = [node for _, node in sorted(self._nodes.items())]
        if is_suspended(nodes):  # the time in which none can move on does not count
            for node in nodes:
                node.moved_at = dict.fromkeys(node.moved_at, now)
        limit = limit_s(nodes, settings.nodes, settings.min_s, settings.predicted_s)
        limit *= 1.0 if self._is_first else _WITHOUT_FIRST
        if not self._is_decided and (
            lost := judge(nodes, now, limit, self._ended_at, complete=self._is_first)
        ):
            self._is_decided = True
            self._report(*lost)
        if self._kill_at is None and self._ended_at is not None:
            self._kill_at = self._ended_at + _GRACE_S
        elif self._kill_at is None and self._is_decided:
            self._kill_at = now
        self._own = self._own._replace(ends=self._kill_at is not None and now >= self._kill_at)
        if self._is_first:
            self._warn(*describe_stall(nodes, now, limit))

    def _is_alone(self, first: Node) -> bool:
        """Whether the first node's watcher says no more: it is gone, or has done its work."""
        since = max(first.heard_at, self._ended_at or 0.0)
        return self._now - since > max(_UNHEARD_S, 3 * self._interval_s)

    def _is_finished(self) -> bool:
        """Whether nothing is left to be said, once the own ranks have ended."""
        if not self._is_first:
            return self._own.ends
        if self._kill_at is None or self._ended_at is None:
            return False
        all_end = all(node.report.is_over for node in self._nodes.values())
        settled = all_end and self._now - self._ended_at >= SETTLE_S
        return settled or self._now > self._kill_at + _LEAVE_S

    def _warn(self, still_s: float, words: str) -> None:
        """Say who waits for whom if no rank moves on; once, then ever more rarely."""
        if not still_s:
            self._warned_s = 0.0
            self._own = self._own._replace(stalled="")
        elif still_s >= 2 * self._warned_s and not self._is_decided:
            self._warned_s = still_s
            self._own = self._own._replace(stalled=words)
            write_log(_LOG, f"pipectl: {printable(words)}\n")

    def _is_replaced(self) -> bool:
        """Whether the ranks have been started again, so that nothing here is of interest."""
        try:
            word = start_path(Path(self._settings.folder)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return False
        return word.strip() != self._settings.start

    def _report(self, node: Node, rank: RankReport) -> None:
        """Write the error file, as ranks do that fail, and the same into the log."""
        if self._is_replaced():
            return
        activity, death = rank.activity, rank.death
        document = {
            "version": 1,
            "rank": rank.rank,
            "stage": None if activity.stage < 0 else activity.stage,
            "step": activity.step,
            "action": activity.action,
            "host": node.report.node,
            "type": None,
            "message": death.message,
            "cure": death.cure,
            "traceback": death.stack,
            "time": death.at or time.time(),
            "exit_code": 1,
        }
        write_report(Path(self._settings.errors) / f"rank-{rank.rank:04d}.json", document)
        write_log(_LOG, report_text(document))

    def _file_of(self, node: int) -> NodeFile:
        return NodeFile(node_path(Path(self._settings.folder), node), self._settings.start)


def main() -> None:
    """Watch the ranks that the standard input names."""
    for number in _TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    try:
        watcher = Watcher(Settings(**json.load(sys.stdin)))
    except (OSError, ValueError) as error:
        write_log(_LOG, f"pipectl: the ranks of this node cannot be watched: {error}\n")
    else:
        watcher.watch()


if __name__ == "__main__":
    main()
