"""Files whose disk fails for a while: training goes on, and no line is lost or doubled."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipectl.errors import UsageError
from pipectl.runs import RunDirectory, last_checkpoint, read_heartbeat, read_metrics
from pipectl.runtime import reports
from pipectl.runtime.reports import Attempts, Lines

PARTS = Path(__file__).with_name("job_parts.py")
STEPS = 15


def test_lines_wait_until_they_can_be_written(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path, said.append)
    lines.add(["one"])
    path.rename(tmp_path / "away")
    path.mkdir()
    lines.add(["two"])
    lines.add(["three"])
    assert len(said) == 1
    assert said[0].startswith("metrics.jsonl cannot be written, training continues: ")
    path.rmdir()
    (tmp_path / "away").rename(path)
    path.write_text(path.read_text() + "tw")  # as a disk leaves it that got full
    lines.add([])
    lines.add(["four"])
    assert path.read_text().split("\n") == ["one", "tw", "two", "three", "four", ""]
    assert said[1:] == ["metrics.jsonl can be written again"]


def test_a_line_that_a_killed_process_left_half_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for before, after in (
        ("one\ntw", "one\ntw\nthree\n"),
        ("one\n", "one\nthree\n"),
        ("", "three\n"),
    ):
        path.write_text(before)
        Lines(path, lambda _: None).add(["three"])
        assert path.read_text() == after


def test_the_newest_lines_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_LINES", 3)
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    lines = Lines(path, lambda _: None)
    lines.add(map(str, range(9)))
    path.rmdir()
    lines.add([])
    assert path.read_text().split() == ["6", "7", "8"]


def test_other_errors_are_not_hidden() -> None:
    def fails() -> None:
        raise UsageError("disk full", cure="")

    attempt = Attempts("it", lambda _: None)
    assert not attempt(fails)
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: [1 // 0])  # type: ignore[arg-type, return-value]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, which takes the right to mount one."""
    directory = tmp_path / "disk"
    directory.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("no mount")
    command = ["mount", "-t", "tmpfs", "tmpfs", str(directory), "-o", "size=2m"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path) -> Callable[[], None]:
    """Until there is no byte left; what undoes it."""
    path = directory / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=1k"], capture_output=True, check=False)
    assert shutil.disk_usage(directory).free == 0
    return path.unlink


def make_read_only(directory: Path) -> Callable[[], None]:
    def remount(how: str) -> None:
        command = ["mount", "-o", f"remount,{how}", str(directory)]
        subprocess.run(command, capture_output=True, check=True)

    remount("ro")
    return lambda: remount("rw")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("break_it", "file"),
    [
        (fill, "heartbeat.json"),  # lines may still fit into the last page of their file
        pytest.param(make_read_only, "metrics.jsonl", marks=pytest.mark.torture),
    ],
)
def test_training_goes_on_while_the_disk_fails(
    make_spec: Any,
    make_run: Any,
    warm_python: str,
    disk: Path,
    break_it: Callable[[Path], Callable[[], None]],
    file: str,
) -> None:
    training = {"steps": STEPS, "batch_size": 4}
    sections = {"training": training, "trace": {"steps": [3]}, "checkpoint": {"every": 3}}
    prepared = make_run(make_spec(1, {"factory": f"{PARTS}:Slow"}, **sections))
    run = RunDirectory(disk / "run")
    shutil.copytree(prepared.path, run.path)
    worker = [warm_python, "-m", "mpi4py", "-m", "pipectl.runtime.worker", "--run", str(run.path)]
    process = subprocess.Popen(worker, stderr=subprocess.PIPE, text=True)
    wait_for(process, lambda: len(read_metrics(run)) >= 1)
    mend = break_it(disk)
    assert process.stderr is not None
    log = ""
    for line in process.stderr:
        log += line
        if f"{file} cannot be written, training continues: " in line:
            break
    mend()
    log += process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0, log
    assert f"{file} cannot be written, training continues: " in log
    assert f"{file} can be written again" in log
    assert [line.step for line in read_metrics(run)] == [*range(1, STEPS + 1)]
    last, beat = last_checkpoint(run), read_heartbeat(run)
    assert last is not None
    assert last.name == f"step-{STEPS:06d}"
    assert beat.state == "done"


def wait_for(process: subprocess.Popen[str], done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 280
    while not done():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
