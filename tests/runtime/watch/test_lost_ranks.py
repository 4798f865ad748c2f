"""Whatever ends a rank: all others end too, one is named, nothing is left."""

from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipectl.faults import ErrorReport
from pipectl.jobs.state import get_status
from pipectl.runs import RunDirectory, read_errors
from pipectl.runtime import watching
from pipectl.watch.watcher import Settings

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]
KILLED = "its process was killed (by SIGKILL, for example) or exited without a message"
IN_FORWARD = {
    "killed": KILLED,
    "killed in a copy": KILLED,
    "frozen": "its process is stopped (SIGSTOP), for 3 s now; rank ",
    "memory": "no message",
    "raises": "list index out of range",
    "crashes": "its process crashed: Fatal Python error: Segmentation fault",
    "exits": KILLED,
    "asked": "its process alone received SIGTERM",
}
OFTEN = [("killed", 1), ("killed in a copy", 1), ("frozen", 0), ("memory", 2)]
CASES = [
    pytest.param(what, rank, marks=() if (what, rank) in OFTEN else pytest.mark.torture)
    for what in IN_FORWARD
    for rank in range(3)
]
GONE_WITHIN_S = 15 + 4
"""With the four seconds in which a frozen rank is found here."""
RING = Path(__file__).with_name("ranks_that_wait.py")
FORKING = Path(__file__).with_name("rank_with_children.py")
RANKS, PATIENCE_S = 3, 90


@dataclass
class Ranks:
    """A launcher and its ranks, under way."""

    run: RunDirectory
    launcher: subprocess.Popen[str]

    def wait_for(self, name: str) -> float:
        """Until a rank has made a file; what is in it, as a number."""
        deadline = time.monotonic() + PATIENCE_S
        while not (self.run.path / name).exists():
            assert self.launcher.poll() is None, self.launcher.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return float((self.run.path / name).read_text() or 0)

    @property
    def family(self) -> list[psutil.Process]:
        """The ranks and the processes beside them that are alive."""
        found = []
        for path in self.run.path.glob("pids-*"):
            for pid, started in json.loads(path.read_text())["family"]:
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    if process.create_time() == started:
                        found.append(process)
        return found

    def pid_of(self, rank: int) -> int:
        """Of its process."""
        return int(json.loads((self.run.path / f"pids-{rank}").read_text())["family"][0][0])

    def left_in_memory(self) -> list[str]:
        """Files by which the ranks shared memory, and that are still there."""
        found = [json.loads(path.read_text())["shared"] for path in self.run.path.glob("pids-*")]
        assert len(found) == RANKS
        return [name for names in found for name in names if Path(name).exists()]

    def end(self) -> str:
        """Until the launcher has ended; what was printed."""
        text, _ = self.launcher.communicate(timeout=PATIENCE_S)
        return text

    def gone_s(self) -> float:
        """How long after what happened the last process has gone."""
        happened = float((self.run.path / "happened").read_text())
        _, alive = psutil.wait_procs(self.family, timeout=PATIENCE_S)
        assert not alive
        return time.time() - happened

    def error(self) -> ErrorReport:
        """What was written down: of one rank only."""
        (error,) = read_errors(self.run)
        return error


@pytest.fixture
def begin(tmp_path, mpiexec):
    """``begin(what, **variables)``: three ranks, of which one meets with something.

    ``directory`` holds the run if it is given; ``start`` is a command that starts the launcher.
    """
    started: list[Ranks] = []

    def begin(what, directory=tmp_path, start=(), **variables):
        run = RunDirectory(directory / f"run-{len(started)}")
        run.errors.mkdir(parents=True)
        for path in (run.path, run.errors):
            os.chown(path, directory.stat().st_uid, directory.stat().st_gid)
        command = [sys.executable, "-m", "mpi4py", str(RING), "--run", str(run.path)]
        environment = {"TEST_HAPPENS": what, "PIPECTL_RUN_DIRECTORY": str(run.path), **variables}
        launcher = subprocess.Popen(
            [*start, mpiexec, "-n", str(RANKS), *command],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(Ranks(run, launcher))
        return started[-1]

    yield begin
    for ranks in started:
        for process in ranks.family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        ranks.launcher.kill()
        ranks.launcher.wait()


@pytest.mark.parametrize(("what", "rank"), CASES)
def test_all_end_and_the_rank_is_named(begin, what, rank):
    ranks = begin(what, TEST_RANK=str(rank))
    log = ranks.end()
    assert ranks.launcher.returncode > 0
    assert ranks.gone_s() < GONE_WITHIN_S
    assert ranks.left_in_memory() == []
    error = ranks.error()
    assert (error.rank, error.stage, error.step) == (rank, rank, 3), error.message
    assert error.action == "FORWARD micro-batch 1"
    assert error.message.startswith(IN_FORWARD[what])
    assert error.time - float((ranks.run.path / "happened").read_text()) < 10
    if what == "frozen":
        assert f"from rank {rank}, which is in FORWARD micro-batch 1" in error.message
    if what == "memory":
        assert "pipeline.memory_limit" in error.cure
    if what == "crashes":
        assert "in happen" in error.traceback
    assert f"pipectl: {error.where}: " in log
    assert get_status(ranks.run, 0.0).errors == [error]


@pytest.mark.parametrize("what", ["slow", pytest.param("nothing", marks=pytest.mark.torture)])
def test_a_slow_step_is_not_taken_for_a_hang(begin, what):
    ranks = begin(what)
    log = ranks.end()
    assert ranks.launcher.returncode == 0, log
    assert read_errors(ranks.run) == []
    words = "rank 2, which is waiting for activation 1 of stage 1 from rank 1, which is in FORWARD"
    assert (words in log) == (what == "slow")
    assert ranks.gone_s() < 60
    assert ranks.left_in_memory() == []


def test_the_end_of_a_watcher_ends_no_rank_and_another_is_started(begin):
    ranks = begin("unwatched", TEST_STEPS="12")
    ranks.wait_for("happened")
    again = "the process that watches this node's ranks has ended; it is started again"
    log = ranks.end()
    assert ranks.launcher.returncode == 0, log
    assert again in log
    assert read_errors(ranks.run) == []
    assert ranks.gone_s() < 60


ATTACK = """\
for pid in $PIDS; do
    for name in TERM INT KILL STOP USR1 USR2 QUIT; do
        kill -s $name $pid && echo "$name reaches $pid"
    done
    for name in environ maps mem fd/0 fd/1 fd/2; do
        head -c 1 /proc/$pid/$name > /dev/null && echo "reads $name of $pid"
    done
done
for path in $(find "$RUN") "$RUN"/watch/*/node-0000.json; do
    echo forged >> "$path" && echo "writes $path"
    mv "$path" "$path.moved" && echo "moves $path"
    rm "$path" < /dev/null && echo "removes $path"
done
cat "$RUN"/watch/*/* && echo "reads the watcher's file"
ln -s /etc/passwd "$RUN"/watch/link && echo "adds to the watcher's files"
touch "$RUN"/errors/rank-0001.json && echo "adds a report"
exit 0
"""


@pytest.mark.parametrize("owner", ["oneself", "nobody"])
def test_nobody_else_ends_or_reads_a_job_that_runs(begin, owner):
    """No socket but those of MPI, nothing with a name, and files are the owner's alone; so another
    user can do nothing in a directory that everybody may enter."""
    has_others = os.geteuid() == 0 and shutil.which("setpriv") is not None
    if owner == "nobody" and not has_others:
        pytest.skip("only root has other users at hand")
    directory = Path(tempfile.mkdtemp(prefix="pipectl-"))
    directory.chmod(0o755)
    user = pwd.getpwnam("nobody") if owner == "nobody" else pwd.getpwuid(os.geteuid())
    os.chown(directory, user.pw_uid, user.pw_gid)
    # This interpreter may lie where ordinary users may not look.
    look = "+dac_read_search"
    change = ("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
    start = (*change, f"--inh-caps={look}", f"--ambient-caps={look}") if owner == "nobody" else ()
    try:
        ranks = begin("waits", directory, start)
        ranks.wait_for("happened")
        members = ranks.family
        assert len(members) == 4  # three ranks and the watcher
        assert {each.uids().real for each in members} == {user.pw_uid}
        check_what_is_open(members, {ranks.pid_of(rank) for rank in range(RANKS)})
        assert stat.S_IMODE(ranks.run.watch.stat().st_mode) == 0o700
        (folder,) = ranks.run.watch.iterdir()
        (file,) = folder.iterdir()
        assert (file.name, stat.S_IMODE(file.stat().st_mode)) == ("node-0000.json", 0o600)
        if has_others:
            pids = " ".join(str(each.pid) for each in members)
            attack = subprocess.run(
                ["/bin/sh", "-c", ATTACK],
                env={"PATH": "/bin:/usr/bin", "PIDS": pids, "RUN": str(ranks.run.path)},
                capture_output=True,
                text=True,
                user=12345,
                group=12345,
                extra_groups=[],
            )
            assert (attack.returncode, attack.stdout) == (0, "")
        (ranks.run.path / "released").touch()
        log = ranks.end()
        assert ranks.launcher.returncode == 0, log
        assert "watches" not in log
        assert read_errors(ranks.run) == []
    finally:
        shutil.rmtree(directory)


def check_what_is_open(members: list[psutil.Process], ranks: set[int]) -> None:
    for each in members:
        held = [str(path.readlink()) for path in Path(f"/proc/{each.pid}/fd").iterdir()]
        sockets = {name[8:-1] for name in held if name.startswith("socket:")}
        assert each.pid in ranks or not sockets
        assert not sockets & {line.split()[9] for line in lines_of("/proc/net/udp")}
        named = [line for line in lines_of("/proc/net/unix") if line.split()[6] in sockets]
        assert not [line for line in named if "pipectl" in line]
        shared = [name for name in held if "/pipectl-" in name and "/run-" not in name]
        assert all(name.endswith(" (deleted)") for name in shared)


def lines_of(path: str) -> list[str]:
    """Without the head."""
    return Path(path).read_text().splitlines()[1:]


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("node", "the launcher that started it is gone"),
        pytest.param("mpiexec", "the launcher ", marks=pytest.mark.torture),
        pytest.param("script", "the job script that started it", marks=pytest.mark.torture),
    ],
)
def test_ranks_do_not_outlive_what_started_them(begin, gone, words):
    script = psutil.Popen(["sleep", "100"])
    ranks = begin("lingers", PIPECTL_SCRIPT=str(script.pid))
    ranks.wait_for("happened")
    launcher = psutil.Process(ranks.launcher.pid)
    (proxy,) = launcher.children()
    assert proxy.pid == psutil.Process(ranks.pid_of(0)).ppid()
    (ranks.run.path / "happened").write_text(str(time.time()))
    {"node": proxy, "mpiexec": launcher, "script": script}[gone].kill()
    ranks.end()
    assert ranks.gone_s() < 15
    script.kill()
    script.wait()
    assert words in ranks.error().message


@pytest.mark.torture
def test_a_job_that_is_suspended_goes_on(begin):
    """Twice as long as a rank may be frozen."""
    ranks = begin("slow")
    ranks.wait_for("happened")
    family = ranks.family
    assert len(family) == 4  # three ranks and their watcher
    for process in family:
        process.suspend()
    time.sleep(8)
    for process in family:
        process.resume()
    log = ranks.end()
    assert ranks.launcher.returncode == 0, log
    assert read_errors(ranks.run) == []


@pytest.mark.torture
def test_a_run_whose_errors_cannot_be_written_ends_all_the_same(begin):
    ranks = begin("killed")
    ranks.run.errors.rmdir()
    Path(ranks.run.errors).write_text("no folder")
    log = ranks.end()
    assert ranks.gone_s() < 15
    assert ", stage 1, FORWARD micro-batch 1, step 3: its process was killed" in log


def test_a_watcher_without_memory_ends_no_run(monkeypatch):
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    warnings: list[str] = []
    monkeypatch.setattr("os.memfd_create", full)
    monkeypatch.setattr(watching, "warn", warnings.append)
    settings = Settings("n", 0, 1, 1, (), False, 0, "", "", 1.0, 0.0)
    watching._Watcher(settings)
    assert [text for text in warnings if "they run without" in text] == warnings != []


CODES = [-signal.SIGTERM.value, -signal.SIGTERM.value, -signal.SIGSEGV.value]


def test_a_watcher_hears_nothing_of_children_that_end(launch):
    """Only the signal that the rank gets itself; it is as it was before it forked them."""
    done = launch(0, FORKING)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{CODES} {[signal.SIGUSR1.value]} [] True\n"
