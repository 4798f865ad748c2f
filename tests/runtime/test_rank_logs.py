"""What ranks print is in their own logs, whatever ends them, and nothing about a log ends them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pipectl.runs import Logs, RunDirectory
from pipectl.runtime.process import job_log, own_log

PRINTED = {f"[{rank}] piece and end": 200 for rank in range(2)}
CHILD = {f"[{rank}] from a child": 1 for rank in range(2)}
LAST = {"rank 0 [2Jbegins": 1, "rank 1 [2Jbegins": 1, "to the launcher": 2}
WORDS = {**PRINTED, "[1] last words": 1}
SHARED = {**PRINTED, "[0] no end": 1, "[1] no end": 1, "from a child": 2, **LAST}


@pytest.fixture
def print_from_ranks(tmp_path: Path, mpiexec: str) -> Callable[[str], Counter[str]]:
    """Two ranks print; how often there is which line."""

    def run(how: str) -> Counter[str]:
        directory = RunDirectory(tmp_path)
        directory.logs.mkdir(exist_ok=True)
        program = str(Path(__file__).with_name("printing_ranks.py"))
        with directory.job_log.open("wb") as log:
            subprocess.run(
                [mpiexec, "-n", "2", sys.executable, program, how],
                env={**os.environ, "PIPECTL_RUN_DIRECTORY": str(tmp_path)},
                stdout=log,
                stderr=subprocess.STDOUT,
                check=how not in ("killed", "aborts"),
            )
        assert b"\x1b" not in directory.job_log.read_bytes()
        return Counter(line.text for line in Logs(directory).read_lines(to_the_end=True))

    return run


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "lines"),
    [
        ("ends", {**PRINTED, **CHILD, **LAST}),
        ("killed", WORDS),
        ("aborts", WORDS),
        ("cut", {**dict.fromkeys(PRINTED, 100), **CHILD, **LAST}),
        ("shares", SHARED),
    ],
)
def test_lines_of_ranks_are_whole_and_complete(
    print_from_ranks: Callable[[str], Counter[str]], how: str, lines: dict[str, int]
) -> None:
    found = print_from_ranks(how)
    assert {line: found[line] for line in lines} == lines
    if how == "ends":
        assert sum(found.values()) == sum(lines.values())


@pytest.mark.mpi
def test_neither_a_full_disk_nor_a_link_in_the_place_of_a_log_ends_a_rank_that_prints(
    print_from_ranks: Callable[[str], Counter[str]], tmp_path: Path
) -> None:
    """The link is not followed: what rank 0 prints goes to the launcher."""
    run, foreign = RunDirectory(tmp_path), tmp_path / "foreign"
    foreign.write_text("mine\n")
    run.logs.mkdir()
    run.rank_log(0).symlink_to(foreign)
    found = print_from_ranks("full")
    assert found["[0] piece and end"] == 0
    assert found["[1] piece and end"] >= 70
    assert foreign.read_text() == "mine\n"
    assert run.rank_log(1).stat().st_size == 1000
    assert stat.S_IMODE(run.rank_log(1).stat().st_mode) == 0o600


def test_outside_of_jobs_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPECTL_RUN_DIRECTORY", raising=False)
    before = Path("/proc/self/fd/1").readlink(), sys.stdout
    with own_log(0, 1):
        assert (Path("/proc/self/fd/1").readlink(), sys.stdout) == before
        assert job_log() == 2
