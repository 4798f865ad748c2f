"""Whatever ends a rank: all others end too, one is named, nothing is left."""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipectl.jobs.state import get_status
from pipectl.runs import read_errors
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
RARELY = [(what, rank) for what in IN_FORWARD for rank in range(3) if (what, rank) not in OFTEN]
GONE_WITHIN_S = 15 + 4
"""With the four seconds in which a frozen rank is found here."""


def cases() -> list[Any]:
    return OFTEN + [pytest.param(*case, marks=pytest.mark.torture) for case in RARELY]


@pytest.mark.parametrize(("what", "rank"), cases())
def test_all_end_and_the_rank_is_named(begin, what: str, rank: int) -> None:
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
def test_a_slow_step_is_not_taken_for_a_hang(begin, what: str) -> None:
    ranks = begin(what)
    log = ranks.end()
    assert ranks.launcher.returncode == 0, log
    assert read_errors(ranks.run) == []
    words = "rank 2, which is waiting for activation 1 of stage 1 from rank 1, which is in FORWARD"
    assert (words in log) == (what == "slow")
    assert ranks.gone_s() < 60
    assert ranks.left_in_memory() == []


def test_ranks_that_miss_each_other_before_the_first_step_are_told_of(begin) -> None:
    ranks = begin("misses a collective")
    log = ranks.end()
    assert ranks.launcher.returncode > 0
    words = (
        "ranks 0, 2 are waiting for the other ranks (building the stages); "
        "rank 1 is waiting for the other ranks (trying out messages)"
    )
    assert f"pipectl: no rank has moved on for 3 s: {words}\n" in log
    error = ranks.error()
    assert "all ranks have waited for each other for 6 s" in error.message
    assert (error.rank, error.stage, error.step) == (0, None, 0)
    assert f"pipectl: {error.where}: all ranks" in log
    assert ranks.gone_s() < GONE_WITHIN_S


def test_the_end_of_a_watcher_ends_no_rank_and_another_is_started(begin) -> None:
    ranks = begin("unwatched", TEST_STEPS="12")
    ranks.wait_for("happened")
    again = "the process that watches this node's ranks has ended; it is started again"
    log = ranks.end()
    assert ranks.launcher.returncode == 0, log
    assert again in log
    assert read_errors(ranks.run) == []
    assert ranks.gone_s() < 60


def test_nobody_else_reaches_a_job_that_runs(begin) -> None:
    """No socket but those of MPI, nothing with a name, and files are the owner's alone."""
    ranks = begin("lingers")
    ranks.wait_for("happened")
    pids = [ranks.pid_of(rank) for rank in range(3)]
    for each in ranks.family:
        held = [str(path.readlink()) for path in Path(f"/proc/{each.pid}/fd").iterdir()]
        sockets = {name[8:-1] for name in held if name.startswith("socket:")}
        assert each.pid in pids or not sockets
        assert not sockets & {line.split()[9] for line in lines_of("/proc/net/udp")}
        named = [line for line in lines_of("/proc/net/unix") if line.split()[6] in sockets]
        assert not [line for line in named if "pipectl" in line]
        shared = [name for name in held if "/pipectl-" in name]
        assert all(name.endswith(" (deleted)") for name in shared)
    assert stat.S_IMODE(ranks.run.watch.stat().st_mode) == 0o700
    (folder,) = ranks.run.watch.iterdir()
    (file,) = folder.iterdir()
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == ("node-0000.json", 0o600)
    psutil.Process(pids[1]).kill()
    ranks.end()


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


@pytest.mark.parametrize("owner", ["root", "nobody"])
def test_another_user_neither_ends_nor_reads_a_job_that_runs(begin, owner: str) -> None:
    """The job of root and that of an ordinary user, in a directory that everybody may enter."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root has other users at hand")
    directory = Path(tempfile.mkdtemp(prefix="pipectl-"))
    directory.chmod(0o755)
    user = pwd.getpwnam(owner)
    os.chown(directory, user.pw_uid, user.pw_gid)
    # This interpreter may lie where ordinary users may not look.
    look = "+dac_read_search"
    change = ("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
    start = () if owner == "root" else (*change, f"--inh-caps={look}", f"--ambient-caps={look}")
    try:
        ranks = begin("waits", directory, start)
        ranks.wait_for("happened")
        members = ranks.family
        assert len(members) == 4  # three ranks and the watcher
        assert {each.uids().real for each in members} == {user.pw_uid}
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
def test_ranks_do_not_outlive_what_started_them(begin, gone: str, words: str) -> None:
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


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group for 64 MiB, within that of the tests; it takes the right to make one."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = [line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"]
    group = Path(f"/sys/fs/cgroup/memory/{own[0] if own else '.'}") / f"test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(2**26))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield group
    group.rmdir()


@pytest.mark.torture
def test_a_rank_that_the_kernel_kills_for_memory(begin, small_group: Path) -> None:
    ranks = begin("killed for memory")
    (ranks.run.path / "group").write_text(str(small_group))
    ranks.end()
    assert ranks.gone_s() < 15
    error = ranks.error()
    assert (error.rank, error.step) == (1, 3)
    assert error.message == "killed by the kernel, for lack of memory on its node"


@pytest.mark.torture
def test_a_job_that_is_suspended_goes_on(begin) -> None:
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
def test_a_rank_that_is_stopped_and_goes_on_in_time(begin) -> None:
    ranks = begin("frozen")
    ranks.wait_for("happened")
    time.sleep(1)
    psutil.Process(ranks.pid_of(1)).resume()
    log = ranks.end()
    assert ranks.launcher.returncode == 0, log


@pytest.mark.torture
def test_a_run_whose_errors_cannot_be_written_ends_all_the_same(begin) -> None:
    ranks = begin("killed")
    ranks.run.errors.rmdir()
    Path(ranks.run.errors).write_text("no folder")
    log = ranks.end()
    assert ranks.gone_s() < 15
    assert ", stage 1, FORWARD micro-batch 1, step 3: its process was killed" in log


def test_a_watcher_without_memory_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    warnings: list[str] = []
    monkeypatch.setattr("os.memfd_create", full)
    monkeypatch.setattr(watching, "warn", warnings.append)
    settings = Settings("n", 0, 1, 1, (), False, 0, "", "", 1.0, 0.0)
    watching._Watcher(settings)
    assert [text for text in warnings if "they run without" in text] == warnings != []


FORKING = Path(__file__).with_name("rank_with_children.py")
CODES = [-signal.SIGTERM.value, -signal.SIGTERM.value, -signal.SIGSEGV.value]


@pytest.mark.mpi
def test_a_watcher_hears_nothing_of_children_that_end(launch) -> None:
    """Only the signal that the rank gets itself; it is as it was before it forked them."""
    done = launch(0, FORKING)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{CODES} {[signal.SIGUSR1.value]} [] True\n"
