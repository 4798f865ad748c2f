"""Whatever ends a rank: all others end too, one is named, nothing is left."""

from __future__ import annotations

import errno
import json
import math
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipectl.jobs.state import get_status
from pipectl.runs import RunDirectory, read_errors
from pipectl.runtime import watching
from pipectl.watch.watcher import Settings

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]
KILLED = "its process was killed (by SIGKILL, for example) or exited without a message"
IN_FORWARD = {
    "killed": KILLED,
    "killed in a copy": KILLED,
    "frozen": "its process is stopped (SIGSTOP), for ",
    "memory": "no message",
    "crashes": "its process crashed: Fatal Python error: Segmentation fault",
    "exits": KILLED,
    "asked": "its process alone received SIGTERM",
}
OFTEN = [("killed", 1), ("killed in a copy", 1), ("frozen", 0), ("memory", 2), ("asked", 2)]
CASES = [
    pytest.param(what, rank, marks=() if (what, rank) in OFTEN else pytest.mark.torture)
    for what in IN_FORWARD
    for rank in range(3)
]
GONE_WITHIN_S = 60
"""On a busy machine; what is found in another way would be told in other words."""
RING = Path(__file__).with_name("ranks_that_wait.py")
RANKS, FAMILY, PATIENCE_S = 3, 4, 300
"""The family is three ranks and their watcher."""


@dataclass
class Ranks:
    """A launcher and its ranks, under way."""

    run: RunDirectory
    launcher: subprocess.Popen[str]

    def happened(self) -> float:
        """When, as a rank has said; waits until then."""
        file = self.run.path / "happened"
        deadline = time.monotonic() + PATIENCE_S
        while not (file.exists() and file.read_text()):  # it is empty before it is written
            assert self.launcher.poll() is None, self.launcher.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return float(file.read_text())

    def noted(self, what: str) -> list[Any]:
        """What each rank has written down of itself."""
        files = sorted(self.run.path.glob("pids-*"))
        return [json.loads(path.read_text())[what] for path in files]

    @property
    def family(self) -> list[psutil.Process]:
        """The ranks and the processes beside them that are alive."""
        found = []
        for pid, started in chain(*self.noted("family")):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == started:
                    found.append(process)
        return found

    def end(self, within_s: float = PATIENCE_S) -> str:
        """Until all processes have gone, soon, and no shared memory is left; what was printed."""
        text, _ = self.launcher.communicate(timeout=PATIENCE_S)
        _, alive = psutil.wait_procs(self.family, timeout=PATIENCE_S)
        assert not alive
        assert time.time() - self.happened() < within_s
        shared = self.noted("shared")
        assert len(shared) == RANKS
        assert not [name for name in chain(*shared) if Path(name).exists()]
        return text


@pytest.fixture
def begin(tmp_path, mpiexec):
    """``begin(what, **variables)``: three ranks, of which one meets with something.

    ``directory`` holds the run if it is given; ``start`` is a command that starts the launcher.
    """
    started: list[Ranks] = []

    def begin(what, directory=tmp_path, start=(), **variables):
        run = RunDirectory(directory / f"run-{len(started)}")
        run.start.errors.mkdir(parents=True)
        for path in (run.path, run.starts, run.start.path, run.start.errors):
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
    """Also behind the end of its children, of which its watcher hears nothing."""
    ranks = begin(what, TEST_RANK=str(rank))
    log = ranks.end(GONE_WITHIN_S)
    assert ranks.launcher.returncode > 0
    (error,) = read_errors(ranks.run.start)
    assert (error.rank, error.stage, error.step) == (rank, rank, 3), error.message
    assert error.action == "FORWARD micro-batch 1"
    assert error.message.startswith(IN_FORWARD[what])
    assert error.time - ranks.happened() < GONE_WITHIN_S
    if what == "frozen":
        assert f"from rank {rank}, which is in FORWARD micro-batch 1" in error.message
    if what == "memory":
        assert "pipeline.memory_limit" in error.hint
    if what == "crashes":
        assert "in happen" in error.traceback
    assert f"pipectl: {error.where}: " in log
    assert get_status(ranks.run, 0.0).errors == [error]


WAITING = "rank 2, which is waiting for activation 1 of stage 1 from rank 1, which is in FORWARD"
AGAIN = "the process that watches this node's ranks has ended; it is started again"


@pytest.mark.parametrize(
    ("what", "steps", "suspended_s", "words"),
    [
        pytest.param("slow", 6, 0, WAITING, id="a slow step"),
        pytest.param("unwatched", 12, 0, AGAIN, id="the end of the watcher"),
        # Twice as long as a rank may be frozen.
        pytest.param("slow", 6, 8, "", id="a suspended job", marks=pytest.mark.torture),
    ],
)
def test_what_ends_no_rank_is_not_taken_for_a_hang(begin, what, steps, suspended_s, words):
    ranks = begin(what, TEST_STEPS=str(steps))
    ranks.happened()
    if suspended_s:
        family = ranks.family
        assert len(family) == FAMILY
        for process in family:
            process.suspend()
        time.sleep(suspended_s)
        for process in family:
            process.resume()
    log = ranks.end()
    assert ranks.launcher.returncode == 0, log
    assert words in log
    assert read_errors(ranks.run.start) == []


ATTACK = """\
for pid in $PIDS; do
    for name in TERM INT KILL STOP USR1 USR2 QUIT; do
        kill -s $name $pid && echo "$name reaches $pid"
    done
    for name in environ maps mem fd/0 fd/1 fd/2; do
        head -c 1 /proc/$pid/$name > /dev/null && echo "reads $name of $pid"
    done
done
for path in $(find "$RUN") "$RUN"/starts/1/watch/node-0000.json; do
    echo forged >> "$path" && echo "writes $path"
    mv "$path" "$path.moved" && echo "moves $path"
    rm "$path" < /dev/null && echo "removes $path"
done
cat "$RUN"/starts/1/watch/* && echo "reads the watcher's file"
ln -s /etc/passwd "$RUN"/starts/1/watch/link && echo "adds to the watcher's files"
touch "$RUN"/starts/1/errors/rank-0001.json && echo "adds a report"
exit 0
"""


def test_nobody_else_ends_or_reads_a_job_that_runs(begin):
    """No socket but those of MPI, nothing with a name, and files are the owner's alone; so another
    user can do nothing in a directory that everybody may enter. Only root has users at hand."""
    has_others = os.geteuid() == 0 and shutil.which("setpriv") is not None
    user = pwd.getpwnam("nobody") if has_others else pwd.getpwuid(os.geteuid())
    directory = Path(tempfile.mkdtemp(prefix="pipectl-"))
    directory.chmod(0o755)
    os.chown(directory, user.pw_uid, user.pw_gid)
    # This interpreter may lie where ordinary users may not look.
    look = "+dac_read_search"
    change = ("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
    start = (*change, f"--inh-caps={look}", f"--ambient-caps={look}") if has_others else ()
    try:
        ranks = begin("waits", directory, start)
        ranks.happened()
        members = ranks.family
        assert len(members) == FAMILY
        assert {each.uids().real for each in members} == {user.pw_uid}
        check_what_is_open(members, {family[0][0] for family in ranks.noted("family")})
        assert stat.S_IMODE(ranks.run.start.watch.stat().st_mode) == 0o700
        (file,) = ranks.run.start.watch.iterdir()
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
        log = ranks.end(within_s=math.inf)
        assert ranks.launcher.returncode == 0, log
        assert "watches" not in log
        assert read_errors(ranks.run.start) == []
    finally:
        shutil.rmtree(directory)


def check_what_is_open(members: list[psutil.Process], ranks: set[int]) -> None:
    udp, named = (
        Path(f"/proc/net/{kind}").read_text().splitlines()[1:] for kind in ("udp", "unix")
    )
    for each in members:
        held = [str(path.readlink()) for path in Path(f"/proc/{each.pid}/fd").iterdir()]
        sockets = {name[8:-1] for name in held if name.startswith("socket:")}
        assert each.pid in ranks or not sockets
        assert not sockets & {line.split()[9] for line in udp}
        assert not [x for x in named if x.split()[6] in sockets and "pipectl" in x]
        shared = [name for name in held if "/pipectl-" in name and "/run-" not in name]
        assert all(name.endswith(" (deleted)") for name in shared)


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
    ranks.happened()
    launcher = psutil.Process(ranks.launcher.pid)
    (proxy,) = launcher.children()
    (ranks.run.path / "happened").write_text(str(time.time()))
    {"node": proxy, "mpiexec": launcher, "script": script}[gone].kill()
    ranks.end(within_s=GONE_WITHIN_S)
    script.kill()
    script.wait()
    (error,) = read_errors(ranks.run.start)
    assert words in error.message


@pytest.mark.torture
def test_a_run_whose_errors_cannot_be_written_ends_all_the_same(begin):
    ranks = begin("killed")
    ranks.run.start.errors.rmdir()
    ranks.run.start.errors.write_text("no folder")
    log = ranks.end(within_s=GONE_WITHIN_S)
    assert ", stage 1, FORWARD micro-batch 1, step 3: its process was killed" in log


def test_a_watcher_without_memory_ends_no_run(monkeypatch):
    def full(_: str) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    warnings: list[str] = []
    monkeypatch.setattr("os.memfd_create", full)
    monkeypatch.setattr(watching, "warn", warnings.append)
    watching._Watcher(Settings("n", 0, 1, 1, (), False, 0, "", "", 1.0, 0.0))
    (warning,) = warnings
    assert "they run without" in warning
