"""Watchers of processes that stand in for ranks: what they read and write, and what they do.

Whole jobs that lose ranks are in tests/runtime/watch.
"""

import json
import mmap
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pipectl
from pipectl.files import write_log
from pipectl.runs import RunDirectory, read_errors
from pipectl.watch import process_state
from pipectl.watch.board import SIZE, Activity, Board, read_activity, wait_record
from pipectl.watch.rank import BYE, FAILING, LocalRank, LocalRanks
from pipectl.watch.report import NodeReport, RankReport, State, node_path, read_report, write_report
from pipectl.watch.watcher import Settings
from tests.batch.job_requests import wait_until

LONG_S = 60.0
CRASH, TERM = b"Fatal Python error: Aborted\nThread 1", bytes([signal.SIGTERM])


class Rank:
    """A process that sleeps, and what it would show and say."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process = subprocess.Popen(["/bin/sleep", "600"])
        self.board = Board()
        self.pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def says(self, words: bytes) -> None:
        os.write(self.pipe[1], words)

    def ends(self) -> None:
        self.process.kill()
        self.process.wait()

    def settings(self) -> LocalRank:
        state = process_state(self.process.pid)
        assert state is not None
        board, words = (f"/proc/{os.getpid()}/fd/{x}" for x in (self.board.handle, self.pipe[0]))
        return LocalRank(self.number, state.pid, state.started, board, words)

    def close(self) -> None:
        self.ends()
        for handle in self.pipe:
            os.close(handle)


class Job:
    """Ranks of one job on nodes that are all this machine, and the watchers of those."""

    def __init__(self, run: RunDirectory) -> None:
        self.run, self.log = run, run.path / "log"
        run.start.errors.mkdir(parents=True)
        self.folder = run.start.watch
        self.folder.mkdir(mode=0o700)
        self.ranks: list[Rank] = []
        self.watchers: list[subprocess.Popen[bytes]] = []

    def start(self, *nodes: int, min_s: float = LONG_S) -> list[Rank]:
        """So many ranks on each node, and watch them."""
        self.ranks = [Rank(number) for number in range(sum(nodes))]
        left = iter(self.ranks)
        for index, count in enumerate(nodes):
            self._watch(index, [next(left) for _ in range(count)], len(nodes), min_s)
        wait_until(lambda: all(node_path(self.folder, i).exists() for i in range(len(nodes))))
        return self.ranks

    def wait(self) -> None:
        """Until the watchers have ended."""
        for watcher in self.watchers:
            assert watcher.wait(LONG_S) in (0, -signal.SIGKILL), self.log.read_text()

    def wait_for_words(self, node: int) -> None:
        """Until a watcher has written twice."""
        for _ in range(2):
            before = node_path(self.folder, node).stat().st_mtime_ns
            wait_until(lambda: node_path(self.folder, node).stat().st_mtime_ns != before)  # noqa: B023

    def report(self, node: int) -> NodeReport:
        found = read_report(node_path(self.folder, node))
        assert found is not None
        return found[1]

    @property
    def reports(self) -> dict[int, str]:
        """What was said of each rank that was found lost."""
        return {error.rank: error.message for error in read_errors(self.run.start)}

    def _watch(self, node: int, ranks: list[Rank], nodes: int, min_s: float) -> None:
        settings = Settings(
            name=f"n{node}", node=node, nodes=nodes, size=len(self.ranks), launched=False, script=0,
            ranks=tuple(rank.settings() for rank in ranks), folder=str(self.folder),
            errors=str(self.run.start.errors), min_s=min_s, predicted_s=0.0,
        )  # fmt: skip
        command = [sys.executable, "-S", "-m", "pipectl.watch.watcher"]
        environment = {**os.environ, "PYTHONPATH": str(Path(pipectl.__file__).parents[1])}
        with self.log.open("ab") as log:
            watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log, env=environment)
        watcher.stdin.write(json.dumps(settings._asdict()).encode())
        watcher.stdin.close()
        self.watchers.append(watcher)


@pytest.fixture
def job(tmp_path):
    made = Job(RunDirectory(tmp_path))
    yield made
    for watcher in made.watchers:
        watcher.kill()
        watcher.wait()
    for rank in made.ranks:
        rank.close()


KILLED = "its process was killed (by SIGKILL, for example) or exited without a message"
MEMORY = "killed by the kernel, for lack of memory on its node"


@pytest.mark.parametrize(
    ("words", "how", "message"),
    [
        (b"", "", KILLED),
        (b"", "for lack of memory", MEMORY),
        (CRASH, "for lack of memory", "its process crashed: Fatal Python error: Aborted"),
        (TERM, "", "its process alone received SIGTERM or SIGINT"),
        (TERM, "for lack of memory", MEMORY),
        pytest.param(TERM, "later", KILLED, id="ranks save first, and may be killed meanwhile"),
        (b"", "with its script", "the job script that started it is gone"),
        (b"", "with little time", "killed by the kernel, after 4 s of processor time"),
    ],
)
def test_what_is_said_of_a_death(monkeypatch, tmp_path, words, how, message):
    rank, script, kernel = Rank(0), Rank(1), tmp_path / "vmstat"
    kernel.write_text("oom_kills_of_others 9\noom_kill 7\n")
    monkeypatch.setattr(
        "pipectl.watch.rank.Path", lambda path: kernel if path == "/proc/vmstat" else Path(path)
    )
    if how == "with little time":
        resource.prlimit(rank.process.pid, resource.RLIMIT_CPU, (4, 4))
    ranks = LocalRanks([rank.settings()], launched=True, script=script.process.pid)
    assert ranks.look(1.0) == (RankReport(activity=rank.board.read()),)
    rank.says(words)
    for now in (1.1, 5.0) if how == "later" else ():
        assert ranks.look(now)[0].state == State.LIVES
    (script if how == "with its script" else rank).ends()
    if how == "for lack of memory":
        kernel.write_text("oom_kills_of_others 9\noom_kill 8\n")
    (report,) = ranks.look(5.1 if how == "later" else 1.1)
    assert (report.state, report.message) == (State.DIED, message)
    assert report.was_asked == (words == TERM and not how)
    assert report.stack == (CRASH.decode() if words == CRASH else "")
    ranks.kill()
    for each in (rank, script):
        each.close()


def test_how_long_a_rank_is_at_the_same_point_of_its_program():
    rank = Rank(0)
    ranks = LocalRanks([rank.settings()], launched=False, script=0)
    assert [ranks.look(now)[0].still_s for now in (0.0, 1.0)] == [0, 1]
    rank.board.phase("loading data")
    assert [ranks.look(now)[0].still_s for now in (2.0, 3.0)] == [0, 1]
    rank.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: ranks.look(3.0)[0].state == State.STOPPED)
    assert ranks.look(5.0)[0].still_s == 2
    rank.close()


def test_ranks_that_end_between_two_waits_are_in_the_order_of_their_ends():
    """Not in that of their numbers, in which they are looked at."""
    first, second = Rank(0), Rank(1)
    ranks = LocalRanks([first.settings(), second.settings()], launched=False, script=0)
    second.ends()
    first.ends()
    before, after = ranks.look(0.0)
    assert before.state == after.state == State.DIED
    assert after.ended_at < before.ended_at
    first.close()
    second.close()


@pytest.mark.parametrize("fails", [True, False])
def test_with_a_rank_those_of_all_nodes_end_and_it_is_reported_unless_it_reports_itself(job, fails):
    """A damaged file of a node counts for nothing."""
    first, second, third = job.start(2, 1)
    job.watchers[1].send_signal(signal.SIGSTOP)
    for text in ("{", "[" * 10**5, '{"version": 1, "ranks": 1}'):
        node_path(job.folder, 1).write_text(text)
        job.wait_for_words(0)
    job.watchers[1].send_signal(signal.SIGCONT)
    second.board.phase("loading data")
    second.says(FAILING if fails else b"Fatal Python error: Segmentation\x1b[2J fault\n  File\n")
    second.ends()
    assert first.process.wait(LONG_S) == third.process.wait(LONG_S) == -signal.SIGKILL
    job.wait()
    crash = "its process crashed: Fatal Python error: Segmentation[2J fault"
    assert job.reports == ({} if fails else {1: crash})
    log = job.log.read_text()
    assert (f", loading data, before the first step: {crash}" in log) == (not fails)
    assert "\x1b" not in log


@pytest.mark.parametrize("words", [BYE, FAILING, TERM])
def test_a_rank_alone_that_says_why_it_ends_is_not_reported(job, words):
    """It may end later, but for a signal."""
    (rank,) = job.start(1)
    rank.says(words)
    if words == TERM:
        rank.ends()
    job.wait()
    assert job.reports == {}
    assert rank.process.poll() == (-signal.SIGKILL if words == TERM else None)


@pytest.mark.parametrize(("shared", "words"), [("board", "cannot be watched: "), ("words", "")])
def test_ranks_that_share_nothing_with_the_watcher_work_without(job, monkeypatch, shared, words):
    """One that has closed its pipe meanwhile has failed, and says why itself."""
    rank = Rank(0)
    job.ranks = [rank]
    path = f"/proc/{os.getpid()}/fd/{-1 if shared == 'board' else 10**6}"
    settings = rank.settings()._replace(**{shared: path})
    monkeypatch.setattr(rank, "settings", lambda: settings)
    job._watch(0, [rank], 1, LONG_S)
    job.wait()
    assert words in job.log.read_text()
    assert bool(words) == bool(job.log.read_text())
    assert rank.process.poll() is None


def test_the_first_to_end_is_named_however_late_the_watcher_looks(job):
    ranks = job.start(4)
    job.watchers[0].send_signal(signal.SIGSTOP)
    for rank in (ranks[2], ranks[0], ranks[3]):
        rank.ends()
    job.watchers[0].send_signal(signal.SIGCONT)
    job.wait()
    assert list(job.reports) == [2]


@pytest.mark.parametrize("leaves", [False, True])
def test_the_first_node_tells_nothing_before_a_rank_of_another_ends(job, leaves):
    """Its ranks have left, so the others are on their own; one may still say that it leaves."""
    first, second, third = job.start(1, 2)
    first.says(BYE)
    first.ends()
    job.watchers[0].wait(LONG_S)
    second.ends()
    if leaves:
        wait_until(lambda: job.report(1).ranks[0].state == State.DIED)
        second.says(BYE)
    assert third.process.wait(LONG_S) == -signal.SIGKILL
    job.wait()
    assert job.reports == ({} if leaves else {1: KILLED})


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_first_watcher_others_end_their_ranks_if_one_dies_or_all_stand_still(job, how):
    first, second = job.start(1, 1, min_s=LONG_S if how == signal.SIGKILL else 0.5)
    first.board.step(7)
    wait_until(lambda: job.report(0).ranks[0].activity.step == 7)
    job.wait_for_words(1)  # before which it has read what the first says
    job.watchers[0].send_signal(how)
    if how == signal.SIGKILL:
        second.ends()
    assert second.process.wait(LONG_S) == -signal.SIGKILL
    job.watchers[1].wait(LONG_S)
    (error,) = read_errors(job.run.start)
    assert "no sign of life from it on n0" in error.message
    assert (error.rank, error.host, error.step) == (0, "n0", 7)
    assert first.process.poll() is None


def test_a_file_is_read_once_and_a_link_never_and_a_full_disk_still_shows_life(
    tmp_path, monkeypatch
):
    path, link = tmp_path / "node-0001.json", tmp_path / "link"
    assert read_report(path) is None
    report = NodeReport("n", ends=True, ranks=(RankReport(3, activity=Activity(2, 5)),))
    write_report(path, report)
    link.symlink_to(path)
    assert read_report(link) is None
    os.utime(path, (1.0, 1.0))
    stamp, found = read_report(path)
    assert found == report
    assert read_report(path, stamp) is None, "nothing new"

    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipectl.watch.report.write_text", fails)
    write_report(path, NodeReport("n"))
    assert read_report(path, stamp)[1] == report


def test_another_mapping_sees_what_a_rank_writes():
    board = Board()
    other = mmap.mmap(board.handle, SIZE, prot=mmap.PROT_READ)
    board.step(7)
    board.row("FORWARD", 1, 5)
    board.awaits(wait_record("activation 5 of stage 0 from rank 2", 2))
    board.waits(True)
    board.pace(0.5)
    seen = read_activity(other)
    words = "FORWARD micro-batch 5", "activation 5 of stage 0 from rank 2"
    assert seen == board.read() == Activity(2, 7, 1, 2, True, True, 0.5, *words)
    board.phase("ä" * 200)
    assert read_activity(other)[:5] == (3, 7, -1, -1, False)
    board.return_to(seen)
    assert read_activity(other).action == "FORWARD micro-batch 5"


def test_a_log_that_nobody_reads_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("pipectl.files._PATIENCE_MS", 10)
    frozen, log = os.pipe()
    write_log(log, "x" * 10**6)
    assert len(os.read(frozen, 10**6)) == 1 << 16
    write_log(log, "a line\n")
    assert os.read(frozen, 100) == b"a line\n"
    os.close(frozen)
    write_log(log, "a line\n")
    os.close(log)
