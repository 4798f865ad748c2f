"""The process that watches the ranks of one node: ``python -m pipectl.watch.watcher``.

The node's first rank starts it. It reads shared memory to learn what the ranks do, observes how
they end, and writes one file. Each start of the run has its own directory of such files. The
watcher of the first node reads all files, decides whether a rank is lost, reports which and why,
and tells the others in its own file to kill their ranks. The others read only that file, and decide
by themselves if it is no longer renewed. Watchers do not communicate in any other way.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from pipectl.faults import ErrorReport
from pipectl.fields import read_value
from pipectl.files import write_log
from pipectl.units import printable
from pipectl.watch.judge import (
    SETTLE_S,
    describe_stall,
    interval_s,
    is_suspended,
    judge,
    limit_s,
)
from pipectl.watch.rank import LocalRank, LocalRanks
from pipectl.watch.report import (
    NodeReport,
    RankReport,
    Stamp,
    State,
    node_path,
    read_report,
    write_report,
)

_TO_ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that batch systems send to all processes of a job; the watcher ignores them."""
_LOG = 2
_TICK_S, _SHORT_TICK_S = 1.0, 0.1
_GRACE_S = 5.0
"""Time for the launcher to end all ranks after one has died."""
_LEAVE_S = 7.0
"""The first node's watcher ends this long after the kill, even if other nodes have not reported."""
_UNHEARD_S = 5.0
"""Without a new report for this time, and three intervals, the first node's watcher is lost."""
_WITHOUT_FIRST = 2.0
"""Factor of the limit if the first node's watcher is lost."""
_NEVER = float("-inf")


class Settings(NamedTuple):
    """What a node's first rank passes to the watcher.

    Args:
        name: name of the node.
        node: its number; there are ``nodes``.
        size: number of ranks of the run.
        ranks: of this node.
        launched, script: see :class:`LocalRanks`.
        folder: directory of the watchers' files.
        errors: directory of error reports.
        min_s, predicted_s: see :func:`pipectl.watch.judge.limit_s`.
    """

    name: str
    node: int
    nodes: int
    size: int
    ranks: tuple[LocalRank, ...]
    launched: bool
    script: int
    folder: str
    errors: str
    min_s: float
    predicted_s: float


class Watcher:
    """The watcher of one node.

    Raises:
        OSError: the memory or the pipe of a rank cannot be opened.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._is_first = settings, settings.node == 0
        self._ranks = LocalRanks(settings.ranks, launched=settings.launched, script=settings.script)
        self._interval_s = interval_s(settings.nodes)
        self._folder = Path(settings.folder)
        others = range(1, settings.nodes) if self._is_first else [0]
        self._stamps: dict[int, Stamp | None] = dict.fromkeys(others)
        self._own = self._written = NodeReport(settings.name)
        self._heard = {settings.node: (self._own, 0.0)}
        self._now, self._suspended_at, self._written_at, self._read_at = 0.0, _NEVER, _NEVER, _NEVER
        self._ended_at: float | None = None
        self._kill_at = float("inf")
        self._is_decided = False
        self._warned_s = 0.0

    def watch(self) -> None:
        """Watch until all ranks of the node have ended and everything is reported."""
        before = time.monotonic()
        while not self._turn():
            wait_s = _SHORT_TICK_S if self._is_ending() else _TICK_S
            self._ranks.wait(wait_s)
            # Time does not pass while this process is stopped.
            after = time.monotonic()
            self._now += min(after - before, 2 * wait_s)
            before = after
        self._ranks.clean_up()

    def _turn(self) -> bool:
        """Read ranks and files, decide, kill, and write; return whether all is over."""
        settings, now = self._settings, self._now
        self._own = self._own._replace(ranks=self._ranks.look(now))
        self._store(settings.node, self._own)
        self._read_files()
        self._decide()
        if self._own.ends:
            self._ranks.kill()
        is_news = self._own.news != self._written.news
        if is_news or now - self._written_at >= 0.9 * self._interval_s:
            write_report(node_path(self._folder, settings.node), self._own)
            self._written, self._written_at = self._own, now
        states = {rank.state for rank in self._own.ranks}
        if states == {State.LEFT} or (settings.size == 1 and states & {State.FAILS, State.FAILED}):
            return True
        if not self._ranks.are_gone or not self._is_first:
            return self._ranks.are_gone and self._own.ends
        if self._ended_at is None:
            return False
        heard_of_all = len(self._heard) == settings.nodes
        all_end = heard_of_all and all(node.is_over for node, _ in self._heard.values())
        settled = all_end and now - self._ended_at >= SETTLE_S
        return settled or now > self._kill_at + _LEAVE_S

    def _is_ending(self) -> bool:
        return self._ranks.are_ending or self._is_decided or self._ended_at is not None

    def _store(self, number: int, report: NodeReport) -> None:
        """Store the report of a node, and when the first rank ended."""
        self._heard[number] = report, self._now
        concerns = self._is_first or number == self._settings.node
        ended = {rank.state for rank in report.ranks} & {State.FAILS, State.FAILED, State.DIED}
        if self._ended_at is None and concerns and ended:
            self._ended_at = self._now
            self._kill_at = min(self._kill_at, self._now + _GRACE_S)
            self._read_at = _NEVER  # reports read from now on are newer

    def _read_files(self) -> None:
        """Read the reports of other nodes."""
        pause_s = self._interval_s * (_SHORT_TICK_S if self._is_ending() else 1.0)
        if self._now - self._read_at >= 0.9 * pause_s:
            self._read_at = self._now
            for number, last in self._stamps.items():
                if (news := read_report(node_path(self._folder, number), last)) is not None:
                    self._stamps[number], report = news
                    self._store(number, report)

    def _list_reports(self) -> list[NodeReport]:
        """Return all reports with their age; time while all ranks were suspended is left out."""
        reports = []
        for _, (node, heard_at) in sorted(self._heard.items()):
            silent_s = self._now - heard_at
            moving_s = self._now - self._suspended_at
            ranks = [r._replace(still_s=min(r.still_s + silent_s, moving_s)) for r in node.ranks]
            reports.append(node._replace(ranks=tuple(ranks), silent_s=silent_s))
        return reports

    def _decide(self) -> None:
        """Decide if the run can go on: on the first node, or if the first watcher is lost."""
        settings, now = self._settings, self._now
        first, first_heard_at = self._heard.get(0, (NodeReport(), 0.0))
        ends = self._own.ends or first.ends
        # The first node's watcher may have ended, or be lost.
        unheard_s = now - max(first_heard_at, self._ended_at or 0.0)
        is_alone = unheard_s > max(_UNHEARD_S, 3 * self._interval_s)
        if not self._is_first and (ends or not is_alone):
            self._own = self._own._replace(ends=ends)
            return
        if is_suspended(node for node, _ in self._heard.values()):
            self._suspended_at = now
        nodes = self._list_reports()
        limit = limit_s(nodes, settings.nodes, settings.min_s, settings.predicted_s)
        limit *= 1.0 if self._is_first else _WITHOUT_FIRST
        ended_s = None if self._ended_at is None else now - self._ended_at
        if not self._is_decided and (lost := judge(nodes, limit, ended_s, complete=self._is_first)):
            self._is_decided = True
            if self._ended_at is None:
                self._kill_at = now
            self._report(*lost)
        self._own = self._own._replace(ends=now >= self._kill_at)
        if self._is_first:
            self._warn(*describe_stall(nodes, limit))

    def _warn(self, still_s: float, words: str) -> None:
        """Log who waits for whom if no rank makes progress: once, then after twice the time."""
        if not still_s:
            self._warned_s = 0.0
            self._own = self._own._replace(stalled="")
        elif still_s >= 2 * self._warned_s and not self._is_decided:
            self._warned_s = still_s
            self._own = self._own._replace(stalled=words)
            write_log(_LOG, f"pipectl: {printable(words)}\n")

    def _report(self, node: NodeReport, rank: RankReport) -> None:
        """Write the error file of a lost rank, and the same text to the log."""
        doing = rank.activity
        stage, ended_at = None if doing.stage < 0 else doing.stage, rank.ended_at or time.time()
        error = ErrorReport(
            rank.message, rank.rank, stage, doing.step, doing.action, node.node, None, rank.hint,
            rank.stack, ended_at,
        )  # fmt: skip
        error.save(Path(self._settings.errors) / f"rank-{rank.rank:04d}.json")
        write_log(_LOG, error.text)


def main() -> None:
    """Watch the ranks named on standard input."""
    for number in _TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    settings: Settings = read_value(Settings, json.load(sys.stdin))
    try:
        watcher = Watcher(settings)
    except (OSError, ValueError) as error:
        # A rank that failed to start reports that itself, and has closed what it shares; its file
        # descriptor may be in use for another file.
        is_missing = isinstance(error, FileNotFoundError) and not error.filename.endswith("/-1")
        has_closed = is_missing or isinstance(error, ValueError)
        if not has_closed:
            write_log(_LOG, f"pipectl: the ranks of this node cannot be watched: {error}\n")
    else:
        watcher.watch()


if __name__ == "__main__":
    main()
