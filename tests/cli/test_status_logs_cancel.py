from __future__ import annotations

import io
import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

if TYPE_CHECKING:
    from conftest import Command

RunOf = Callable[..., Path]
Program = Callable[[str, str], Path]
LISTED = "echo '12|{}|1|N/A|N/A|n1||None'"


def test_no_runs_at_all(cli: Command) -> None:
    result = cli("status")
    assert (result.code, result.err) == (0, "")
    assert result.out == "runs: no runs yet; start one with: pipectl submit JOB.yaml\n"


def test_the_table_has_a_row_per_run_oldest_first(
    cli: Command, finished: Path, failed: Path, run_of: RunOf
) -> None:
    run_of("20250103-120000-tiny")
    lines = cli("status").out.splitlines()
    assert lines[0].split() == ["run", "state", "on", "step", "loss", "per", "step"]
    assert [line.split() for line in lines[1:]] == [
        ["20250101-120000-tiny", "COMPLETED", "local", "10/10", "0.3", "500", "ms"],
        ["20250102-120000-tiny", "FAILED", "local", "4/10", "0.75", "500", "ms"],
        ["20250103-120000-tiny", "FAILED", "local", "0/10"],
    ]


@pytest.mark.parametrize("width", [55, 66, 100])
def test_a_narrow_table_leaves_columns_out_and_cuts_no_figure(
    cli: Command, finished: Path, failed: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    head, first, second = cli("status").out.splitlines()
    assert max(map(len, (head, first, second))) <= width
    assert ("on" in head.split()) == (width > 55)
    assert first.split()[0] == "20250101-120000-tiny"
    assert first.split()[-3:] == ["0.3", "500", "ms"]
    assert "\N{HORIZONTAL ELLIPSIS}" not in head + first + second


def test_the_table_can_be_cut_to_the_newest(cli: Command, finished: Path, failed: Path) -> None:
    result = cli("status", "--limit", "1")
    assert "20250101" not in result.out
    assert result.err == "1 older runs are not shown; see --limit\n"


def test_one_completed_run(cli: Command, finished: Path) -> None:
    result = cli("status", "last")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("20250101-120000-tiny  COMPLETED  local job ")
    assert [line for line in lines[1:] if "submitted" not in line] == [
        "  progress      ████████████████████ step 10 of 10",
        "  speed         500 ms per step",
        "  loss          3 after the first step, 0.3 now",
        "  evaluation    after step 10: loss 0.25",
        "  run directory runs/20250101-120000-tiny",
    ]


def test_several_runs_in_a_table(cli: Command, finished: Path, failed: Path, run_of: RunOf) -> None:
    run_of("20250103-120000-tiny", scheduler="slurm", job_id="4711")
    names = ("4711", finished.name, finished.name)
    assert [line.split()[0] for line in cli("status", *names).out.splitlines()] == [
        "run",
        "20250103-120000-tiny",
        finished.name,
    ]
    assert [one["run"] for one in json.loads(cli("status", *names, "--json").out)] == [
        "20250103-120000-tiny",
        finished.name,
    ]
    assert cli("status", *names, "--ranks").code == 2
    assert cli("status", "no-such-run", finished.name).code == 6


def test_metrics_that_are_not_finite_are_said_to_be(cli: Command, finished: Path) -> None:
    for values in ({"loss": None, "perplexity": 2.5}, None):
        line = {"attempt": 1, "step": 10, "time": 0, "evaluation": values}
        with (finished / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        result = cli("status", "last")
        assert (result.code, result.err) == (0, "")
        told = "after step 10: loss not finite, perplexity 2.5" in result.out
        assert told == (values is not None)
        assert json.loads(cli("status", "last", "--json").out)["evaluation"] == (values or {})


def test_the_last_lines_say_where_the_latest_weights_are(cli: Command, finished: Path) -> None:
    for name in ("step-000900", "step-001000", ".step-002000.partial"):
        (finished / "checkpoints" / name).mkdir()
    assert cli("status", "last").out.splitlines()[-2:] == [
        "  weights       runs/20250101-120000-tiny/checkpoints/step-001000",
        "  run directory runs/20250101-120000-tiny",
    ]


def test_paths_elsewhere_are_shown_whole(
    cli: Command, finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    out = cli("status", "last", "--directory", str(finished.parent)).out
    assert out.splitlines()[-1] == f"  run directory {finished}"


def test_a_failed_run_names_the_rank_that_broke_it(cli: Command, failed: Path) -> None:
    result = cli("status", "20250102")
    assert result.code == 0
    assert (
        "  error         rank 1 on n1, stage 1, BACKWARD micro-batch 2, step 5 (and 1 more ranks)\n"
        "                ValueError: boom 1\n"
        "                details: runs/20250102-120000-tiny/errors, "
        "pipectl logs 20250102-120000-tiny\n"
    ) in result.out
    assert (
        "  to go on      pipectl resume 20250102-120000-tiny  (from its beginning)\n" in result.out
    )


def test_a_failed_run_shows_what_failed_before_all_else(cli: Command, failed: Path) -> None:
    place = failed / "errors" / "rank-0001.json"
    report = json.loads(place.read_text())
    place.write_text(json.dumps({**report, "stage": -1, "action": "UPDATE"}))
    _, second, *_ = cli("status", "20250102").out.splitlines()
    assert second == "  error         rank 1 on n1, UPDATE, step 5 (and 1 more ranks)"
    assert "exit code" not in cli("status", "20250102").out


def test_long_lines_are_indented_on_a_terminal(
    cli: Command, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=44, color_system=None)
    whole = cli("status", "last").out
    monkeypatch.setattr("pipectl.cli.views.run.output", lambda: terminal)
    cli("status", "last")
    lines = screen.getvalue().splitlines()
    assert [line for line in lines[1:] if len(line) > 44 and " " in line[16:]] == []
    assert any(line.startswith(16 * " ") for line in lines)
    assert "".join(whole.split()) == "".join(screen.getvalue().split())


def test_a_failure_of_the_preparation_comes_first(cli: Command, failed: Path) -> None:
    report = {"rank": None, "host": "n1", "type": "CaptureError", "message": "no", "cure": "do"}
    (failed / "errors/prepare.json").write_text(json.dumps(report))
    out = cli("status", "last").out
    assert "  error         preparation on n1 (and 2 more ranks)\n" in out
    assert "                CaptureError: no\n                do\n" in out


def test_json_holds_the_same(cli: Command, finished: Path) -> None:
    one = json.loads(cli("status", "last", "--json").out)
    assert one["state"] == "COMPLETED"
    assert (one["step"], one["steps"], one["first_loss"], one["last_loss"]) == (10, 10, 3.0, 0.3)
    assert one["step_time_s"] == 0.5
    assert json.loads(cli("status", "--json").out) == [one]


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_an_unknown_run(cli: Command, finished: Path, command: str) -> None:
    result = cli(command, "20250101-120000-tinny")
    assert (result.code, result.out) == (6, "")
    assert result.err.startswith("error: runs: no run '20250101-120000-tinny'; did you mean ")


def test_a_damaged_record_is_an_unknown_state(cli: Command, finished: Path) -> None:
    (finished / "record.json").write_text('{"version": 1, "na')
    result = cli("status", "last")
    assert result.code == 6
    assert "UNKNOWN" in result.out
    assert "record.json:1:16: not valid JSON" in result.out
    assert "UNKNOWN" in cli("status").out


def test_damaged_files_around_a_good_record_do_not_hide_the_state(
    cli: Command, finished: Path
) -> None:
    for name in ("plan.json", "heartbeat.json", "errors/rank-0000.json"):
        (finished / name).write_text("{")
    result = cli("status", "last")
    assert result.code == 0
    assert "COMPLETED" in result.out


def test_fields_of_the_wrong_type_do_not_hide_the_rest(cli: Command, failed: Path) -> None:
    ranks = [{"rank": 0, "peak_bytes": None, "stages": 5}, {"rank": 1, "stages": None}]
    (failed / "heartbeat.json").write_text(json.dumps({"time": 1.0, "ranks": ranks}))
    (failed / "errors/prepare.json").write_text('{"type": "E", "message": 3, "cure": 5}')
    for more in ((), ("--ranks",), ("--json",)):
        result = cli("status", "last", *more)
        assert (result.code, result.err) == (0, "")


def test_a_run_of_another_machine_is_not_guessed(cli: Command, run_of: RunOf) -> None:
    run_of("20250103-120000-tiny", job_id=f"1.1@not-{socket.gethostname()}")
    result = cli("status", "last")
    assert result.code == 6
    assert "UNKNOWN" in result.out


def test_a_batch_system_that_is_gone_is_said(cli: Command, run_of: RunOf) -> None:
    run_of("20250103-120000-tiny", scheduler="slurm", job_id="12")
    result = cli("status", "last")
    assert result.code == 6
    assert "squeue: No such file or directory" in result.out


def test_a_run_that_does_not_move_on_says_who_waits_for_whom(
    cli: Command, run_of: RunOf, program: Program
) -> None:
    run = run_of("20250103-120000-tiny", scheduler="slurm", job_id="12")
    program("squeue", LISTED.format("RUNNING"))
    words = "no rank has moved on for 30 s: rank 0 waits for the other ranks\x1b[2J"
    report = {"version": 1, "node": "n1", "ends": False, "knows": False, "stalled": words}
    (run / "watch").mkdir()
    file = run / "watch/node-0000.json"
    file.write_text(json.dumps({**report, "start": "s", "ranks": []}))
    shown = words.replace("\x1b", "")
    assert f"  stalled       {shown}\n" in cli("status", "last").out
    assert json.loads(cli("status", "last", "--json").out)["stalled"] == shown
    for damaged in ("{", json.dumps({**report, "stalled": 5, "ranks": []}), "[]"):
        file.write_text(damaged)
        result = cli("status", "last")
        assert (result.code, "stalled" in result.out) == (0, False)


def test_a_report_from_outside_of_all_stages_names_none(cli: Command, failed: Path) -> None:
    error = {"rank": 1, "host": "n1", "stage": -1, "action": "UPDATE", "time": 1.0, "message": "m"}
    (failed / "errors/rank-0001.json").write_text(json.dumps(error))
    assert "rank 1 on n1, UPDATE (and 1 more ranks)\n" in cli("status", "last").out


DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize(
    ("file", "content", "state", "code"),
    [
        ("exit_code", "0", "COMPLETED", 0),
        ("exit_code", "9", "FAILED", 0),
        ("heartbeat.json", "", "RUNNING", 0),
        ("none", "", "UNKNOWN", 6),
    ],
)
def test_what_is_known_without_the_scheduler(
    cli: Command, run_of: RunOf, program: Any, file: str, content: str, state: str, code: int
) -> None:
    """Its controller is down while status asks."""
    for name in ("squeue", "sacct", "scontrol"):
        program(name, f"echo '{DOWN}' >&2; exit 1")
    run = run_of("20250103-120000-tiny", scheduler="slurm", job_id="12")
    beat = {"version": 1, "time": time.time(), "state": "training", "step": 4, "steps": 10}
    (run / file).write_text(content or json.dumps(beat))
    error = {"rank": 1, "stage": 1, "step": 5, "action": "FORWARD micro-batch 0", "message": "lost"}
    if state == "FAILED":
        (run / "errors" / "rank-0001.json").write_text(json.dumps(error))
    result = cli("status", "last")
    assert result.code == code
    assert state in result.out
    if state == "FAILED":
        assert "rank 1, stage 1, FORWARD micro-batch 0, step 5" in result.out
    if state in ("RUNNING", "UNKNOWN"):
        assert f"the scheduler could not be asked: squeue: {DOWN}" in result.out


def test_logs_without_control_characters(cli: Command, finished: Path) -> None:
    result = cli("logs")
    assert (result.code, result.out, result.err) == (0, "started\nzero [31mred\n", "")
    assert cli("logs", "last", "-f").out == result.out


def test_a_log_is_followed_as_it_grows(
    cli: Command, run_of: RunOf, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("20250103-120000-tiny", scheduler="slurm", job_id="12")
    (run / "logs/job.log").write_text("started\n")
    program("squeue", LISTED.format("RUNNING"))

    def end(_seconds: float) -> None:
        with (run / "logs/job.log").open("a") as log:
            log.write("more\n")
        (run / "exit_code").write_text("0\n")

    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=end)
    monkeypatch.setattr("pipectl.cli.commands.logs.time", clock)
    assert cli("logs", "-f").out == "started\nmore\n"


def test_the_log_of_a_run_that_will_start_again_is_followed(
    cli: Command, run_of: RunOf, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code of the start before stays until the next one."""
    run = run_of("20250103-120000-tiny", scheduler="slurm", job_id="12")
    (run / "logs/job.log").write_text("before\n")
    (run / "exit_code").write_text("75\n")
    program("squeue", LISTED.format("PENDING"))
    program("sacct", "exit 1")
    looks = iter(range(100))

    def goes_on(_seconds: float) -> None:
        if next(looks) == 3:
            (run / "logs/job.log").write_text("before\nand on\n")
            (run / "exit_code").write_text("0\n")
            program("squeue", "exit 0")

    now = iter(range(0, 1000, 4))
    clock = SimpleNamespace(time=time.time, monotonic=lambda: next(now), sleep=goes_on)
    monkeypatch.setattr("pipectl.cli.commands.logs.time", clock)
    assert cli("logs", "-f").out == "before\nand on\n"


@pytest.mark.parametrize("lost", ["machine", "directory", "scheduler"])
def test_a_log_is_not_followed_for_ever_where_nobody_knows_of_an_end(
    cli: Command, run_of: RunOf, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Of a run of another machine, one that was removed, or one whose batch system is gone."""
    slurm = {"scheduler": "slurm", "job_id": "12"}
    elsewhere = {"job_id": f"1.1@not-{socket.gethostname()}"}
    run = run_of("20250103-120000-tiny", **(slurm if lost == "scheduler" else elsewhere))
    log = run / "logs/job.log"
    log.write_text("started\n")
    now = 0.0

    def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds
        assert now < 1000
        if now == 50 and lost == "directory":
            shutil.rmtree(run)
        elif now == 50:
            log.write_text("started\nmore\nand ended in the mid")

    clock = SimpleNamespace(time=time.time, monotonic=lambda: now, sleep=pass_by)
    monkeypatch.setattr("pipectl.cli.commands.logs.time", clock)
    result = cli("logs", "-f")
    assert result.code == 6
    assert result.out == "started\n" + (
        "" if lost == "directory" else "more\nand ended in the mid\n"
    )
    assert result.err.startswith(f"error: {run.name}: it cannot be told whether it goes on: ")
    assert result.err.endswith(f"follow it again: pipectl logs -f {run.name}\n")
    assert 60 <= now <= 130, "as long after the last line"


def test_logs_of_ranks(cli: Command, finished: Path) -> None:
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
    told = "pipectl: rank 1, stage 1, step 3, UPDATE: E: m\nin x\n"
    assert cli("logs", "--rank", "1").out == one + told


def test_the_last_lines_of_logs(cli: Command, finished: Path) -> None:
    (finished / "logs/rank-0000.log").write_text("a\nb\nc\n")
    assert cli("logs", "--tail", "3").out == "[0] c\nstarted\nzero [31mred\n"
    assert cli("logs", "-n", "1", "--rank", "0").out == "[0] c\n"
    assert cli("logs", "--tail", "1", "-f").out == "zero [31mred\n"
    assert cli("logs", "--tail", "0").out == ""


def test_logs_of_several_runs_have_headings(cli: Command, finished: Path, failed: Path) -> None:
    (failed / "logs/job.log").write_text("broken\n")
    assert cli("logs", failed.name, finished.name).out == (
        f"==> {failed.name} <==\nbroken\n\n==> {finished.name} <==\nstarted\nzero [31mred\n"
    )
    result = cli("logs", failed.name, finished.name, "-f")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: -f: follows one run\n")


def test_logs_of_ranks_that_there_are_not(cli: Command, finished: Path) -> None:
    result = cli("logs", "--rank", "2")
    assert (result.code, "has the ranks 0 to 1" in result.err) == (2, True)
    result = cli("logs", "--rank", "1")
    assert (result.code, result.out) == (0, "")
    assert result.err.startswith("20250101-120000-tiny: nothing of rank 1 was printed")


def test_a_run_that_printed_nothing_is_no_error(cli: Command, finished: Path) -> None:
    (finished / "logs/job.log").unlink()
    result = cli("logs")
    assert (result.code, result.out) == (0, "")
    assert result.err.startswith("20250101-120000-tiny: nothing was printed")


def test_cancel_leaves_finished_runs_alone(cli: Command, finished: Path, failed: Path) -> None:
    before = (finished / "record.json").read_text()
    result = cli("cancel", "last", finished.name)
    over = [f"{run.name} was over already" for run in (failed, finished)]
    assert (result.code, result.out.splitlines()) == (0, over)
    assert (finished / "record.json").read_text() == before
    assert cli("cancel").code == 2
    result = cli("cancel", "last", "no-such-run")
    assert (result.code, result.out) == (6, ""), "nothing is ended before all are known"


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (143, "FAILED")])
@pytest.mark.parametrize(
    "squeue", [LISTED.format("RUNNING"), LISTED.format("COMPLETING"), "exit 1"]
)
def test_the_job_of_a_run_that_is_over_is_cancelled_as_long_as_it_may_be_listed(
    cli: Command,
    run_of: RunOf,
    program: Program,
    place: Path,
    code: int,
    state: str,
    squeue: str,
) -> None:
    """A node that is frozen keeps its job in the queue; the run stays what it was."""
    run = run_of("20250103-120000-tiny", scheduler="slurm", job_id="12")
    (run / "exit_code").write_text(f"{code}\n")
    program("squeue", squeue)
    program("sacct", "exit 1")
    program("scancel", f'echo "$@" >> {place}/cancelled')
    result = cli("cancel", "last")
    assert (result.code, result.err) == (0, "")
    assert "was over already; its job, which was still listed, is cancelled" in result.out
    assert (place / "cancelled").read_text().split()[-1] == "12"
    program("squeue", "exit 0")
    assert json.loads(cli("status", "last", "--json").out)["state"] == state


def test_a_run_that_waits_to_start_again_is_cancelled(
    cli: Command, run_of: RunOf, program: Program
) -> None:
    """The exit code is that of the start before, whose node failed."""
    run = run_of("20250103-120000-tiny", scheduler="slurm", job_id="12")
    (run / "exit_code").write_text("143\n")
    program("squeue", LISTED.format("PENDING"))
    program("scancel", "true")
    assert cli("cancel", "last").out == "cancelled: 20250103-120000-tiny\n"
    program("squeue", "exit 0")
    program("sacct", "exit 1")
    assert json.loads(cli("status", "last", "--json").out)["state"] == "CANCELLED"


def test_cancel_a_run_that_was_never_confirmed(cli: Command, run_of: RunOf) -> None:
    run_of("20250103-120000-tiny", state="submitting", job_id=None)
    result = cli("cancel", "last")
    assert result.code == 6
    assert "was never confirmed" in result.err


def test_cancel_on_slurm(
    cli: Command, run_of: RunOf, program: Callable[[str, str], Path], place: Path
) -> None:
    run = run_of("20250103-120000-tiny", scheduler="slurm", job_id="12")
    program("squeue", "echo '12|RUNNING|1|1700000000|N/A|node1|t|None'")
    program("scancel", f'echo "$@" >> {place}/cancelled')
    result = cli("cancel", "last")
    assert (result.code, result.out) == (0, "cancelled: 20250103-120000-tiny\n")
    assert (place / "cancelled").read_text().split()[-1] == "12"
    record = json.loads((run / "record.json").read_text())
    assert record["state"] == "cancelled"
