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

RANKS = Path(__file__).with_name("printing_ranks.py")
WHOLE = {f"[{rank}] piece and end": 200 for rank in range(2)}
CHILD = {f"[{rank}] from a child": 1 for rank in range(2)}
SAID = {f"rank {rank} [2Jbegins": 1 for rank in range(2)}
LAST = {"to the launcher": 2}


@pytest.fixture
def print_from_ranks(tmp_path: Path, mpiexec: str) -> Callable[[str], Counter[str]]:
    """Two ranks print; how often there is which line."""

    def run(how: str) -> Counter[str]:
        directory = RunDirectory(tmp_path)
        directory.logs.mkdir(exist_ok=True)
        with directory.job_log.open("wb") as log:
            subprocess.run(
                [mpiexec, "-n", "2", sys.executable, str(RANKS), how],
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
        ("ends", {**WHOLE, **CHILD, **SAID, **LAST}),
        ("killed", {**WHOLE, "[1] last words": 1}),
        ("aborts", {**WHOLE, "[1] last words": 1}),
        ("cut", {**dict.fromkeys(WHOLE, 100), **CHILD, **SAID, **LAST}),
        (
            "shares",
            {
                **WHOLE,
                **dict.fromkeys(("[0] no end", "[1] no end"), 1),
                "from a child": 2,
                **SAID,
                **LAST,
            },
        ),
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
def test_a_full_disk_ends_no_rank_that_prints(
    print_from_ranks: Callable[[str], Counter[str]], tmp_path: Path
) -> None:
    assert print_from_ranks("full")["[1] piece and end"] >= 70
    for rank in range(2):
        log = RunDirectory(tmp_path).rank_log(rank)
        assert log.stat().st_size == 1000
        assert stat.S_IMODE(log.stat().st_mode) == 0o600


@pytest.mark.mpi
def test_a_link_in_the_place_of_a_log_is_not_followed(
    print_from_ranks: Callable[[str], Counter[str]], tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    foreign = tmp_path / "foreign"
    foreign.write_text("mine\n")
    (tmp_path / "logs/rank-0000.log").symlink_to(foreign)
    found = print_from_ranks("ends")  # what rank 0 prints goes to the launcher
    assert found["[0] piece and end"] == 0
    assert found["[1] piece and end"] == 200
    assert foreign.read_text() == "mine\n"


def test_outside_of_jobs_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPECTL_RUN_DIRECTORY", raising=False)
    before = Path("/proc/self/fd/1").readlink(), sys.stdout
    with own_log(0, 1):
        assert (Path("/proc/self/fd/1").readlink(), sys.stdout) == before
        assert job_log() == 2
