"""What is drawn of runs, views of a terminal, and runs that are followed to their end."""

import io
import json
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipectl.batch import JobState, JobStatus
from pipectl.cli.submission import ago
from pipectl.cli.views.run import bar, format_long_time, run_lines, sparkline
from pipectl.cli.views.run_json import run_json
from pipectl.errors import UsageError
from pipectl.jobs.state import RunStatus
from pipectl.plan import Prediction, StageCost
from pipectl.runs import Record, RunDirectory, SweepDirectory
from pipectl.runs.readers import Measured, RankBeat

GIB = 1 << 30
KEYS = ("waits_for", "peaks")


def test_long_lines_are_indented_on_a_terminal_and_paths_are_whole(cli, finished, monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=44, color_system=None)
    whole = cli("status", "last").out
    with monkeypatch.context() as patch:
        patch.setattr("pipectl.cli.console.output", lambda: terminal)
        cli("status", "last")
    lines = screen.getvalue().splitlines()
    assert [line for line in lines[1:] if len(line) > 44 and " " in line[16:]] == []
    assert any(line.startswith(16 * " ") for line in lines)
    assert "".join(whole.split()) == "".join(screen.getvalue().split())


def test_a_run_that_nobody_else_may_write_is_shown(cli, run_of, program, monkeypatch):
    """Its next job has another id, which is not noted then."""
    run = run_of("20250103-120000-tiny", scheduler="pbs", job_id="7.vm")
    (run / "resubmitted").write_text("12.vm\n")
    program("qstat", "printf 'Job Id: 12.vm\n    job_state = R\n'")

    def refuse(self, path):
        raise UsageError(f"{path}: cannot be written", cure="")

    monkeypatch.setattr(Record, "save", refuse)
    shown = cli("status", "last", "--json").json
    assert (shown["job_id"], shown["state"]) == ("12.vm", "RUNNING")
    assert Record.load(run / "record.json").job_id == "7.vm"


def status_of(folder: Path, ranks: Sequence[RankBeat] = (), **fields: Any) -> RunStatus:
    job = JobStatus(JobState.RUNNING, source="test")
    run, shown = RunDirectory(folder), tuple(ranks)
    status = RunStatus(run, None, job, "training", Measured(step=3), None, shown, None)
    return replace(status, **fields)


def test_the_lines_of_a_run(pipeline, tmp_path, golden):
    """A difference with its parts, a rank that others wait for, and figures beside a prediction."""
    parts = {"computing": 0.004, "communication": 0.009, "sums": 1e-5, "between_actions": -0.002}

    def waiting(*shares):
        ranks = [RankBeat(r, node=f"n{r}", waiting=share) for r, share in enumerate(shares)]
        return status_of(tmp_path, ranks)

    def measured(step_s):
        """A run with a predicted step of 1 s, unless the plan predicts nothing."""
        cost = StageCost(0.15, 0.05, 0.1, 0, 0, 0, flops=10**8)
        plan = pipeline(2, 4, costs=[cost] * 2, batch_size=3)  # the last batch is not full
        if step_s is not None:
            prediction = Prediction(1.0, 0.0, (1.0, 1.0), (GIB, 3 * GIB), 4e9)
            plan = replace(plan, prediction=prediction)
        ranks = [RankBeat(rank, peak_bytes=peak) for rank, peak in enumerate((GIB, 2 * GIB))]
        return status_of(
            tmp_path,
            [*ranks, RankBeat(99)],
            plan=plan,
            measured=Measured(step=30, steps=40, step_time_s=step_s),
        )

    statuses = {
        "one rank is slow": waiting(0.7, 0.5, 0.05, None),
        "all ranks wait alike": waiting(0.5, 0.4, 0.45),
        "ranks wait little": waiting(0.1, 0.2, 0.0),
        "no step yet": waiting(None, None),
        "one rank": waiting(0.9),
        "as fast as predicted": measured(1.002),
        "slower": measured(1.3),
        "faster": measured(0.5),
        "no prediction": measured(None),
    }
    texts = []
    for name, status in statuses.items():
        lines = [line.plain for line in run_lines(status, 80, files=False)][1:]
        fields: Any = run_json(status)
        texts += [name, *lines, json.dumps({key: fields[key] for key in KEYS})]
    for each in (parts, {"computing": 5e-5}):
        lines = [line.plain for line in run_lines(status_of(tmp_path), 80, (10, each))]
        texts += ["a difference", *(line for line in lines if "difference" in line)]
    golden(*texts)


def test_what_is_drawn_of_figures():
    times = (7199, 7260, 2e5, float("inf"))
    texts = ["119 min 59 s", "2 h 01 min", "2.3 days", "inf s"]
    assert list(map(format_long_time, times)) == texts
    ages = ["just now", "just now", "1 min ago", "3 h ago", "1 day ago", "9 days ago"]
    assert list(map(ago, (-3, 59, 60, 3 * 3600 + 5, 86400, 9 * 86400))) == ages
    assert sparkline([], 5) == ""
    assert sparkline([1.0], 5) == "▁"
    assert sparkline([3, 3, 3], 5) == "▁▁▁"
    assert sparkline(range(8), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert len(sparkline(range(1000), 37)) == 37
    assert sparkline([1e308, 1e308, -1e308, -1e308], 2) == "█▁"
    shares = (0, 1, 0.5, 0.53, 7)
    assert [bar(share, 4) for share in shares] == ["    ", "████", "██  ", "██▏ ", "████"]


ENTER, LEAVE, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


@pytest.fixture
def screen(monkeypatch):
    """What a terminal of 100 columns and 30 lines is sent while a command watches."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100, height=30, color_system=None)
    monkeypatch.setenv("TERM", "xterm-256color")
    for module in ("commands.status", "console"):
        monkeypatch.setattr(f"pipectl.cli.{module}.output", lambda: console)
    return text


def test_ctrl_c_ends_the_view_and_leaves_the_terminal_clean(
    cli, screen, run_of, finished, monkeypatch
):
    run_of("20250103-120000-tiny")

    def interrupt(_seconds):
        assert "Ctrl-C closes the view" in screen.getvalue()
        raise KeyboardInterrupt

    clock = SimpleNamespace(**{**vars(time), "sleep": interrupt})
    monkeypatch.setattr("pipectl.cli.commands.status.time", clock)
    result = cli("status", "--watch")
    assert (result.code, result.err) == (0, "")
    text = screen.getvalue()
    assert text.count(ENTER) == text.count(LEAVE) == 1
    assert text.rindex(SHOW_CURSOR) > text.index(ENTER)
    for shown in text.split(LEAVE):
        assert "20250101-120000-tiny" in shown, "on the screen, and once more when it is left"


def test_one_run_is_watched_to_its_end(cli, screen, finished):
    rank = {"rank": 0, "node": "n1", "stages": [0], "waiting": 0.5}
    beat = {"version": 1, "state": "training", "ranks": [rank]}
    (finished / "heartbeat.json").write_text(json.dumps(beat))
    result = cli("status", "last", "--watch")
    assert result.code == 0
    picture = screen.getvalue().partition(LEAVE)[0]
    assert "  loss  █" in picture, "as a curve"
    assert "rank  node  stage  busy" in picture, "as there is room for it"
    assert "COMPLETED" in screen.getvalue().partition(LEAVE)[2], (
        "the last state stays on the terminal"
    )


@pytest.mark.parametrize("arguments", [(), ("last",), ("rates",)])
def test_ctrl_c_in_the_first_look_ends_the_command(cli, screen, finished, monkeypatch, arguments):
    """Of all runs, one, or a sweep, while the batch system is asked, say."""
    SweepDirectory.create(Path("runs"), "rates", 2, 1.8e9)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipectl.jobs.state.Poller.get_statuses", interrupt)
    result = cli("status", *arguments, "--watch")
    assert (result.code, result.out, result.err) == (130, "", "")


LISTED = "echo '12|{}|1|N/A|N/A|n1||None'"


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


@pytest.mark.parametrize("lost", ["machine", "scheduler"])
def test_a_log_is_not_followed_for_ever_if_nobody_knows_of_an_end(cli, run_of, monkeypatch, lost):
    """Of a run of another machine, or one whose batch system is gone."""
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
        if now == 50:
            log.write_text("started\nmore\nand ended in the mid")

    clock = SimpleNamespace(time=time.time, sleep=pass_by)
    monkeypatch.setattr("pipectl.jobs.state.time", clock)
    result = cli("logs", "-f")
    assert (result.code, result.out) == (6, "started\nmore\nand ended in the mid\n")
    assert result.err.startswith(
        f"error: {run.name}: the log has stopped, and it is unknown whether the run is alive: "
    )
    assert result.err.endswith(f"follow it again: pipectl logs -f {run.name}\n")
    assert 60 <= now <= 130, "as long after the last line"


LOCAL_JOB = """\
[ "$1" = --version ] && exit 1
while [ "$1" != --run ]; do shift; done
run=$2
echo '{"attempt":1,"step":1,"steps":4,"time":0,"loss":2.5,"step_time_s":0.1}' > $run/metrics.jsonl
"""


BEAT = '{"version":1,"state":"training","step":1,"steps":4,"time":1,"ranks":[]}'
REPORT = '{"rank":1,"type":"MismatchError","message":"no","time":1,"exit_code":3}'


@pytest.mark.parametrize(
    ("rest", "code", "state", "shown", "told"),
    [
        (f"echo '{BEAT}' > $run/heartbeat.json; sleep 2.5", 0, "COMPLETED",
         "loss          2.5 at first, 2.5 now\n", "RUNNING: training, step 1 of 4, loss 2.5\n"),
        (f"echo '{REPORT}' > $run/errors/rank-0001.json; exit 9", 3, "FAILED",
         "error         rank 1\n                MismatchError: no\n", ""),
    ],
    ids=["completes", "fails"],
)  # fmt: skip
def test_wait_follows_a_local_run_to_its_end_and_has_the_code_of_its_failure(
    cli, profile, mpiexec, only_run, rest, code, state, shown, told
):
    mpiexec(LOCAL_JOB + rest)
    result = cli("submit", "job.yaml", "--scheduler", "local", "--wait")
    assert result.code == code
    assert f"{only_run().name}  {state}  local job " in result.out
    assert f"  {shown}" in result.out
    assert told in result.err
    assert result.err.splitlines()[-1] == state


def test_an_interrupt_ends_the_waiting_and_not_the_run(
    cli, profile, mpiexec, monkeypatch, only_run
):
    def interrupt(_seconds):
        while not (only_run() / "metrics.jsonl").exists():
            time.sleep(0.02)
        signal.raise_signal(signal.SIGHUP)

    mpiexec(LOCAL_JOB + "exec sleep 60")
    with monkeypatch.context() as patch:
        patch.setattr("pipectl.jobs.state.time", SimpleNamespace(time=time.time, sleep=interrupt))
        result = cli("submit", "job.yaml", "--scheduler", "local", "--wait")
    run = only_run().name
    assert result.code == 130
    assert f"\nthe run continues; cancel it with: pipectl cancel {run}\n" in result.err
    assert "  RUNNING  local job " in cli("status", "last").out
    assert cli("cancel", "last").out == f"cancelled: {run}\n"
    assert "  CANCELLED  local job " in cli("status", "last").out
