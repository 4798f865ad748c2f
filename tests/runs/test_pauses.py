"""What complete runs of a job took in addition to their steps."""

import json
import os

import pytest

from pipectl.runs import Pauses, Record, RunDirectory, read_pauses

BEGAN, STEP = 1_700_000_000.0, 0.5


def write_run(base, run_name, steps=40, *, code="0", attempt=1, **record):
    """8 s until the first step, an evaluation of 2 s after every tenth step, 3 s at the end."""
    run = RunDirectory(base / run_name)
    run.start.path.mkdir(parents=True)
    fields = {"name": "tiny", "scheduler": "slurm", "ranks": 1, "nodes": 1, "steps": steps}
    Record(**{**fields, "tag": "t", "submitted_at": BEGAN, **record}).save(run.record)
    lines = []
    for step in range(1, steps + 1):
        time = BEGAN + 8.0 + step * STEP + 2.0 * ((step - 1) // 10)
        line = {"attempt": attempt, "step": step, "steps": steps, "loss": 1.0}
        lines.append(json.dumps({**line, "step_time_s": STEP, "time": time}))
    run.metrics.write_text("".join(f"{line}\n" for line in lines))
    run.start.begun.touch()
    run.start.exit_code.write_text(f"{code}\n")
    os.utime(run.start.begun, (BEGAN, BEGAN))
    os.utime(run.start.exit_code, (time + 3.0, time + 3.0))
    return run


def test_the_latest_run_of_one_start_tells(tmp_path, monkeypatch):
    assert read_pauses(tmp_path, "tiny") == Pauses()
    run = write_run(tmp_path, "20250101-120000-tiny")
    write_run(tmp_path, "20250102-120000-tiny", code="1")
    write_run(tmp_path, "20250103-120000-tiny", attempt=2)
    write_run(tmp_path, "20250104-120000-tiny", 8)
    write_run(tmp_path, "20250105-120000-other", name="other")
    write_run(tmp_path, "20250106-120000-tiny", kind="rehearsal")
    write_run(tmp_path, "20250107-120000-tiny").record.write_text("{")
    write_run(tmp_path, "20250108-120000-tiny").start.exit_code.unlink()
    found = read_pauses(tmp_path, "tiny")
    assert found.run == run.path.name
    assert found.start_s == pytest.approx(8.0)
    assert found.step_s == pytest.approx(3 * 2.0 / 36)
    assert found.end_s == pytest.approx(3.0)
    monkeypatch.setattr("pipectl.runs.pauses.is_of_another", lambda path: path == run.path)
    assert read_pauses(tmp_path, "tiny") == Pauses()
