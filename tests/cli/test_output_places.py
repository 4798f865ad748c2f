"""Where commands write: directories are made, streams written to, and all is known beforehand."""

import os
import threading
from pathlib import Path

import pytest

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
def everything(profile, recorded):
    """A job with a profile, and a run with a recorded step."""


@pytest.mark.parametrize(("line", "_work"), WRITERS)
def test_a_directory_that_is_not_there_is_made(cli, everything, line, _work):
    result = cli(*line.split(), "new/place/x")
    assert result.code == 0, result.err
    assert Path("new/place/x").stat().st_size


@pytest.mark.parametrize(
    ("line", "work"), [*WRITERS, ("profile job.yaml -o", "jobs.profiles._measure_unless_cached")]
)
@pytest.mark.parametrize(
    ("where", "error"),
    [("job.yaml/x", "job.yaml: cannot be created: "), ("runs", "runs: is a directory")],
)
def test_that_nothing_can_be_written_is_found_out_before_the_work(
    cli, everything, monkeypatch, line, work, where, error
):
    if work:
        monkeypatch.setattr(f"pipectl.{work}", lambda *_, **__: pytest.fail("worked"))
    result = cli(*line.split(), where)
    assert (result.code, result.out) == (2, "")
    assert error in result.err.splitlines()[0]


@pytest.mark.parametrize(("line", "_work"), WRITERS)
def test_what_is_no_file_is_written_to_and_stays(cli, everything, line, _work):
    os.mkfifo("pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_bytes()))
    reader.start()
    beside = sorted(Path().iterdir())
    result = cli(*line.split(), "pipe")
    reader.join()
    assert result.code == 0, result.err
    assert read[0]
    assert Path("pipe").is_fifo()
    assert sorted(Path().iterdir()) == beside
    assert cli(*line.split(), "/dev/null").code == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("way", ["--submit", "--links"])
@pytest.mark.parametrize(
    ("where", "error"),
    [("/dev/stdout", "/dev/stdout: is not a file"), ("runs", "runs: is a directory")],
)
def test_what_a_job_measures_goes_to_a_file(cli, everything, way, where, error):
    before = sorted(Path("runs").iterdir())
    result = cli("profile", "job.yaml", way, "--scheduler", "local", "-o", where)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {error}")
    assert sorted(Path("runs").iterdir()) == before


def test_a_page_for_a_stream_is_all_that_is_printed(cli, everything):
    result = cli("report", "last", "-o", "/dev/stdout")
    assert result.out.startswith("<!")
    assert result.out.endswith("</html>\n")
