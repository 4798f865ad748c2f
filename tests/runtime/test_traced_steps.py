"""What ranks record of their steps, on a common clock."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipectl.plan import Plan
from pipectl.runs import RunDirectory, measured_steps
from pipectl.runtime import clock
from pipectl.runtime.tracing import Recording, timeline_of
from pipectl.schedule import Action, Actions, Kind, lower
from pipectl.schedule.actions import EVENT_NAMES
from pipectl.timeline import Event, Timeline

HERE = Path(__file__).parent
ROWS = Actions.of([Action(Kind.FORWARD, 0, 0), Action(Kind.SEND_START, 0, 0, 3)])
ENDING = Actions.of([Action(Kind.UPDATE, -1)])


def test_rows_are_recorded_in_the_order_of_their_programs() -> None:
    recording = Recording()
    assert recording.table().shape == (0, 6)
    recording.expect(ROWS.rows)
    recording.add(1.0, 2.0)
    recording.add(2.0, 2.5)
    recording.expect(ENDING.rows)
    assert recording.table().tolist() == [
        [1.0, 2.0, Kind.FORWARD, 0, 0, -1],
        [2.0, 2.5, Kind.SEND_START, 0, 0, 3],
    ]
    recording.met()
    recording.add(2.5, 1e9)
    *_, wait, update = recording.table().tolist()
    assert [wait[0], update[1]] == [2.5, 1e9]
    assert 2.5 < wait[1] == update[0] < 1e9
    assert [EVENT_NAMES[int(row[2])] for row in (wait, update)] == ["update_wait", "update"]


def test_a_step_starts_when_its_first_rank_begins_it() -> None:
    def table(begin_s: float, error_s: float) -> Any:
        rows = [[7, begin_s, error_s, 0, 0, 0], [begin_s + 1, begin_s + 2, Kind.BACKWARD, 1, 4, -1]]
        return np.array(rows, dtype=float)

    found = timeline_of({2: table(50.5, 1e-3), 0: table(50.0, 0.0)}, 3)
    assert found == Timeline(
        (Event(0, 1.0, 2.0, "backward", 1, 4), Event(2, 1.5, 2.5, "backward", 1, 4)), 3, 7, 1e-3
    )


@pytest.mark.mpi
def test_two_ranks_whose_clocks_differ(make_run, launch) -> None:
    """Steps 2 to 4 are recorded; whatever one rank sends, the other has only later."""
    run: RunDirectory = make_run(2, trace={"steps": [3], "every": 2})
    done = launch(2, HERE / "changed_ranks.py", "ahead", run.path, fresh=True)
    assert done.returncode == 0, done.stderr
    assert measured_steps(run) == [2, 3, 4]
    plan = Plan.load(run.plan)
    for step in (2, 3, 4):
        timeline = Timeline.load(run.measured_of(step))
        assert (timeline.step, timeline.ranks) == (step, 2)
        assert 0 < timeline.clock_error_s < 1
        assert timeline.end_s < 100
        check_rows(plan, timeline)
        check_messages(timeline, timeline.clock_error_s + 1e-9)


def check_rows(plan: Plan, timeline: Timeline) -> None:
    """Every row of the programs is there once, one behind the other."""
    for rank in range(plan.ranks):
        events = list(timeline.of_rank(rank))
        names = [event.kind for event in events]
        rows = [(row.kind.name.lower(), *row[1:4]) for row in lower(plan, rank)]
        assert names.count("update_wait") == 1
        assert [tuple(e[3:]) for e in events if e.kind != "update_wait"] == rows
        assert all(one.end_s <= other.start_s for one, other in pairwise(events))
        assert all(event.start_s <= event.end_s for event in events)


def check_messages(timeline: Timeline, error_s: float) -> None:
    sent = {(e.channel, e.micro_batch): e for e in timeline.events if e.kind == "send_start"}
    had = {(e.channel, e.micro_batch): e for e in timeline.events if e.kind == "receive_wait"}
    assert len(sent) == len(had) == 4
    for key, event in sent.items():
        assert had[key].rank != event.rank
        assert event.start_s <= had[key].end_s + error_s


@pytest.mark.mpi
def test_steps_that_overlap_are_recorded_from_their_start(make_run, train) -> None:
    run = make_run(
        2,
        training={"steps": 8, "batch_size": 4},
        pipeline={"schedule": "pipedream-2bw", "micro_batches": 2, "stages": 2},
    )
    train(run)
    assert measured_steps(run) == [1]
    timeline = Timeline.load(run.measured_of(1))
    kinds = Counter(event.kind for event in timeline.of_rank(0))
    assert kinds["update"] >= 4
    assert kinds["forward"] >= 2 * kinds["update"]


@pytest.mark.parametrize("what", ["_BOOT", "_NAMESPACE"])
def test_machines_and_namespaces_of_clocks_are_told_apart(monkeypatch, tmp_path, what):
    for name in ("_BOOT", "_NAMESPACE"):
        (tmp_path / name).symlink_to(__file__)
        monkeypatch.setattr(clock, name, tmp_path / name)
    here = clock._machine()
    assert clock._machine() == here
    (tmp_path / "other").write_text("other")
    (tmp_path / what).unlink()
    (tmp_path / what).symlink_to(tmp_path / "other")
    assert clock._machine() != here


AGREEING = """
from mpi4py import MPI
from pipectl.runtime.clock import CommonClock, agree
assert agree(MPI.COMM_WORLD.Dup()) == CommonClock(0.0, 0.0)
"""


@pytest.mark.mpi
def test_ranks_of_one_machine_read_the_same_clock(launch, tmp_path):
    script = tmp_path / "agreeing.py"
    script.write_text(AGREEING)
    done = launch(2, script)
    assert done.returncode == 0, done.stderr
