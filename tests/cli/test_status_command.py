"""`pipectl status`: one run, a table of many, a watched view, and what fails."""

import io
import json
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
from pipectl.cli.views.run import (
    bar,
    format_long_time,
    run_lines,
    sparkline,
)
from pipectl.cli.views.run_json import run_json
from pipectl.errors import UsageError
from pipectl.jobs.state import RunStatus
from pipectl.plan import Prediction
from pipectl.runs import Record, RunDirectory, SweepDirectory
from pipectl.runs.readers import Measured, RankBeat

GIB = 1 << 30
KEYS = ("waits_for", "peaks")
LISTED = "echo '12|{}|1|N/A|N/A|n1||None'"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
RANKS = [
    {"rank": rank, "node": f"n{rank}", "stages": [rank], "waiting": 0.25 * rank, "busy_s": 0.5,
     "rss_bytes": 1 << 29, "peak_bytes": 1 << 30}
    for rank in range(3)
]  # fmt: skip


def heartbeat(run: Path, **more: object) -> None:
    beat = {"version": 1, "time": 1.7e9, "attempt": 3, "state": "training", "step": 4, "steps": 10}
    (run / "heartbeat.json").write_text(json.dumps({**beat, "ranks": RANKS, **more}))


def test_no_runs_at_all(cli):
    result = cli("status")
    assert (result.code, result.err) == (0, "")
    assert result.out == "runs: no runs yet; start one with: pipectl submit JOB.yaml\n"


def test_one_run_and_a_table_of_all(cli, finished, failed, run_of, golden):
    run_of("20250103-120000-tiny")
    for name in ("step-000900", "step-001000", ".step-002000.partial"):
        (finished / "checkpoints" / name).mkdir()
    sent = {"route": "in place", "progress": "none", "why": "a single rank"}
    heartbeat(failed, messages=sent)
    shown = [cli("status", *words) for words in ((finished.name,), (failed.name, "--ranks"), ())]
    assert {(result.code, result.err) for result in shown} == {(0, "")}
    golden(*(result.out for result in shown))
    cut = cli("status", "--limit", "1")
    assert "20250101" not in cut.out
    assert cut.err == "2 older runs are not shown; see --limit\n"


def test_the_table_in_several_widths(
    cli, finished, failed, queued, run_of, program, monkeypatch, golden
):
    """A narrow one leaves columns out and cuts names alone; no text is markup."""
    run_of(f"20250104-120000-{'n' * 60}", scheduler="[red]x")
    heartbeat(failed)
    start = time.mktime((2026, 11, 23, 14, 30, 0, 0, 0, -1))
    program("squeue", f"echo '12|PENDING|1|{start:.0f}|N/A||t|Priority'")
    program("sacct", "exit 1")
    texts = []
    two = (finished.name, failed.name)
    for width, names in ((55, two), (66, two), (100, two), (60, ()), (200, ())):
        monkeypatch.setenv("COLUMNS", str(width))
        texts.append(cli("status", *names).out)
        assert max(map(len, texts[-1].splitlines())) <= width
    golden(*texts)


def test_several_runs_in_a_table(cli, finished, failed, run_of):
    run_of("20250103-120000-tiny", scheduler="slurm", job_id="4711")
    names = ("4711", finished.name, finished.name)
    found = [line.split()[0] for line in cli("status", *names).out.splitlines()]
    assert found == ["run", "20250103-120000-tiny", finished.name]
    assert [one["run"] for one in cli("status", *names, "--json").json] == found[1:]
    assert cli("status", "no-such-run", finished.name).code == 6


def test_json_holds_the_same_and_every_key_of_a_rank_before_its_first_step(cli, finished, failed):
    one = cli("status", finished.name, "--json").json
    assert one["state"] == "COMPLETED"
    assert (one["step"], one["steps"], one["first_loss"], one["last_loss"]) == (10, 10, 3.0, 0.3)
    assert (one["step_time_s"], one["samples_per_s"], one["restarts"]) == (0.5, 16.0, 0)
    assert (one["evaluation_step"], one["evaluation"]) == (10, {"loss": 0.25})
    assert cli("status", "--json").json[0] == one
    heartbeat(failed, ranks=[*RANKS, {"rank": 3, "node": "n3", "stages": []}])
    ranks = cli("status", failed.name, "--json").json["ranks"]
    assert ranks[0] == {**RANKS[0], "host": "", "pid": None}
    unknown = dict.fromkeys(ranks[0])
    assert ranks[3] == {**unknown, "rank": 3, "host": "", "node": "n3", "stages": []}


def test_metrics_that_are_not_finite_are_said_to_be(cli, finished):
    values = {"loss": None, "perplexity": 2.5}
    first = cli("status", "last", "--json").json["first_loss"]
    with (finished / "metrics.jsonl").open("a") as stream:
        for evaluation in (values, None):  # a line without figures changes nothing
            line = {"attempt": 1, "step": 10, "time": 0, "evaluation": evaluation}
            stream.write(json.dumps(line) + "\n")
    result = cli("status", "last")
    assert (result.code, result.err) == (0, "")
    assert "after step 10: loss not finite, perplexity 2.5" in result.out
    answer = cli("status", "last", "--json").json
    assert (answer["evaluation"], answer["first_loss"]) == (values, first)


def test_a_failure_of_the_preparation_comes_first_and_an_update_names_no_stage(cli, failed):
    place = failed / "errors" / "rank-0001.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "stage": -1, "action": "UPDATE"}))
    _, second, *_ = cli("status", "20250102").out.splitlines()
    assert second == "  error         rank 1 on n1, UPDATE, step 5 (and 1 more rank)"
    report = {"rank": None, "host": "n1", "type": "CaptureError", "message": "no", "cure": "do"}
    (failed / "errors/prepare.json").write_text(json.dumps(report))
    out = cli("status", "last").out
    assert "  error         preparation on n1 (and 2 more ranks)\n" in out
    assert "                CaptureError: no\n                do\n" in out


def test_long_lines_are_indented_on_a_terminal_and_paths_are_whole(
    cli, finished, place, monkeypatch
):
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
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    out = cli("status", "last", "--directory", str(finished.parent)).out
    assert out.splitlines()[-1] == f"  directory     {finished}"


def test_a_damaged_record_is_an_unknown_state(cli, finished):
    (finished / "record.json").write_text('{"version": 1, "na')
    result = cli("status", "last")
    assert result.code == 6
    assert "UNKNOWN" in result.out
    assert "record.json:1:16: not valid JSON" in " ".join(result.out.split())
    assert "UNKNOWN" in cli("status").out


def test_damaged_files_do_not_hide_the_state(cli, finished, failed):
    for name in ("plan.json", "heartbeat.json", "errors/rank-0000.json"):
        (finished / name).write_text("{")
    result = cli("status", finished.name)
    assert (result.code, "COMPLETED" in result.out) == (0, True)
    ranks = [{"rank": 0, "peak_bytes": None, "stages": 5}, {"rank": 1, "stages": None}]
    (failed / "heartbeat.json").write_text(json.dumps({"time": 1.0, "ranks": ranks}))
    (failed / "errors/prepare.json").write_text('{"type": "E", "message": 3, "cure": 5}')
    for more in ((), ("--ranks",), ("--json",)):
        result = cli("status", "last", *more)
        assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"job_id": f"1.1@not-{socket.gethostname()}"}, "UNKNOWN"),
        ({"scheduler": "slurm", "job_id": "12"}, "squeue: No such file or directory"),
    ],
)
def test_a_run_that_nobody_can_be_asked_about_is_not_guessed(cli, run_of, record, words):
    run_of("20250103-120000-tiny", **record)
    result = cli("status", "last")
    assert (result.code, words in result.out) == (6, True)


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


def test_a_run_that_does_not_move_on_says_who_waits_for_whom(cli, queued, program):
    program("squeue", LISTED.format("RUNNING"))
    words = "no rank has moved on for 30 s: rank 0 waits for the other ranks\x1b[2J"
    report = {"version": 1, "node": "n1", "ends": False, "stalled": words}
    (queued / "watch/7").mkdir(parents=True)
    file = queued / "watch/7/node-0000.json"
    file.write_text(json.dumps({**report, "ranks": []}))
    shown = words.replace("\x1b", "")
    assert f"  stalled       {shown}\n" in cli("status", "last").out
    assert cli("status", "last", "--json").json["stalled"] == shown
    for damaged in ("{", json.dumps({**report, "stalled": 5, "ranks": []}), "[]"):
        file.write_text(damaged)
        result = cli("status", "last")
        assert (result.code, "stalled" in result.out) == (0, False)


@pytest.mark.parametrize(
    ("file", "content", "state", "code"),
    [
        ("exit_code", "0", "COMPLETED", 0),
        ("exit_code", "9", "FAILED", 0),
        ("heartbeat.json", "", "RUNNING", 0),
        ("none", "", "UNKNOWN", 6),
    ],
)
def test_what_is_known_while_the_controller_of_the_scheduler_is_down(
    cli, queued, program, file, content, state, code
):
    for name in ("squeue", "sacct", "scontrol"):
        program(name, f"echo '{DOWN}' >&2; exit 1")
    beat = {"version": 1, "time": time.time(), "state": "training", "step": 4, "steps": 10}
    (queued / file).write_text(content or json.dumps(beat))
    error = {"rank": 1, "stage": 1, "step": 5, "action": "FORWARD micro-batch 0", "message": "lost"}
    if state == "FAILED":
        (queued / "errors" / "rank-0001.json").write_text(json.dumps(error))
    result = cli("status", "last")
    assert result.code == code
    assert state in result.out
    if state == "FAILED":
        assert "rank 1, stage 1, FORWARD micro-batch 0, step 5" in result.out
    if state in ("RUNNING", "UNKNOWN"):
        assert f"the scheduler could not be asked: squeue: {DOWN}" in " ".join(result.out.split())


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
        plan = pipeline(2, 4)
        stages = [replace(stage, cost=replace(stage.cost, flops=10**8)) for stage in plan.stages]
        if step_s is not None:
            prediction = Prediction(1.0, 0.0, (1.0, 1.0), (GIB, 3 * GIB), 4e9)
            plan = replace(plan, prediction=prediction)
        ranks = [RankBeat(rank, peak_bytes=peak) for rank, peak in enumerate((GIB, 2 * GIB))]
        return status_of(
            tmp_path,
            [*ranks, RankBeat(99)],
            plan=replace(plan, stages=tuple(stages)),
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
