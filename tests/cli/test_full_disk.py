"""Commands on a file system that is full: a clear error, and what was there stays as it was."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
    paths = (path for path in directory.rglob("*") if path.name not in ("ballast", ".lock"))
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


def refusals(cli, disk: Path, *words: str) -> int:
    """How often a command is refused, with ever more room, until all of it is there.

    Each time nothing has reached the batch system, and all files are as they were.
    """
    before = contents(disk)
    for pages in range(40):
        fill(disk, pages)
        result = cli(*words)
        if result.code == 0:
            assert Path("submitted").exists()
            return pages
        assert result.code == 2
        assert "No space left on device" in result.err
        assert "free some space" in result.err or "you may write to" in result.err
        assert contents(disk) == before
        assert not Path("submitted").exists()
    raise AssertionError(result.err)


def test_plan_submit_and_resume_say_so_and_leave_nothing_half(cli, disk, profile, program):
    program("sbatch", ": >>submitted; echo 41")
    program("squeue", "exit 0")
    assert cli("plan", "job.yaml", *SLURM).code == 0
    before = contents(disk)
    fill(disk, 0)
    result = cli("plan", "job.yaml", *SLURM, "--set", "pipeline.schedule=gpipe")
    assert result.code == 2
    assert "tiny.plan.json: cannot be written: No space left on device" in result.err
    assert contents(disk) == before
    assert refusals(cli, disk, "submit", "job.yaml", *SLURM) > 3
    (run,) = (path for path in disk.iterdir() if path.is_dir())
    Path("submitted").unlink()
    (disk / "ballast").unlink()
    (run / "exit_code").write_text("1\n")
    assert refusals(cli, disk, "resume", "last", "--set", "training.steps=9") > 0


def test_profile_measures_on_and_keeps_the_earlier_one(cli, disk, profile, monkeypatch):
    """The disk gets full while it measures: what it notes then is kept in memory."""
    from pipectl.profile import Profile

    before = profile.read_bytes()
    measured = Profile.load(profile)
    pages = 0

    def profile_job(*_arguments, journal, **_more):
        fill(disk, pages)
        for number in range(200):
            journal.note(f"operator {number}", {"forward_s": 1.0, "backward_s": 2.0})
        assert all(journal.find(f"operator {number}") for number in range(200))
        return measured

    monkeypatch.setattr("pipectl.profiler.profile_job", profile_job)
    for _ in range(40):
        (disk / "ballast").unlink(missing_ok=True)
        result = cli("profile", "job.yaml", "--again", "--scheduler", "local")
        if result.code == 0:
            break
        assert result.code == 2
        assert "cannot be written: No space left on device" in result.err
        assert "Exception ignored" not in result.err
        assert profile.read_bytes() == before
        pages += 1
    assert pages > 1
    assert Profile.load(profile).device is not None
    assert not list(disk.rglob("*.journal"))
