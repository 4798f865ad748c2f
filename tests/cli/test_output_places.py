"""Where commands write: all is known beforehand, and on a full disk what was there stays."""

import fcntl
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.profile import Profile

SHAPE = "lab simulate --schedule gpipe --stages 2 --micro-batches 2"
WRITERS = [
    (f"{SHAPE} --svg", "cli.lab.simulate.plan_equal_stages"),
    ("plan job.yaml -o", "cli.commands.plan.plan_step"),
    ("plan job.yaml --svg", "cli.commands.plan.plan_step"),
    ("report last --perfetto", "cli.commands.report.load_step"),
    ("report last --svg", "cli.commands.report.load_step"),
    ("report last -o", "cli.commands.report.make_page"),
    ("check --schema -o", ""),
]


@pytest.fixture
def run(cli, profile, recorded):
    """``run("report", "last")``, where a job has a profile, and a run a recorded step."""
    return cli


@pytest.mark.parametrize(("line", "_work"), WRITERS)
def test_a_directory_that_is_not_there_is_made_and_what_is_no_file_is_written_to_and_stays(
    run, line, _work
):
    result = run(*line.split(), "new/place/x")
    assert result.code == 0, result.err
    assert Path("new/place/x").stat().st_size
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
    beside = sorted(Path().iterdir())
    result = run(*line.split(), "pipe")
    assert result.code == 0, result.err
    assert os.read(reader, 1)
    os.close(reader)
    assert sorted(Path().iterdir()) == beside
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize(
    ("line", "work"), [*WRITERS, ("profile job.yaml -o", "jobs.profiles._measure_unless_cached")]
)
@pytest.mark.parametrize(
    ("where", "error"),
    [("job.yaml/x", "job.yaml: cannot be created: "), ("runs", "runs: is a directory")],
)
def test_that_nothing_can_be_written_is_found_out_before_the_work(
    run, monkeypatch, line, work, where, error
):
    if work:
        monkeypatch.setattr(f"pipectl.{work}", lambda *_, **__: pytest.fail("worked"))
    result = run(*line.split(), where)
    assert (result.code, result.out) == (2, "")
    assert error in result.err.splitlines()[0]


SLURM = ("--scheduler", "slurm")


@pytest.fixture
def disk(place):
    """A small file system in the place of ``runs``, which takes the right to mount one."""
    directory = place / "runs"
    directory.mkdir()
    mount = shutil.which("mount", path="/usr/bin:/bin")
    if mount is None:
        pytest.skip("no mount")
    command = [mount, "-t", "tmpfs", "tmpfs", str(directory), "-o", "size=256k"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
    yield directory
    subprocess.run([mount.replace("mount", "umount"), "--lazy", str(directory)], check=True)


def fill(disk: Path, pages: int) -> None:
    """Leave so many pages free."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    found = os.statvfs(disk)
    ballast.write_bytes(b"x" * ((found.f_bavail - pages) * found.f_bsize))


def contents(directory: Path) -> dict[str, bytes]:
    """Of all files but what is kept of measurements."""
    paths = (path for path in directory.rglob("*") if path.name not in ("ballast", ".lock"))
    kept = (path for path in paths if path.is_file() and path.parent.name != ".cache")
    return {str(path): path.read_bytes() for path in kept}


def refusals(cli, disk: Path, *words: str) -> int:
    """How often a command is refused, with ever more room, until all of it is there.

    Each time nothing has reached the batch system, and all files are as they were.
    """
    before = contents(disk)
    for pages in range(40):
        fill(disk, pages)
        result = cli(*words)
        if result.code == 0:
            (disk / "ballast").unlink()
            return pages
        assert result.code == 2
        assert "No space left on device" in result.err
        assert "free some space" in result.err or "you may write to" in result.err
        assert "Exception ignored" not in result.err
        assert contents(disk) == before
        assert not Path("submitted").exists()
    raise AssertionError(result.err)


def test_plan_submit_and_resume_say_so_and_leave_nothing_half(cli, disk, profile, program):
    program("sbatch", ": >>submitted; echo 41")
    program("squeue", "exit 0")
    assert cli("plan", "job.yaml", *SLURM, "--set", "pipeline.schedule=gpipe").code == 0
    assert refusals(cli, disk, "plan", "job.yaml", *SLURM) > 0
    assert refusals(cli, disk, "submit", "job.yaml", *SLURM) > 3
    (run,) = (path for path in disk.iterdir() if path.is_dir())
    Path("submitted").unlink()
    (run / "starts/1/exit_code").write_text("1\n")
    assert refusals(cli, disk, "resume", "last", "--set", "training.steps=9") > 0
    assert Path("submitted").exists()


def test_profile_measures_on_and_keeps_the_earlier_one(cli, disk, profile, monkeypatch):
    """What it notes while the disk is full is kept in memory."""
    measured = Profile.load(profile)

    def profile_job(_spec, device, *_arguments, journal, **_more):
        for number in range(200):
            journal.note(f"operator {number}", {"forward_s": 1.0, "backward_s": 2.0})
        assert all(journal.find(f"operator {number}") for number in range(200))
        return replace(measured, device=device)

    monkeypatch.setattr("pipectl.profiler.profile_job", profile_job)
    assert refusals(cli, disk, "profile", "job.yaml", "--again", "--scheduler", "local") > 1
    assert Profile.load(profile).device is not None
    assert not list(disk.rglob("*.journal"))
