"""What ranks record of their steps, on a common clock."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from pipectl.plan import Plan
from pipectl.runs import RunDirectory, measured_steps
from pipectl.runtime import clock
from pipectl.schedule import lower
from pipectl.timeline import Timeline


@pytest.mark.mpi
def test_two_ranks_whose_clocks_differ_record_every_row_in_one_time(make_run, launch) -> None:
    """Steps 2 to 4 are recorded; whatever one rank sends, the other has only later."""
    run: RunDirectory = make_run(2, trace={"steps": [3], "every": 2})
    program = Path(__file__).with_name("changed_ranks.py")
    done = launch(2, program, "ahead", run.path, fresh=True)
    assert done.returncode == 0, done.stderr
    assert measured_steps(run) == [2, 3, 4]
    plan = Plan.load(run.plan)
    for step in (2, 3, 4):
        timeline = Timeline.load(run.measured_of(step))
        assert (timeline.step, timeline.ranks) == (step, 2)
        assert 0 < timeline.clock_error_s < 1
        assert 0 <= min(event.start_s for event in timeline.events) < 0.1
        assert timeline.end_s < 100
        for rank in range(plan.ranks):
            check_rows(plan, timeline, rank)
        check_messages(timeline, timeline.clock_error_s + 1e-9)


def check_rows(plan: Plan, timeline: Timeline, rank: int) -> None:
    """Every row of its program is there once, one behind the other; the update waits for all."""
    events = list(timeline.of_rank(rank))
    names = [event.kind for event in events]
    rows = [(row.kind.name.lower(), *row[1:4]) for row in lower(plan, rank)]
    assert names.count("update_wait") == 1
    assert names[names.index("update_wait") + 1] == "update"
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
    assert timeline.clock_error_s == 0  # two ranks of one machine read the same clock


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
