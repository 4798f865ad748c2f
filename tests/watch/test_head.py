"""What rank 0's watcher makes of messages, at times that the test tells."""

from __future__ import annotations

from typing import Any

import pytest

from pipectl.watch import watcher
from pipectl.watch.board import Sight
from pipectl.watch.head import LONGEST_S, MISSED, SETTLE_S, Death, Head, interval_s
from pipectl.watch.words import Names

NAMES = Names(["FORWARD", "RECEIVE_WAIT"], ["activation"])
COMPUTES = Sight(7, 0, 1, 4, step=5)
WAITS = Sight(7, 1, 0, 4, 1, 1, 0, step=5, waiting=True)


def beat(rank: int, sight: Sight, says: str = "beat", **more: Any) -> dict[str, Any]:
    fields = {"says": says, "rank": rank, "sight": list(sight), "stopped": False, "node": "n1"}
    return {**fields, **more}


def died(rank: int, at: float, **fields: Any) -> dict[str, Any]:
    return {**beat(rank, COMPUTES, "died"), **Death(rank, at, **fields)._asdict()}


@pytest.fixture
def head() -> Head:
    return Head(3, 30.0, 1.0, NAMES)


def verdict_of(head: Head, *deaths: dict[str, Any]) -> Any:
    for death in deaths:
        head.hears(death, 10.0)
    assert head.verdict(10.0) is None
    return head.verdict(10.0 + SETTLE_S)


def test_of_several_deaths_the_first_counts(head: Head) -> None:
    found = verdict_of(head, died(0, 100.3), died(2, 100.1), died(1, 100.2))
    assert found.rank == 2
    assert "was killed (SIGKILL, say)" in found.message
    assert head.is_over(10.0 + SETTLE_S)
    assert not head.is_over(10.0)


def test_the_kernel_knows_which_rank_of_a_node_ended_first(head: Head) -> None:
    late = died(1, 100.4, earlier=0)
    assert verdict_of(head, died(0, 100.1, earlier=1), died(2, 100.2, earlier=2), late).rank == 1


def test_no_order_is_known_between_nodes_but_the_time(head: Head) -> None:
    other = {**died(2, 100.2, earlier=0), "node": "n2"}
    assert verdict_of(head, died(0, 100.1, earlier=1), died(1, 100.3, earlier=0), other).rank == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"for_memory": True}, "killed by the kernel, for lack of memory"),
        ({"words": "Fatal Python error: Aborted\nThread 1"}, "crashed: Fatal Python error: Abort"),
        ({"words": "Fatal Python error: Aborted", "for_memory": True}, "crashed: Fatal Python"),
        ({"asked": True}, "was sent a signal to end"),
        ({"asked": True, "for_memory": True}, "was sent a signal to end"),
        ({"launcher": "the job script"}, "the job script that started it is gone"),
        ({"with_launcher": True}, "the launcher is gone, too"),
    ],
)
def test_what_is_said_of_a_death(head: Head, fields: dict[str, Any], words: str) -> None:
    found = verdict_of(head, died(1, 100.0, **fields), died(0, 101.0))
    assert words in found.message
    assert found.stack == fields.get("words", "")


def test_a_rank_that_is_silent_while_others_die_has_lost_its_node(head: Head) -> None:
    head.hears(beat(2, COMPUTES), 9.5)
    assert verdict_of(head, died(0, 100.0), died(1, 100.1)) is None
    assert head.verdict(10.0 + MISSED) is None
    found = head.verdict(10.1 + MISSED)
    assert found is not None
    assert (found.rank, "on n1 any more: the node is gone" in found.message) == (2, True)
    head.hears(beat(2, COMPUTES), 15.0)
    found = head.verdict(15.0)
    assert found is not None
    assert found.rank == 0


def test_of_very_many_ranks_a_lost_node_is_told_of_before_the_watcher_ends() -> None:
    head = Head(10_000, 30.0, 1.0, NAMES)
    head.hears(beat(2, COMPUTES), 9.5)
    head.hears(died(0, 100.0), 10.0)
    assert head.verdict(10.0 + LONGEST_S) is None
    found = head.verdict(10.0 + 12.0)
    assert found is not None
    assert found.rank == 2
    assert LONGEST_S < watcher._GRACE_S + watcher._LEAVE_S


def test_a_job_that_is_cancelled_has_no_culprit(head: Head) -> None:
    assert verdict_of(head, *(died(rank, 100.0, asked=True) for rank in range(3))) is None
    assert head.is_over(11.0)


def test_a_rank_that_explains_itself_is_left_to_it(head: Head) -> None:
    assert verdict_of(head, died(0, 100.0), beat(1, COMPUTES, "failing")) is None
    assert head.is_over(10.0)


def test_a_frozen_rank_is_named_before_its_time_is_over(head: Head) -> None:
    for now in range(40):
        head.hears(beat(0, WAITS), now)
        head.hears(beat(1, COMPUTES, stopped=now >= 5), now)
        found = head.verdict(now)
        if found is not None:
            break
    assert found is not None
    assert found.rank == 1
    assert 25 <= now - 5 <= 30
    assert head.sight(1) == COMPUTES
    assert head.node(1) == "n1"


def test_a_rank_that_goes_on_in_time_is_not(head: Head) -> None:
    for now in range(60):
        moves = COMPUTES._replace(moves=now if now > 24 else 5)
        head.hears(beat(0, WAITS), now)
        head.hears(beat(1, moves, stopped=5 <= now < 24), now)
        assert head.verdict(now) is None


def test_ranks_that_have_ended_are_not_missed(head: Head) -> None:
    head.hears(beat(0, WAITS), 0)
    head.hears(beat(1, COMPUTES, "bye"), 0)
    assert head.has_ended(1)
    head.hears(beat(0, WAITS), 50)
    assert head.verdict(50) is None


def test_many_ranks_tell_more_rarely() -> None:
    assert interval_s(4) == interval_s(1000) == 1
    assert interval_s(10_000) == 10


def test_long_steps_give_more_time(head: Head) -> None:
    head.hears(beat(0, COMPUTES._replace(pace_s=20.0)), 0)
    assert head.limit_s == 60


def test_a_warning_comes_once_and_then_rarely(head: Head) -> None:
    warned = []
    for now in range(130):
        head.hears(beat(0, WAITS), now)
        head.hears(beat(1, COMPUTES), now)
        if words := head.warning(now):
            warned.append(now)
            assert words.endswith("from rank 1, which is in forward 4")
    assert warned == [30, 60, 120]
