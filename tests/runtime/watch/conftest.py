"""Ranks that meet with something, started over MPI and waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from pipectl.faults import ErrorReport
from pipectl.runs import RunDirectory, read_errors

RING = Path(__file__).with_name("ranks_that_wait.py")
RANKS = 3
PATIENCE_S = 90


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
def begin(tmp_path: Path, mpiexec: str) -> Iterator[Callable[..., Ranks]]:
    """``begin(what, **variables)``: three ranks, of which one meets with something.

    ``directory`` holds the run if it is given; ``start`` is a command that starts the launcher.
    """
    started: list[Ranks] = []

    def begin(
        what: str, directory: Path = tmp_path, start: tuple[str, ...] = (), **variables: str
    ) -> Ranks:
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
