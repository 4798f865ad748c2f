"""What is kept of runs: `status` with it says what it says without, whatever happened since."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipectl.batch import JobState, JobStatus
from pipectl.cli.status_json import status_json
from pipectl.files import write_json, write_text
from pipectl.jobs.kept_readings import KeptReadings
from pipectl.jobs.status import Answer, statuses
from pipectl.runs import Record, RunDirectory, list_runs

LONG_AGO = 1_700_000_000
NOW = LONG_AGO + 3600
RANKS = [{"rank": 0, "peak_bytes": 10, "waiting": 0.5}, {"rank": 1, "peak_bytes": 20}]


def heartbeat(run: RunDirectory, step: int, attempt: int = 1) -> None:
    document = {"time": 1.0, "attempt": attempt, "state": "training", "step": step, "steps": 9}
    write_json(run.heartbeat, {**document, "ranks": RANKS})


def step_line(step: int, loss: float) -> str:
    line = {"attempt": 1, "step": step, "steps": 9, "loss": loss, "step_time_s": 0.1 * step}
    return json.dumps(line) + "\n"


def make_run(base: Path, name: str) -> RunDirectory:
    run = RunDirectory.create(base, name, LONG_AGO)
    record = Record(name, "slurm", f"{name} x", LONG_AGO, ranks=2, nodes=1, steps=9)
    record.after(LONG_AGO, "submitted", job_id="41").save(run.record)
    run.metrics.write_text(step_line(1, 3.5) + step_line(2, 2.5))
    heartbeat(run, 2)
    write_text(run.exit_code, "0\n")
    return run


def age(run: RunDirectory) -> None:
    for path in (*run.path.iterdir(), run.path):
        os.utime(path, (LONG_AGO, LONG_AGO))


def unlisted(_records: object) -> dict[str, Answer]:
    return {}


def shown(base: Path, *, keep: bool, ask: Callable = unlisted) -> list[str]:
    kept = KeptReadings(base) if keep else None
    runs = list_runs(base)
    found = statuses(runs, NOW, ask, kept)
    if kept is not None:
        kept.save()
    return [json.dumps(status_json(status), sort_keys=True) for status in found]


def entries(base: Path) -> dict[str, object]:
    text = (base / ".cache" / "readings.cache").read_text().partition("\n")[2]
    found: dict[str, object] = json.loads(text)
    return found


@pytest.fixture
def base(tmp_path: Path, pipeline: Callable) -> Path:
    """Four old runs: with a plan, failed, without anything, with damage."""
    runs = [make_run(tmp_path, name) for name in ("good", "failed", "bare", "damaged")]
    pipeline(2, 4).save(runs[0].plan)
    write_text(runs[1].exit_code, "1\n")
    write_json(runs[1].error_of(1), {"rank": 1, "type": "ValueError", "message": "no"})
    for path in (runs[2].metrics, runs[2].heartbeat, runs[2].exit_code):
        path.unlink()
    runs[3].heartbeat.write_text("{")
    for run in runs:
        age(run)
    return tmp_path


def test_it_is_the_same_with_and_without(base: Path) -> None:
    plainly = shown(base, keep=False)
    assert shown(base, keep=True) == plainly
    assert len(entries(base)) == 4
    assert shown(base, keep=True) == plainly


def test_what_is_kept_is_not_read_again(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shown(base, keep=True)
    for name in ("read", "recovered"):
        monkeypatch.setattr(f"pipectl.jobs.status.{name}", lambda *_: pytest.fail("was read"))
    assert shown(base, keep=True) == before


def change_exit_code(run: RunDirectory) -> None:
    write_text(run.exit_code, "3\n")


def remove_exit_code(run: RunDirectory) -> None:
    run.exit_code.unlink()


def add_a_step(run: RunDirectory) -> None:
    with run.metrics.open("a") as stream:
        stream.write(step_line(3, 1.5))


def beat(run: RunDirectory) -> None:
    heartbeat(run, 7, attempt=2)


def remove_the_plan(run: RunDirectory) -> None:
    run.plan.unlink()


def report_an_error(run: RunDirectory) -> None:
    write_json(run.error_of(0), {"rank": 0, "type": "OSError", "message": "disk"})


def cancel(run: RunDirectory) -> None:
    Record.load(run.record).after(LONG_AGO, "cancelled").save(run.record)


def submit_again(run: RunDirectory) -> None:
    write_text(run.resubmitted, "42\n")


@pytest.mark.parametrize("aged", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        change_exit_code, remove_exit_code, add_a_step, beat, remove_the_plan, report_an_error,
        cancel, submit_again,
    ],
)  # fmt: skip
def test_every_change_is_seen(
    base: Path, change: Callable[[RunDirectory], None], aged: bool
) -> None:
    """Also one that gives a file its old time back."""
    before = shown(base, keep=True)
    run = list_runs(base)[-1]
    assert run.name.endswith("good")
    change(run)
    if aged:
        age(run)
    after = shown(base, keep=True)
    assert after != before
    assert after == shown(base, keep=False)


def test_what_the_batch_system_says_comes_first(base: Path) -> None:
    shown(base, keep=True)

    def ask(_records: object) -> dict[str, Answer]:
        return {"slurm": Answer({"41": JobStatus(JobState.QUEUED, reason="requeued")})}

    assert all('"QUEUED"' in text for text in shown(base, keep=True, ask=ask))


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.RUNNING])
def test_while_the_next_start_waits_nothing_is_going_on(base: Path, state: JobState) -> None:
    answers = {"slurm": Answer({"41": JobStatus(state)})}
    for kept in (None, KeptReadings(base)):
        run = list_runs(base)[-1]
        (found,) = statuses([run], NOW, lambda _: answers, kept)
        going = state is JobState.RUNNING
        assert found.phase == ("training" if going else "")
        assert (found.measured.remaining_s is not None) == going
        assert found.measured.step == 2


def test_what_may_still_change_is_not_kept(base: Path) -> None:
    run = make_run(base, "young")
    shown(base, keep=True)
    assert run.name not in entries(base)


def test_runs_that_are_gone_are_forgotten(base: Path) -> None:
    shown(base, keep=True)
    gone = list_runs(base)[0]
    gone.path.rename(base / "elsewhere")
    age(make_run(base, "new"))
    shown(base, keep=True)
    assert gone.name not in entries(base)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("2.5", "9.5"),
        lambda text: text.replace("readings 1", "readings 0"),
        lambda _: "",
        lambda _: "[" * 100_000,
        lambda _: "null",
    ],
)
def test_a_damaged_file_is_as_good_as_none(base: Path, damage: Callable[[str], str]) -> None:
    shown(base, keep=True)
    path = base / ".cache" / "readings.cache"
    path.write_text(damage(path.read_text()))
    assert shown(base, keep=True) == shown(base, keep=False)
    assert len(entries(base)) == 4, "it is made anew"


def test_where_nothing_can_be_written_it_goes_without(base: Path) -> None:
    (base / ".cache").write_text("in the way")
    assert shown(base, keep=True) == shown(base, keep=False)
