"""Lines of metrics and the heartbeat, as one rank writes them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from pipectl.runs import RunDirectory, read_heartbeat, read_metrics
from pipectl.runtime.nodes import node_name
from pipectl.runtime.telemetry import StepReport, Telemetry


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "job", 0.0)


def report(step: int, **changed: Any) -> StepReport:
    fields = {
        "step": step,
        "loss": 2.0 / step,
        "learning_rate": 0.1,
        "gradient_norm": math.nan,
        "busy_s": 0.3,
        "step_time_s": 0.5,
        "samples": 8,
        "peak_bytes": 1 << 20,
    }
    return StepReport(**{**fields, **changed})


def telemetry(run: RunDirectory, attempt: int = 1) -> Telemetry:
    found = Telemetry(MPI.COMM_SELF.Dup(), run, steps=3, attempt=attempt, stages=(0, 1))
    found.state("training")
    return found


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_a_line_per_step(run: RunDirectory) -> None:
    writer = telemetry(run)
    for step in (1, 2):
        writer.report(report(step))
    writer.finish()
    first, second = (json.loads(line) for line in run.metrics.read_text().splitlines())
    assert first.pop("time") <= second["time"]
    assert first == {
        "attempt": 1,
        "step": 1,
        "steps": 3,
        "loss": 2.0,
        "step_time_s": 0.5,
        "samples_per_s": 16.0,
        "learning_rate": 0.1,
        "gradient_norm": None,
    }
    assert read_metrics(run)[1].loss == second["loss"] == 1.0


def test_a_step_is_written_once_every_rank_has_reported_it(run: RunDirectory) -> None:
    writer = telemetry(run)
    writer.report(report(1))
    writer._reports._count = 2  # another rank is behind
    writer.report(report(2))
    assert writer.has_written(1)
    assert not writer.has_written(2)
    assert [line.step for line in read_metrics(run)] == [1]


def test_an_evaluation_is_a_line_of_its_own(run: RunDirectory) -> None:
    writer = telemetry(run, attempt=2)
    writer.report(report(1))
    writer.evaluation(1, {"loss": 0.5, "accuracy": 0.9})
    writer.finish()
    line = read_metrics(run)[-1]
    assert line.evaluation == {"loss": 0.5, "accuracy": 0.9}
    assert (line.attempt, line.step) == (2, 1)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_diverged_run_still_writes_json(run: RunDirectory, value: float) -> None:
    writer = telemetry(run)
    writer.report(report(1, loss=value, gradient_norm=value))
    writer.evaluation(1, {"loss": value})
    writer.finish()
    lines = [strict(line) for line in run.metrics.read_text().splitlines()]
    assert lines[0]["loss"] is lines[0]["gradient_norm"] is None
    assert lines[1]["evaluation"] == {"loss": None}


def test_lines_are_added_to_those_of_an_earlier_attempt(run: RunDirectory) -> None:
    for attempt in (1, 2):
        writer = telemetry(run, attempt)
        writer.report(report(1))
        writer.finish()
    assert len(run.metrics.read_text().splitlines()) == 2
    assert [line.attempt for line in read_metrics(run)] == [2]


def test_the_heartbeat_says_who_does_what(run: RunDirectory) -> None:
    writer = telemetry(run)
    beat = read_heartbeat(run)
    assert beat is not None
    assert (beat.state, beat.step, beat.steps) == ("training", 0, 3)
    (rank,) = beat.ranks
    assert rank.stages == (0, 1)
    assert rank.pid == os.getpid()
    assert rank.busy_s is None
    writer.report(report(1))
    writer.finish()
    beat = strict(run.heartbeat.read_text())
    assert (beat["state"], beat["step"]) == ("done", 1)
    assert beat["ranks"][0]["busy_s"] == 0.3
    assert beat["ranks"][0]["peak_bytes"] == 1 << 20
    assert beat["ranks"][0]["rss_bytes"] > 1 << 20


def test_nodes_have_the_batch_systems_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert node_name() == "n7"
    monkeypatch.delenv("SLURMD_NODENAME")
    assert node_name()
