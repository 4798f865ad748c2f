"""What the first node's watcher makes of what nodes say, at times that the test tells."""

from __future__ import annotations

from typing import Any

import pytest

from pipectl.watch import watcher
from pipectl.watch.board import Sight
from pipectl.watch.files import NodeReport, RankReport
from pipectl.watch.judge import MAX_WAIT_S, SETTLE_S, JobView, Names, interval_s
from pipectl.watch.rank import DIED, FAILS, LEFT, LIVES, STOPPED, Death

NAMES = Names(["FORWARD", "RECEIVE_WAIT"], ["activation"])
COMPUTES = Sight(7, 0, 1, 4, step=5)
WAITS = Sight(7, 1, 0, 4, 1, 1, 0, step=5, waiting=True)
MISSED_S = 5.0


def lives(sight: Sight = COMPUTES, state: str = LIVES) -> RankReport:
    return RankReport(state, sight)


def died(at: float, **fields: Any) -> RankReport:
    return RankReport(DIED, COMPUTES, Death(at, **fields))


def node(ranks: dict[int, RankReport], name: str = "n1") -> NodeReport:
    return NodeReport(name, ranks)


@pytest.fixture
def job() -> JobView:
    return JobView(2, 30.0, 1.0, NAMES)


def verdict_of(job: JobView, *nodes: NodeReport) -> Any:
    for index, each in enumerate(nodes):
        job.hear(index, each, 10.0)
    assert job.judge(10.0) is None
    return job.judge(10.0 + SETTLE_S)


def test_of_several_deaths_the_first_counts(job: JobView) -> None:
    found = verdict_of(job, *(node({rank: died(at)}) for rank, at in enumerate((3.3, 3.2, 3.1))))
    assert found.rank == 2
    assert "was killed (SIGKILL, say)" in found.message
    assert job.is_over(10.0 + SETTLE_S)
    assert not job.is_over(10.0)


def test_the_kernel_knows_which_rank_of_a_node_ended_first(job: JobView) -> None:
    ranks = {0: died(3.1, earlier=1), 2: died(3.2, earlier=2), 1: died(3.4, earlier=0)}
    assert verdict_of(job, node(ranks)).rank == 1


def test_no_order_is_known_between_nodes_but_the_time(job: JobView) -> None:
    first = node({0: died(3.1, earlier=1), 1: died(3.3, earlier=0)})
    assert verdict_of(job, first, node({2: died(3.2)}, "n2")).rank == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"for_memory": True}, "killed by the kernel, for lack of memory"),
        ({"words": "Fatal Python error: Aborted\nThread 1"}, "crashed: Fatal Python error: Abort"),
        ({"words": "Fatal Python error: Aborted", "for_memory": True}, "crashed: Fatal Python"),
        ({"asked": True}, "was sent a signal to end"),
        ({"asked": True, "for_memory": True}, "killed by the kernel, for lack of memory"),
        ({"launcher": "the job script"}, "the job script that started it is gone"),
        ({"with_launcher": True}, "the launcher is gone, too"),
    ],
)
def test_what_is_said_of_a_death(job: JobView, fields: dict[str, Any], words: str) -> None:
    found = verdict_of(job, node({1: died(3.0, **fields), 0: died(4.0)}))
    assert words in found.message
    assert found.stack == fields.get("words", "")


def test_a_node_that_is_silent_while_others_die_is_gone(job: JobView) -> None:
    job.hear(1, node({2: lives(), 3: lives()}, "n2"), 9.5)
    dead = node({0: died(3.0), 1: died(3.1)})
    assert verdict_of(job, dead) is None
    assert job.judge(10.0 + MISSED_S) is None
    found = job.judge(10.1 + MISSED_S)
    assert found is not None
    assert (found.rank, "on n2 any more: the node is gone" in found.message) == (2, True)
    job.hear(1, node({2: lives(), 3: lives()}, "n2"), 15.0)
    found = job.judge(15.0)
    assert found is not None
    assert found.rank == 0


def test_what_a_node_said_up_to_a_death_is_no_sign_that_it_lives(job: JobView) -> None:
    job.hear(1, node({2: lives()}, "n2"), 10.0)
    assert verdict_of(job, node({0: died(3.0), 1: died(3.1)})) is None
    found = job.judge(10.1 + MISSED_S)
    assert found is not None
    assert found.rank == 2
    job.hear(1, node({2: lives()}, "n2"), 10.4)
    found = job.judge(10.5)
    assert found is not None
    assert found.rank == 0


def test_of_very_many_nodes_one_that_is_gone_is_told_of_before_the_watcher_ends() -> None:
    job = JobView(10_000, 30.0, 1.0, NAMES)
    job.hear(1, node({2: lives()}), 9.5)
    job.hear(0, node({0: died(3.0)}), 10.0)
    assert job.judge(10.0 + MAX_WAIT_S) is None
    found = job.judge(10.0 + 12.0)
    assert found is not None
    assert found.rank == 2
    assert MAX_WAIT_S < watcher._GRACE_S + watcher._LEAVE_S


def test_a_job_that_is_cancelled_has_no_culprit(job: JobView) -> None:
    assert verdict_of(job, node({rank: died(3.0, asked=True) for rank in range(3)})) is None
    assert job.is_over(11.0)


def test_ranks_that_were_to_end_may_lack_memory_before_they_do(job: JobView) -> None:
    asked = {rank: died(3.0 + rank, asked=True, for_memory=rank == 0) for rank in range(3)}
    assert "for lack of memory" in verdict_of(job, node(asked)).message


def test_a_rank_that_explains_itself_is_left_to_it(job: JobView) -> None:
    assert verdict_of(job, node({0: died(3.0), 1: lives(state=FAILS)})) is None
    assert job.is_over(10.0)


def test_a_frozen_rank_is_named_before_its_time_is_over(job: JobView) -> None:
    for now in range(40):
        state = STOPPED if now >= 5 else LIVES
        job.hear(0, node({0: lives(WAITS), 1: lives(state=state)}), now)
        found = job.judge(now)
        if found is not None:
            break
    assert found is not None
    assert found.rank == 1
    assert 25 <= now - 5 <= 30
    assert job.sight(1) == COMPUTES
    assert job.node(1) == "n1"


def test_a_rank_that_goes_on_in_time_is_not(job: JobView) -> None:
    for now in range(60):
        moves = COMPUTES._replace(moves=now if now > 24 else 5)
        state = STOPPED if 5 <= now < 24 else LIVES
        job.hear(0, node({0: lives(WAITS), 1: lives(moves, state)}), now)
        assert job.judge(now) is None


def test_a_watcher_that_is_gone_ends_no_job_whose_ranks_move_on(job: JobView) -> None:
    job.hear(1, node({1: lives(WAITS)}, "n2"), 0)
    for now in range(200):
        job.hear(0, node({0: lives(COMPUTES._replace(moves=now))}), now)
        assert job.judge(now) is None


def test_ranks_that_have_ended_are_not_missed(job: JobView) -> None:
    job.hear(0, node({0: lives(WAITS), 1: lives(state=LEFT)}), 0)
    job.hear(0, node({0: lives(WAITS), 1: lives(state=LEFT)}), 50)
    assert job.judge(50) is None


def test_many_nodes_write_more_rarely() -> None:
    assert interval_s(1) == interval_s(32) == 1
    assert interval_s(320) == 10


def test_long_steps_give_more_time(job: JobView) -> None:
    job.hear(0, node({0: lives(COMPUTES._replace(pace_s=20.0))}), 0)
    assert job.limit_s == 60


def test_a_warning_comes_once_and_then_rarely(job: JobView) -> None:
    warned = []
    for now in range(130):
        job.hear(0, node({0: lives(WAITS), 1: lives()}), now)
        if words := job.warn(now):
            warned.append(now)
            assert words.endswith("from rank 1, which is in forward 4")
    assert warned == [30, 60, 120]
    job.hear(0, node({0: lives(WAITS), 1: lives(COMPUTES._replace(moves=8))}), 130)
    assert job.warn(130) == ""
    assert job.moves


def test_before_the_first_step_the_warning_says_what_each_rank_does(job: JobView) -> None:
    """Also if none of them is known to wait."""
    looks = Sight(3, phase="looking for a checkpoint")
    builds = Sight(4, phase="building the stages")
    for now in (0, 30):
        job.hear(0, node({0: lives(looks), 1: lives(builds), 2: lives(builds)}), now)
    words = "rank 0 is looking for a checkpoint; ranks 1-2 are building the stages"
    assert job.warn(30) == f"no rank has moved on for 30 s: {words}"
    assert job.judge(30) is None
