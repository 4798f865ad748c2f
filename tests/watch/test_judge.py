"""Which rank is lost, by what nodes say: tables of what is known, and what follows."""

from typing import Any

import pytest

from pipectl.watch.board import Activity
from pipectl.watch.judge import (
    MAX_WAIT_S,
    SETTLE_S,
    describe_stall,
    describe_waits,
    interval_s,
    is_suspended,
    judge,
    limit_s,
)
from pipectl.watch.report import NodeReport, RankReport, State

LIMIT, LONG, MISSED_S = 30.0, 1000.0, 5.0


def computes(micro_batch: int = 4, **fields: Any) -> Activity:
    action = f"BACKWARD micro-batch {micro_batch}"
    return Activity(9, 5, 2, in_program=True, action=action, **fields)


def awaits(peer: int, step: int = 5) -> Activity:
    action, awaited = "RECEIVE_WAIT micro-batch 5", f"activation 5 of stage {peer} from rank {peer}"
    return Activity(9, step, 3, peer, True, True, action=action, awaited=awaited)


WAITS_FOR_ALL = Activity(9, 5, 0, in_program=True, waiting=True, action="UPDATE")
BUILDS = Activity(4, waiting=True, action="building the stages")
CAPTURES = Activity(3, action="capturing the model")
SAVES = Activity(9, 5, waiting=True, action="saving")


def known(activity: Activity, still_s: float = 0.0, state: str = State.LIVES) -> RankReport:
    return RankReport(0, state, still_s, activity)


def lives(state: str = State.LIVES) -> RankReport:
    return known(computes(), state=state)


def stopped(activity: Activity, still_s: float) -> RankReport:
    return known(activity, still_s, State.STOPPED)


def died(at: float, message: str = "killed", **fields: Any) -> RankReport:
    return RankReport(0, State.DIED, activity=computes(), ended_at=at, message=message, **fields)


def node(ranks: dict[int, RankReport], silent_s: float = 0.0, name: str = "n1") -> NodeReport:
    reports = tuple(each._replace(rank=rank) for rank, each in ranks.items())
    return NodeReport(name, ranks=reports, silent_s=silent_s)


def judged(*nodes: NodeReport, ended_s: float | None = None, complete: bool = True) -> Any:
    """Rank, node and message; None if there is no culprit."""
    lost = judge(nodes, LIMIT, ended_s, complete=complete)
    return lost and (lost[1].rank, lost[0].node, lost[1].message)


def test_of_several_deaths_the_first_counts():
    nodes = [node({0: died(3.3), 1: died(3.2)}), node({2: died(3.1)}, name="n2")]
    assert judged(*nodes, ended_s=SETTLE_S / 2) is None
    assert judged(*nodes, ended_s=SETTLE_S) == (2, "n2", "killed")


@pytest.mark.parametrize("silent_s", [0.0, 0.5])
def test_a_node_that_is_silent_since_a_death_is_gone(silent_s):
    """What was read together with the death is no sign that the node lives."""
    dead = node({0: died(3.0), 1: died(3.1)})

    def after(ended_s):
        silent = node({2: lives(), 3: lives()}, silent_s + ended_s, "n2")
        return judged(dead, silent, ended_s=ended_s)

    assert after(SETTLE_S) is after(MISSED_S) is None
    words = f"no sign of life from it on n2 for {silent_s + MISSED_S + 0.1:.0f} s: the node is gone"
    assert after(MISSED_S + 0.1) == (2, "n2", words)
    assert judged(dead, node({2: lives()}, 0.4), ended_s=0.5)[0] == 0
    assert judged(dead, node({2: lives(State.LEFT)}, 9), ended_s=0.5)[0] == 0


def test_all_ranks_that_are_stopped_are_a_run_that_is_suspended():
    nodes = [
        node({0: stopped(computes(), LONG)}),
        node({1: stopped(awaits(0), 1), 2: lives(State.LEFT)}),
    ]
    assert is_suspended(nodes)
    assert judged(*nodes) is None
    assert not is_suspended([*nodes, node({3: lives()})])
    assert not is_suspended([])


def test_a_watcher_that_sees_some_nodes_blames_none_of_them_for_waiting():
    waits = node({1: known(awaits(0), LONG)})
    first = node({0: known(awaits(1), LONG)}, name="n0")
    assert judged(first, waits, complete=False) is None
    gone = first._replace(silent_s=LONG)
    assert "the node is gone" in judged(gone, waits, complete=False)[2]


def test_of_very_many_nodes_one_that_is_gone_is_named_before_the_watcher_ends():
    nodes = [node({0: died(3.0)}), *[node({n: lives()}) for n in range(1, 999)]]
    nodes[7] = node({7: lives()}, 20)
    assert judged(*nodes, ended_s=MAX_WAIT_S) is None
    assert judged(*nodes, ended_s=MAX_WAIT_S + 0.1)[0] == 7


@pytest.mark.parametrize(
    "ranks",
    [
        {rank: died(3.0, was_asked=True) for rank in range(3)},  # the job is cancelled
        {0: died(3.0), 1: lives(State.FAILS)},  # it explains itself
        {0: lives(State.LEFT), 1: lives()},  # and no longer dead
    ],
)
def test_ends_without_a_culprit(ranks):
    assert judged(node(ranks), ended_s=1.0) is None


def waits(activities: dict[int, Activity], culprit: int | None = None) -> str:
    ranks = [RankReport(rank, activity=each) for rank, each in activities.items()]
    return describe_waits(ranks, culprit)


def test_who_waits_for_whom():
    words = "waiting for activation 5 of stage 2 from rank 2, which is in BACKWARD micro-batch 4"
    assert waits({2: computes(), 3: awaits(2)}) == f"rank 3 is {words}"
    chain = waits({0: awaits(3), 2: computes(), 3: awaits(2)})
    assert chain.endswith(f"from rank 3, which is {words}")


@pytest.mark.parametrize(
    ("activities", "words"),
    [
        ({3: awaits(2)}, "from rank 2, which has not reported yet"),
        ({3: awaits(2), 2: awaits(3)}, "from rank 3, and so in a circle"),
        ({3: awaits(2), 2: SAVES}, "which is waiting for the other ranks (saving)"),
        ({3: awaits(2), 2: WAITS_FOR_ALL}, "waiting for the other ranks (stage 0, UPDATE)"),
        ({n: awaits(n - 1) for n in range(8, 0, -1)}, ", and so on"),
    ],
)
def test_ends_of_chains(activities, words):
    assert words in waits(activities)


def test_of_all_that_wait_one_that_waits_for_the_culprit_is_named():
    activities = {0: WAITS_FOR_ALL, 1: computes(), 3: awaits(0), 2: awaits(1)}
    assert waits(activities, 1).startswith("rank 2 is waiting for activation 5 of stage 1")
    assert waits(activities).startswith("rank 3 is waiting for activation 5 of stage 0")
    # one that has only begun to wait is a link of the chain
    begins = {0: computes(), 1: awaits(0)._replace(waiting=False), 2: awaits(1)}
    words = "rank 1 is waiting for activation 5 of stage 0 from rank 0, which is in BACKWARD"
    assert waits(begins, 0) == f"{words} micro-batch 4"
    assert waits(begins).startswith("rank 2")


def test_if_no_rank_waits_for_a_message_all_are_described():
    assert waits({**dict.fromkeys((0, 2, 3), CAPTURES), 1: BUILDS, 4: computes()}) == (
        "ranks 0, 2-3 are capturing the model; rank 1 is waiting for the other ranks (building the "
        "stages); rank 4 is in BACKWARD micro-batch 4"
    )
    many = waits({rank: computes(rank) for rank in range(20)})
    assert many.endswith("in BACKWARD micro-batch 5; 14 more ranks do something else")


def test_a_stall_lasts_as_long_as_no_rank_moves_on():
    words = "no rank has moved on for 40 s: rank 0 is waiting for activation 5 of stage 1 from rank"
    nodes = [node({0: known(awaits(1), 50)}), node({1: known(computes(), 40)}, 10)]
    stall = describe_stall(nodes, 40)
    assert stall == (40.0, f"{words} 1, which is in BACKWARD micro-batch 4")
    ended = node({0: known(awaits(1), 50), 1: known(computes(), 50, State.LEFT)})
    for other in ([ended], [node({0: known(awaits(1), 39)})], []):
        assert describe_stall(other, 40) == (0.0, "")


def test_the_limit_is_three_steps_as_predicted_or_as_they_are_and_four_signs_of_life():
    paced = [node({0: known(computes(pace_s=2.0)), 1: known(computes(pace_s=1.0))})]
    assert limit_s(paced, 1, 30, 1) == 30
    assert limit_s(paced, 1, 1, 11) == 33
    assert limit_s(paced, 1, 1, 1) == 6
    assert limit_s([], 2, 1, 0) == 4
    assert limit_s([], 320, 30, 0) == 40
    assert interval_s(1) == interval_s(32) == 1
    assert interval_s(320) == 10


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        {0: known(awaits(1), 29), 1: known(computes(), 29)},
        {0: known(awaits(1), LIMIT), 1: known(computes(), LIMIT)},  # slow, as far as is known
        {0: known(SAVES, LONG), 1: known(SAVES, LONG)},  # a slow disk
        {0: known(awaits(1), 40), 1: known(awaits(0), 40)},  # a long message, perhaps
        {0: known(awaits(1), 8), 1: stopped(computes(), 8)},
        {0: known(CAPTURES, LONG), 1: known(CAPTURES, LONG)},
        {0: known(BUILDS, LONG), 1: known(CAPTURES, LONG)},  # a large model
        {0: known(awaits(1), LONG), 1: lives(State.LEFT)},  # alone, and the other has ended
    ],
)
def test_runs_that_may_go_on(ranks):
    assert judged(node(ranks)) is None


@pytest.mark.parametrize(
    ("ranks", "rank", "words"),
    [
        (
            {0: known(awaits(1), 28), 1: stopped(computes(), 28)},
            1,
            "its process is stopped (SIGSTOP), for 28 s now; rank 0 is waiting for activation 5 of "
            "stage 1 from rank 1, which is in BACKWARD micro-batch 4",
        ),
        (
            {0: known(awaits(1), LONG), 1: known(computes(), LONG)},
            1,
            "has been in BACKWARD micro-batch 4 for 1000 s, and no rank has moved on; rank 0",
        ),
        (
            {0: known(CAPTURES, 28), 1: stopped(Activity(), 28)},
            1,
            "its process is stopped",
        ),
        (
            {0: known(BUILDS, 61), 1: known(BUILDS, 61)},
            0,
            "all ranks have waited for each other for 61 s; ranks 0-1 are waiting for the other "
            "ranks (building the stages)",
        ),
        (
            {0: known(awaits(1, step=1), 61), 1: known(awaits(0, step=1), 61)},
            0,
            "all ranks have waited for each other for 61 s; rank 1 is waiting for activation 5",
        ),
    ],
)
def test_ranks_that_are_lost(ranks, rank, words):
    lost = judged(node(ranks))
    assert lost[:2] == (rank, "n1")
    assert lost[2].startswith(words)


def test_a_silent_node_is_gone_unless_other_ranks_move_on():
    silent = node({1: known(computes(), 28)}, 28, "n2")
    lost = judged(node({0: known(awaits(1), 20)}), silent)
    assert lost[:2] == (1, "n2")
    words = "no sign of life from it on n2 for 28 s: the node is gone; rank 0 is waiting"
    assert lost[2].startswith(words)
    assert judged(node({0: known(computes(), 1)}), silent) is None
