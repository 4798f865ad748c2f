"""Figures of a run with very many lines, of which most are not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipectl.runs import RunDirectory, read_metrics
from pipectl.runs.readers import sum_up

STEPS = 20_000


def line(step: int, attempt: int = 1, **more: object) -> str:
    fields = {
        "attempt": attempt,
        "step": step,
        "steps": STEPS,
        "loss": 3 / step,
        "step_time_s": 0.5,
    }
    return json.dumps({**fields, "samples_per_s": 16.0, "time": 1.7e9 + step, **more})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "demo", 1.7e9)


def test_they_are_those_of_all_lines(run: RunDirectory) -> None:
    lines = []
    for step in range(1, STEPS + 1):
        lines.append(line(step))
        if step % 100 == 0:
            lines.append(json.dumps({"attempt": 1, "step": step, "evaluation": {"loss": 1 / step}}))
        if step in (7, 9_000, 9_001, STEPS - 1):
            fault = {"loss_of_micro_batch": step % 3}
            lines.append(json.dumps({"attempt": 1, "step": step, "not_finite": fault}))
    run.metrics.write_text("\n".join(lines) + "\n")
    found, every = read_metrics(run, whole=False), read_metrics(run)
    assert len(found) < len(every) / 5
    assert sum_up(found) == sum_up(every)
    assert sum_up(found).not_finite == (7, 9_000, 9_001, STEPS - 1)


def test_an_attempt_that_did_steps_again_wins(run: RunDirectory) -> None:
    first = [line(step) for step in range(1, STEPS + 1)]
    second = [line(step, 2, loss=7.0) for step in range(STEPS - 10_000, STEPS - 100)]
    run.metrics.write_text("\n".join([*first, *second]) + "\n")
    found = sum_up(read_metrics(run, whole=False))
    assert (found.step, found.last_loss, found.first_loss) == (STEPS - 101, 7.0, 3.0)


@pytest.mark.parametrize("size", [1 << 13, 1 << 14])
def test_faults_that_a_later_attempt_trained_past_are_over(run: RunDirectory, size: int) -> None:
    """Also where a border cuts the line with which it begins, 50 bytes before ``size``."""
    fault = {"attempt": 1, "step": 800, "not_finite": {"loss_of_micro_batch": 2}}
    first = [*map(line, range(1, size // 150)), json.dumps({**fault, "pad": ""})]
    pad = "x" * (size - 50 - sum(map(len, first)) - len(first))
    first[-1] = json.dumps({**fault, "pad": pad})
    second = [line(step, 2) for step in range(701, 8000)]
    run.metrics.write_text("\n".join([*first, *second]) + "\n")
    some, every = read_metrics(run, whole=False), read_metrics(run)
    assert sum_up(some).not_finite == sum_up(every).not_finite == ()


def test_short_files_are_read_whole(run: RunDirectory) -> None:
    assert read_metrics(run, whole=False) == []
    run.metrics.write_text("\n".join(line(step) for step in range(1, 50)) + '\n{"torn')
    assert read_metrics(run, whole=False) == read_metrics(run) != []


@pytest.mark.parametrize("size", [1 << 13, (1 << 13) + 1, 1 << 14, (1 << 14) + 1, (1 << 14) + 999])
def test_lines_that_the_borders_cut(run: RunDirectory, size: int) -> None:
    text = ("\n".join(line(step) for step in range(1, STEPS)) + "\n")[:size]
    run.metrics.write_text(text)
    kept = {(each["step"], each["loss"]) for each in read_metrics(run, whole=False)}
    assert kept <= {(each["step"], each["loss"]) for each in read_metrics(run)}
    assert len(kept) > 40
