"""What is drawn of runs, views of a terminal, and runs that are followed to their end."""

import json
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipectl.batch import JobState, JobStatus
from pipectl.cli.submission import ago, describe_progress, follow
from pipectl.cli.views.run import bar, sparkline
from pipectl.errors import UsageError
from pipectl.jobs.state import RunStatus
from pipectl.runs import Measured, Record, RunDirectory, SweepDirectory
from pipectl.runs.phases import evaluates, saves
from pipectl.units import format_long_time


def test_long_lines_are_indented_on_a_terminal_and_paths_are_whole(cli, finished, screen):
    whole = cli("status", "last").out
    text = screen(44, "console.output")
    cli("status", "last")
    lines = text.getvalue().splitlines()
    assert [line for line in lines[1:] if len(line) > 44 and " " in line[16:]] == []
    assert any(line.startswith(16 * " ") for line in lines)
    assert "".join(whole.split()) == "".join(text.getvalue().split())


def test_a_run_that_nobody_else_may_write_is_shown(cli, run_of, program, monkeypatch):
    """Its next job has another id, which is not noted then."""
    run = run_of("20250103-120000-tiny", scheduler="pbs", job_id="7.vm")
    (run / "starts/1/resubmitted").write_text("12.vm\n")
    program("qstat", "printf 'Job Id: 12.vm\n    job_state = R\n'")

    def refuse(self, path):
        raise UsageError(f"{path}: cannot be written", hint="")

    monkeypatch.setattr(Record, "save", refuse)
    shown = cli("status", "last", "--json").json
    assert (shown["job_id"], shown["state"]) == ("12.vm", "RUNNING")
    assert Record.load(run / "record.json").job_id == "7.vm"


def test_what_is_drawn_of_figures():
    times = (7199, 7260, 2e5, float("inf"))
    texts = ["119 min 59 s", "2 h 01 min", "2.3 days", "inf s"]
    assert list(map(format_long_time, times)) == texts
    ages = ["just now", "just now", "1 min ago", "3 h ago", "1 day ago", "9 days ago"]
    assert list(map(ago, (-3, 59, 60, 3 * 3600 + 5, 86400, 9 * 86400))) == ages
    extremes = [1e308, 1e308, -1e308, -1e308] * 4
    curves = ["", "▁▁▁", "▁▂▃▄▅▆▇█", "▁▂▃▄▅▆▇█", "█▁█▁█▁█▁"]
    drawn = ([], [3, 3, 3], range(8), range(1000), extremes)
    assert [sparkline(values, 8) for values in drawn] == curves
    shares = (0, 1, 0.5, 0.53, 7)
    assert [bar(share, 4) for share in shares] == ["    ", "████", "██  ", "██▏ ", "████"]


ENTER, LEAVE, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


@pytest.fixture
def watched(screen, monkeypatch):
    """What a terminal is sent while a command watches."""
    monkeypatch.setenv("TERM", "xterm-256color")
    return screen(100, "commands.status.output", "console.output")


def test_ctrl_c_ends_the_view_and_leaves_the_terminal_clean(
    cli, watched, run_of, finished, monkeypatch
):
    run_of("20250103-120000-tiny")

    def interrupt(_seconds):
        assert "Ctrl-C closes the view" in watched.getvalue()
        raise KeyboardInterrupt

    clock = SimpleNamespace(**{**vars(time), "sleep": interrupt})
    monkeypatch.setattr("pipectl.cli.commands.status.time", clock)
    result = cli("status", "--watch")
    assert (result.code, result.err) == (0, "")
    text = watched.getvalue()
    assert text.count(ENTER) == text.count(LEAVE) == 1
    assert text.rindex(SHOW_CURSOR) > text.index(ENTER)
    for shown in text.split(LEAVE):
        assert "20250101-120000-tiny" in shown, "on the screen, and once more when it is left"


def test_one_run_is_watched_to_its_end(cli, watched, finished):
    rank = {"rank": 0, "node": "n1", "stages": [0], "waiting": 0.5}
    beat = {"version": 1, "state": "training", "ranks": [rank]}
    (finished / "starts/1/heartbeat.json").write_text(json.dumps(beat))
    result = cli("status", "last", "--watch")
    assert result.code == 0
    picture = watched.getvalue().partition(LEAVE)[0]
    assert "  loss  █" in picture, "as a curve"
    assert "rank  node  stage  busy" in picture, "as there is room for it"
    assert "COMPLETED" in watched.getvalue().partition(LEAVE)[2], (
        "the last state stays on the terminal"
    )


def test_named_runs_are_watched_until_all_are_over(
    cli, watched, queued, finished, slurm, monkeypatch
):
    """Those that the screen has no room for, too."""
    slurm("squeue", "echo '12|RUNNING|1|N/A|N/A|n1||None'")
    looks = iter(range(9))

    def goes_on(_seconds):
        if next(looks) == 2:
            slurm("squeue", "exit 0")
            (queued / "starts/1/exit_code").write_text("0\n")

    clock = SimpleNamespace(**{**vars(time), "sleep": goes_on})
    monkeypatch.setattr("pipectl.cli.commands.status.time", clock)
    monkeypatch.setattr("pipectl.cli.commands.status._MARGIN", 29)  # one line is left for runs
    result = cli("status", "--watch", queued.name, finished.name)
    assert (result.code, result.err, next(looks)) == (0, "", 4)
    assert "20250103" not in watched.getvalue().partition(LEAVE)[0]


@pytest.mark.parametrize("arguments", [(), ("last",), ("rates",)])
def test_ctrl_c_in_the_first_look_ends_the_command(cli, watched, finished, monkeypatch, arguments):
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
        (queued / "starts/1/exit_code").write_text(exit_code)
    program("squeue", LISTED.format(state))
    program("sacct", "exit 1")
    looks = iter(range(100))

    def goes_on(_seconds):
        if next(looks) == 3:
            (queued / "logs/job.log").write_text("started\nmore\n")
            (queued / "starts/1/exit_code").write_text("0\n")
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
rm $PIPECTL_START/starting
echo '{"attempt":1,"step":1,"steps":4,"time":0,"loss":2.5,"step_time_s":0.1}' > $run/metrics.jsonl
"""


BEAT = '{"version":1,"state":"training","step":1,"steps":4,"time":1,"ranks":[]}'


def test_wait_follows_a_local_run_to_its_end(cli, profile, mpiexec, monkeypatch, only_run):
    """It ends after it was looked at while it was training."""
    looks = 0

    def sleep(_seconds):
        nonlocal looks
        beat = only_run() / "starts/1/heartbeat.json"
        looks += beat.exists() and beat.read_text().endswith("}\n")
        if looks == 2:
            (only_run() / "go").touch()
        time.sleep(0.05)

    beat = f"echo '{BEAT}' > $PIPECTL_START/heartbeat.json"
    mpiexec(f"{LOCAL_JOB}{beat}; while [ ! -e $run/go ]; do sleep 0.05; done")
    with monkeypatch.context() as patch:
        patch.setattr("pipectl.jobs.state.time", SimpleNamespace(time=time.time, sleep=sleep))
        result = cli("submit", "job.yaml", "--scheduler", "local", "--wait")
    assert result.code == 0
    assert f"{only_run().name}  COMPLETED  local job " in result.out
    assert "  loss          2.5 at first, 2.5 at the end\n" in result.out
    assert "RUNNING: training, step 1 of 4, loss 2.5\n" in result.err
    assert result.err.endswith("\nCOMPLETED\n")


def test_the_loss_of_the_last_step_is_none_of_an_evaluation(run_of):
    run = RunDirectory(run_of("20250103-120000-tiny").absolute())
    job = JobStatus(JobState.RUNNING)
    shown = {}
    for phase in ("training", "warming up", evaluates(4), evaluates(5), saves(4), saves(5)):
        measured = Measured(step=4, steps=9, last_loss=2.5)
        status = RunStatus(run, run.start, None, job, phase, measured, None, (), [])
        shown[phase] = status.progress[::2], describe_progress(status).removeprefix("RUNNING: ")
    loss = ", training loss 2.5"
    assert shown == {
        "training": ((4, "training, loss 2.5"), "training, step 4 of 9, loss 2.5"),
        "warming up": ((4, f"warming up{loss}"), f"warming up, step 4 of 9{loss}"),
        "evaluating after step 4": (
            (4, f"evaluating after step 4{loss}"),
            f"evaluating after step 4{loss}",
        ),
        "evaluating after step 5": ((5, "evaluating after step 5"), "evaluating after step 5"),
        "saving after step 4": ((4, f"saving after step 4{loss}"), f"saving after step 4{loss}"),
        "saving after step 5": ((5, "saving after step 5"), "saving after step 5"),
    }, "that of step 5 is on its way"


def test_whoever_waits_is_told_each_reason_once_and_its_hint(run_of, monkeypatch, capfd):
    run = RunDirectory(run_of("20250103-120000-tiny").absolute())
    hints = [("Priority", ""), ("Resources", ""), ("Priority", ""), ("QOSMinGRES", "ask for more")]
    jobs = [JobStatus(JobState.QUEUED, reason, hint=hint) for reason, hint in hints for _ in "ab"]
    looks = [
        RunStatus(run, run.start, None, job, "", Measured(), None, (), [])
        for job in [*jobs, JobStatus(JobState.COMPLETED)]
    ]
    monkeypatch.setattr("pipectl.jobs.state.poll", lambda _run: iter(looks))
    follow(run)
    told = "QUEUED: Priority|QUEUED: Resources|QUEUED: QOSMinGRES|ask for more|COMPLETED"
    assert capfd.readouterr().err.splitlines() == told.split("|")
    assert looks[0].progress[2] == "QUEUED: Priority"


RAN = "time waited 60 min 00 s, {} 2 h 00 min"
LEFT = f"{RAN.format('runs for')}, 10 h 00 min of its walltime left"
OVER = "too short at this speed, its walltime is over after step"
SAVES = "it then saves a checkpoint, {}"
WALLTIMES = [
    ("PENDING", {"after": ["20250101-a", "rates"]}, "after starts once 20250101-a, rates has"),
    ("PENDING", {}, "time has waited 3 h 00 min"),
    ("RUNNING", {}, f"{LEFT} used 4 node-hours speed"),
    ("RUNNING", {"lead_time_s": 18000}, f"{OVER} 8 of 10; {SAVES.format('from which')}"),
    ("RUNNING", {"lead_time_s": 18000, "max_starts": 3}, SAVES.format("and starts again")),
    ("RUNNING", {"steps": 20}, f"{OVER} 13 of 20; it saves no checkpoint"),
    ("FAILED", {}, f"{RAN.format('ran for')} used 4 node-hours speed"),
]


@pytest.mark.parametrize(("state", "changes", "shown"), WALLTIMES)
def test_how_long_a_run_waits_and_runs_and_whether_its_walltime_suffices(
    cli, queued, program, state, changes, shown
):
    """It runs since 2 h on 2 nodes, may for 12 h, and has made 4 steps of an hour each."""
    now = int(time.time())
    record = json.loads((queued / "record.json").read_text())
    record |= {"submitted_at": now - 3 * 3600, "nodes": 2, "steps": 10, **changes}
    (queued / "record.json").write_text(json.dumps(record))
    (queued / "logs/job.log").touch()
    if state != "PENDING":
        (queued / "starts/1/begun").touch()
        line = {"attempt": 1, "step": 4, "steps": record["steps"], "loss": 1, "step_time_s": 3600}
        (queued / "metrics.jsonl").write_text(json.dumps(line))
    start, end = now - 2 * 3600, now + (10 * 3600 if state == "RUNNING" else 0)
    times = "N/A|N/A" if state == "PENDING" else f"{start}|{end}"
    program("squeue", f"echo '12|{state}|tiny|{times}|n[1-2]|t|None'")
    text = " ".join(cli("status", "last").out.split())
    assert shown in text
    found = cli("status", "last", "--json").json
    assert found["after"] == changes.get("after", [])
    hours = [(found[key] or 0) / 3600 for key in ("waited_s", "run_s", "walltime_left_s")]
    expected = {"PENDING": (3, 0, 0), "RUNNING": (1, 2, 10), "FAILED": (1, 2, 0)}[state]
    assert [round(each, 1) for each in hours] == [*expected]


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
