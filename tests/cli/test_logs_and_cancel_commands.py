"""`pipectl logs`, of runs that go on and that are over, and `pipectl cancel`."""

import json
import shutil
import socket
import time
from types import SimpleNamespace

import pytest

LISTED = "echo '12|{}|1|N/A|N/A|n1||None'"


def test_logs_without_control_characters(cli, finished):
    result = cli("logs")
    assert (result.code, result.out, result.err) == (0, "started\nzero [31mred\n", "")
    assert cli("logs", "last", "-f").out == result.out


@pytest.mark.parametrize(("state", "exit_code"), [("RUNNING", None), ("PENDING", "75\n")])
def test_a_log_is_followed_as_it_grows(cli, queued, program, monkeypatch, state, exit_code):
    """Also if the run will start again: its exit code is that of the start before."""
    (queued / "logs/job.log").write_text("started\n")
    if exit_code is not None:
        (queued / "exit_code").write_text(exit_code)
    program("squeue", LISTED.format(state))
    program("sacct", "exit 1")
    looks = iter(range(100))

    def goes_on(_seconds):
        if next(looks) == 3:
            (queued / "logs/job.log").write_text("started\nmore\n")
            (queued / "exit_code").write_text("0\n")
            program("squeue", "exit 0")

    clock = SimpleNamespace(time=time.time, sleep=goes_on)
    monkeypatch.setattr("pipectl.jobs.state.time", clock)
    assert cli("logs", "-f").out == "started\nmore\n"


@pytest.mark.parametrize("lost", ["machine", "directory", "scheduler"])
def test_a_log_is_not_followed_for_ever_if_nobody_knows_of_an_end(cli, run_of, monkeypatch, lost):
    """Of a run of another machine, one that was removed, or one whose batch system is gone."""
    slurm = {"scheduler": "slurm", "job_id": "12"}
    elsewhere = {"job_id": f"1.1@not-{socket.gethostname()}"}
    run = run_of("20250103-120000-tiny", **(slurm if lost == "scheduler" else elsewhere))
    log = run / "logs/job.log"
    log.write_text("started\n")
    now = 0.0

    def pass_by(seconds):
        nonlocal now
        now += seconds
        assert now < 1000
        if now == 50 and lost == "directory":
            shutil.rmtree(run)
        elif now == 50:
            log.write_text("started\nmore\nand ended in the mid")

    clock = SimpleNamespace(time=time.time, sleep=pass_by)
    monkeypatch.setattr("pipectl.jobs.state.time", clock)
    result = cli("logs", "-f")
    rest = "" if lost == "directory" else "more\nand ended in the mid\n"
    assert (result.code, result.out) == (6, f"started\n{rest}")
    assert result.err.startswith(
        f"error: {run.name}: the log has stopped, and it is unknown whether the run is alive: "
    )
    assert result.err.endswith(f"follow it again: pipectl logs -f {run.name}\n")
    assert 60 <= now <= 130, "as long after the last line"


def test_logs_of_ranks(cli, finished):
    (finished / "logs/job.log").write_bytes(b"started\n[1] not of rank 1\nwhy")
    (finished / "logs/rank-0000.log").write_bytes(b"zero\n\x1b[31m\xff\n")
    (finished / "logs/rank-0001.log").write_bytes(b"[0] one\n\r1%\r2%\nlast")
    one = "[1] [0] one\n[1] 2%\n[1] last\n"
    assert cli("logs", "--rank", "1").out == one
    both = f"[0] zero\n[0] [31m\ufffd\n{one}"
    assert cli("logs", "--rank", "1", "--rank", "0", "-f").out == both
    assert cli("logs").out == f"{both}started\n[1] not of rank 1\nwhy\n"
    error = {"rank": 1, "stage": 1, "step": 3, "action": "UPDATE", "type": "E", "message": "\x1bm"}
    (finished / "errors/rank-0001.json").write_text(json.dumps({**error, "traceback": "in x\n"}))
    told = "pipectl: rank 1, stage 1, UPDATE, step 3: E: m\nin x\n"
    assert cli("logs", "--rank", "1").out == one + told


def test_the_last_lines_of_logs(cli, finished):
    (finished / "logs/rank-0000.log").write_text("a\nb\nc\n")
    assert cli("logs", "--tail", "3").out == "[0] c\nstarted\nzero [31mred\n"
    assert cli("logs", "-n", "1", "--rank", "0").out == "[0] c\n"
    assert cli("logs", "--tail", "1", "-f").out == "zero [31mred\n"
    assert cli("logs", "--tail", "0").out == ""


def test_logs_of_several_runs_have_headings(cli, finished, failed):
    (failed / "logs/job.log").write_text("broken\n")
    assert cli("logs", failed.name, finished.name).out == (
        f"==> {failed.name} <==\nbroken\n\n==> {finished.name} <==\nstarted\nzero [31mred\n"
    )


def test_a_run_that_printed_nothing_is_no_error(cli, finished):
    result = cli("logs", "--rank", "1")
    assert (result.code, result.out) == (0, "")
    assert result.err.startswith("20250101-120000-tiny: rank 1 has printed nothing")
    (finished / "logs/job.log").unlink()
    result = cli("logs")
    assert (result.code, result.out) == (0, "")
    assert result.err.startswith("20250101-120000-tiny: the run has printed nothing")


def test_cancel_leaves_finished_runs_alone(cli, finished, failed):
    before = (finished / "record.json").read_text()
    result = cli("cancel", "last", finished.name)
    over = [f"{run.name} had already ended" for run in (failed, finished)]
    assert (result.code, result.out.splitlines()) == (0, over)
    assert (finished / "record.json").read_text() == before
    result = cli("cancel", "last", "no-such-run")
    assert (result.code, result.out) == (6, ""), "nothing is ended before all are known"


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (143, "FAILED")])
@pytest.mark.parametrize(
    "squeue", [LISTED.format("RUNNING"), LISTED.format("COMPLETING"), "exit 1"]
)
def test_the_job_of_a_run_that_is_over_is_cancelled_as_long_as_it_may_be_listed(
    cli, queued, program, place, code, state, squeue
):
    """A node that is frozen keeps its job in the queue; the run stays what it was."""
    (queued / "exit_code").write_text(f"{code}\n")
    program("squeue", squeue)
    program("sacct", "exit 1")
    program("scancel", f'echo "$@" >> {place}/cancelled')
    result = cli("cancel", "last")
    assert (result.code, result.err) == (0, "")
    assert "had already ended; its job was still listed and is cancelled" in result.out
    assert (place / "cancelled").read_text().split()[-1] == "12"
    program("squeue", "exit 0")
    assert cli("status", "last", "--json").json["state"] == state


def test_a_run_that_waits_to_start_again_is_cancelled(cli, queued, program):
    """The exit code is that of the start before, whose node failed."""
    (queued / "exit_code").write_text("143\n")
    program("squeue", LISTED.format("PENDING"))
    program("scancel", "true")
    assert cli("cancel", "last").out == "cancelled: 20250103-120000-tiny\n"
    program("squeue", "exit 0")
    program("sacct", "exit 1")
    assert cli("status", "last", "--json").json["state"] == "CANCELLED"


def test_cancel_on_slurm_a_run_and_one_that_was_never_confirmed(
    cli, queued, program, place, run_of
):
    program("squeue", "echo '12|RUNNING|1|1700000000|N/A|node1|t|None'")
    program("scancel", f'echo "$@" >> {place}/cancelled')
    result = cli("cancel", "last")
    assert (result.code, result.out) == (0, "cancelled: 20250103-120000-tiny\n")
    assert (place / "cancelled").read_text().split()[-1] == "12"
    assert json.loads((queued / "record.json").read_text())["state"] == "cancelled"
    run_of("20250104-120000-tiny", state="submitting", job_id=None)
    result = cli("cancel", "last")
    assert (result.code, "was never confirmed" in result.err) == (6, True)
    run_of("20250105-120000-tiny", state="submitting", job_id=None, scheduler="slurm")
    program("squeue", "echo 'squeue: down' >&2; exit 1")
    result = cli("cancel", "last")
    assert (result.code, "squeue: down" in result.err) == (5, True)
