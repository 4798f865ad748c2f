from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipectl.cluster import Cluster, Device, Node
from pipectl.jobs.planning import write_plan
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.runs import RunDirectory
from pipectl.simulate import simulate
from pipectl.timeline import Timeline

if TYPE_CHECKING:
    from conftest import Command

FREE = Link(0.0, 1e15)


@pytest.fixture
def run(place: Path, pipeline: Callable[..., Plan]) -> RunDirectory:
    """Steps 5 and 10 are recorded; in step 10, stage 1 took twice its time."""
    found = RunDirectory.create(place / "runs", "gpt", 0.0)
    plan, cluster = pipeline(2, 4), Cluster("c", "t", (Node("n", 2, 2, Device("cpu")),), FREE, FREE)
    write_plan(found, plan, cluster)
    timeline = simulate(plan, cluster).timeline
    Timeline(timeline.events, 2, 5).save(found.measured_of(5))
    slower = [
        event._replace(end_s=2 * event.end_s - event.start_s) if event.stage == 1 else event
        for event in timeline.events
        if event.rank == 1 or event.micro_batch != 3
    ]
    Timeline(tuple(slower), 2, 10, 2e-5).save(found.measured_of(10))
    return found


def test_the_last_recorded_step_is_compared(cli: Command, run: RunDirectory) -> None:
    result = cli("trace", "last")
    assert result.code == 0
    head, sentence, *table = result.out.splitlines()
    assert head.startswith(f"{run.name}, step 10: ")
    assert sentence.startswith("backward of stage 1 takes 2.00 times what was predicted, 8.00 s a")
    rows = [line.split() for line in table]
    assert ["1", "1", "backward", "4", "2.00", "s", "4.00", "s", "2.00"] in rows
    assert ["0", "0", "forward", "3", "1.00", "s", "1.00", "s", "1.00"] in rows
    assert "right to 20.0 us" in result.err
    assert "2 actions have no counterpart" in result.err
    assert "2 steps are recorded" in result.err


def test_another_step_for_programs(cli: Command, run: RunDirectory) -> None:
    answer = json.loads(cli("trace", run.name, "--step", "5", "--json").out)
    assert (answer["run"], answer["steps"], answer["step"]) == (run.name, [5, 10], 5)
    assert answer["ratio"] == pytest.approx(1.0)
    assert {part["ratio"] for part in answer["parts"] if part["kind"] != "update"} == {1.0}


def test_a_trace_shows_both(cli: Command, run: RunDirectory) -> None:
    result = cli("trace", "gpt", "--perfetto", "out/step.json")
    assert "out/step.json" in result.err
    entries = json.loads(Path("out/step.json").read_text())["traceEvents"]
    named = [entry["args"]["name"] for entry in entries if entry["name"] == "process_name"]
    assert named == ["predicted, node 0", "measured, node 0"]


def test_a_picture_shows_both(cli: Command, run: RunDirectory) -> None:
    assert cli("trace", "gpt", "--svg", "out/step.svg").code == 0
    picture = Path("out/step.svg").read_text()
    assert picture.startswith("<svg ")
    for words in (f"{run.name}, step 10: ", "2 stages on 2 ranks", "predicted: ", "measured, step"):
        assert words in picture


def test_a_step_of_an_earlier_plan_is_not_compared(
    cli: Command, run: RunDirectory, pipeline: Callable[..., Plan]
) -> None:
    cluster = Cluster("c", "t", (Node("n", 4, 4, Device("cpu")),), FREE, FREE)
    events = simulate(pipeline(4, 4), cluster).timeline.events
    Timeline(events, 4, 12).save(run.measured_of(12))
    result = cli("trace", "last", "--perfetto", "step.json")
    assert result.code == 2
    assert "step 12 was recorded on 4 ranks, and the plan has 2" in result.err
    assert not Path("step.json").exists()
    assert cli("report").code == 0
    assert "measured, step" not in (run.path / "report.html").read_text()
    assert cli("trace", "last", "--step", "10").code == 0


def test_what_is_not_there_is_said(cli: Command, run: RunDirectory) -> None:
    result = cli("trace", "last", "--step", "7")
    assert result.code == 2
    assert "step 7 is not recorded" in result.err
    assert "steps that are: 5, 10" in result.err
    damaged = {"version": 1, "ranks": 2, "columns": ["rank"], "events": [[0]]}
    run.measured_of(10).write_text(json.dumps(damaged))
    result = cli("trace")
    assert result.code == 3
    assert "step-000010.json: events: do not fit the columns" in result.err
    for path in run.trace.glob("step-*"):
        path.unlink()
    result = cli("trace")
    assert result.code == 2
    assert "no step is recorded yet" in result.err
