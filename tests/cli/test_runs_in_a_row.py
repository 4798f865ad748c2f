"""`submit --after`, and the names of runs that a shell offers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Command

RunOf = Callable[..., Path]
Program = Callable[[str, str], Path]
SLURM = ("--scheduler", "slurm")
LISTED = "echo '{}|{}|1|N/A|N/A|n1||None'"


def script_of(name: str) -> str:
    (run,) = (path for path in Path("runs").glob("*-tiny") if path.name > name)
    return (run / "job.sh").read_text()


def test_a_run_behind_others(
    cli: Command, job: Path, program: Program, run_of: RunOf, finished: Path
) -> None:
    program("sbatch", "echo 41")
    program("sacct", "exit 1")
    run_of("20250103-120000-tiny", scheduler="slurm", job_id="12")
    program("squeue", LISTED.format(12, "RUNNING"))
    result = cli("submit", "job.yaml", *SLURM, "--after", "20250103", "--after", finished.name)
    assert result.code == 0, result.err
    assert "#SBATCH --dependency=afterok:12\n" in script_of("20250103-120000-tiny")


def test_runs_that_nothing_can_start_behind(
    cli: Command, job: Path, program: Program, run_of: RunOf, failed: Path
) -> None:
    program("sbatch", "echo 41")
    program("squeue", LISTED.format(12, "RUNNING"))
    program("sacct", "exit 1")
    run_of("20250103-120000-tiny", scheduler="pbs", job_id="12.vm")
    program("qstat", "printf 'Job Id: 12.vm\\n    job_state = R\\n'")
    for name, words in (
        (failed.name, "is FAILED, so nothing would ever start"),
        ("20250103", "is on pbs, and this job goes to slurm"),
        ("no-such-run", "no run 'no-such-run'"),
    ):
        result = cli("submit", "job.yaml", *SLURM, "--after", name)
        assert (result.code in (2, 6), words in result.err) == (True, True), result.err
    assert len(list(Path("runs").iterdir())) == 2


def test_the_shell_offers_runs(finished: Path, failed: Path) -> None:
    environment = {
        **os.environ,
        "_PIPECTL_COMPLETE": "complete_bash",
        "COMP_WORDS": "pipectl status 202501",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'pipectl'; "
         "from pipectl.cli import main; sys.exit(main())"],
        env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == [failed.name, finished.name], done.stderr
