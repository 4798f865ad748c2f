"""Which rank is lost, by what nodes say: tables of what is known, and what follows."""

from typing import Any

import pytest

from pipectl.watch import judge
from pipectl.watch.board import Activity
from pipectl.watch.judge import MAX_WAIT_S, SETTLE_S, describe_stall, interval_s, limit_s
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


def stopped(activity: Activity, still_s: float) -> RankReport:
    return known(activity, still_s, State.STOPPED)


def died(at: float, **fields: Any) -> RankReport:
    return RankReport(0, State.DIED, activity=computes(), ended_at=at, message="killed", **fields)


LIVES, LEFT, FAILS = (known(computes(), state=x) for x in (State.LIVES, State.LEFT, State.FAILS))


def node(ranks: dict[int, RankReport], silent_s: float = 0.0, name: str = "n1") -> NodeReport:
    reports = tuple(each._replace(rank=rank) for rank, each in ranks.items())
    return NodeReport(name, ranks=reports, silent_s=silent_s)


DEATHS = [node({0: died(3.3), 1: died(3.2)}), node({2: died(3.1)}, name="n2")]
SUSPENDED = [node({0: stopped(computes(), LONG)}), node({1: stopped(awaits(0), 1), 2: LEFT})]
MANY = [node({n: died(3.0) if n == 0 else LIVES}, 20.0 * (n == 7)) for n in range(999)]
WAITING = [node({0: known(awaits(1), LONG)}, name="n0"), node({1: known(awaits(0), LONG)})]
UNHEARD = node({1: known(computes(), 28)}, 28, "n2")


def silent_since_a_death(ended_s: float, before_s: float) -> list[NodeReport]:
    """What was read together with the death is no sign that the node lives."""
    return [
        node({0: died(3.0), 1: died(3.1)}),
        node({2: LIVES, 3: LIVES}, before_s + ended_s, "n2"),
    ]


@pytest.mark.parametrize(
    ("nodes", "ended_s", "verdict"),
    [
        pytest.param(DEATHS, SETTLE_S / 2, None, id="another may have died before"),
        pytest.param(DEATHS, SETTLE_S, "2 of n2: killed", id="the first death counts"),
        *(
            (silent_since_a_death(ended_s, before_s), ended_s, verdict)
            for before_s, gone_s in ((0.0, 5), (0.5, 6))
            for ended_s, verdict in (
                (SETTLE_S, None),
                (MISSED_S, None),
                (
                    MISSED_S + 0.1,
                    f"2 of n2: no sign of life from it on n2 for {gone_s} s: the node is gone",
                ),
            )
        ),
        pytest.param([DEATHS[0], node({2: LIVES}, 0.4)], 0.5, "1 of n1", id="the other node lives"),
        pytest.param([DEATHS[0], node({2: LEFT}, 9)], 0.5, "1 of n1", id="the other has ended"),
        pytest.param(MANY, MAX_WAIT_S, None, id="one of very many may be gone"),
        pytest.param(MANY, MAX_WAIT_S + 0.1, "7 of n1: no sign", id="before the watcher ends"),
        pytest.param([node(dict.fromkeys(range(3), died(3, was_asked=True)))], 1.0, None,
                     id="the job is cancelled"),
        pytest.param([node({0: died(3.0), 1: FAILS})], 1.0, None, id="a rank explains itself"),
        pytest.param([node({0: LEFT, 1: LIVES})], 1.0, None, id="no longer dead"),
    ],
)  # fmt: skip
def test_what_follows_from_deaths(nodes, ended_s, verdict):
    check(judge.judge(nodes, LIMIT, ended_s), verdict)


def check(lost: Any, verdict: str | None) -> None:
    if verdict is None:
        assert lost is None
    else:
        assert f"{lost[1].rank} of {lost[0].node}: {lost[1].message}".startswith(verdict)


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [
        ({}, None),
        ({0: known(awaits(1), 29), 1: known(computes(), 29)}, None),
        # slow, as far as is known
        ({0: known(awaits(1), LIMIT), 1: known(computes(), LIMIT)}, None),
        ({0: known(SAVES, LONG), 1: known(SAVES, LONG)}, None),  # a slow disk
        ({0: known(awaits(1), 40), 1: known(awaits(0), 40)}, None),  # a long message, perhaps
        ({0: known(awaits(1), 8), 1: stopped(computes(), 8)}, None),
        ({0: known(CAPTURES, LONG), 1: known(CAPTURES, LONG)}, None),
        ({0: known(BUILDS, LONG), 1: known(CAPTURES, LONG)}, None),  # a large model
        ({0: known(awaits(1), LONG), 1: LEFT}, None),  # alone, and the other has ended
        (
            {0: known(awaits(1), 28), 1: stopped(computes(), 28)},
            "1 of n1: its process is stopped (SIGSTOP), for 28 s now; rank 0 is waiting for "
            "activation 5 of stage 1 from rank 1, which is in BACKWARD micro-batch 4",
        ),
        (
            {0: known(awaits(1), LONG), 1: known(computes(), LONG)},
            "1 of n1: has been in BACKWARD micro-batch 4 for 1000 s, and no rank has moved on; ra",
        ),
        ({0: known(CAPTURES, 28), 1: stopped(Activity(), 28)}, "1 of n1: its process is stopped"),
        (
            {0: known(BUILDS, 61), 1: known(BUILDS, 61)},
            "0 of n1: all ranks have waited for each other for 61 s; ranks 0-1 are waiting for the "
            "other ranks (building the stages)",
        ),
        (
            {0: known(awaits(1, step=1), 61), 1: known(awaits(0, step=1), 61)},
            "0 of n1: all ranks have waited for each other for 61 s; rank 1 is waiting for activ",
        ),
    ],
)
def test_which_of_living_ranks_is_lost(ranks, verdict):
    check(judge.judge([node(ranks)], LIMIT, None), verdict)


@pytest.mark.parametrize(
    ("nodes", "complete", "verdict"),
    [
        (SUSPENDED, True, None),
        (WAITING, False, None),
        ([WAITING[0]._replace(silent_s=LONG), WAITING[1]], False, "0 of n0: no sign of life"),
        (
            [node({0: known(awaits(1), 20)}), UNHEARD],
            True,
            "1 of n2: no sign of life from it on n2 for 28 s: the node is gone; rank 0 is waiting",
        ),
        ([node({0: known(computes(), 1)}), UNHEARD], True, None),  # others move on
    ],
)
def test_which_of_several_nodes_is_lost(nodes, complete, verdict):
    """One that sees some nodes only blames none of them for waiting."""
    check(judge.judge(nodes, LIMIT, None, complete=complete), verdict)


def test_all_ranks_that_are_stopped_are_a_run_that_is_suspended():
    assert judge.is_suspended(SUSPENDED)
    assert not judge.is_suspended([*SUSPENDED, node({3: LIVES})])
    assert not judge.is_suspended([])


BEHIND_2 = "waiting for activation 5 of stage 2 from rank 2, which is"
CHAIN = {0: WAITS_FOR_ALL, 1: computes(), 3: awaits(0), 2: awaits(1)}
BEGINS = {0: computes(), 1: awaits(0)._replace(waiting=False), 2: awaits(1)}


@pytest.mark.parametrize(
    ("activities", "culprit", "start", "end"),
    [
        ({2: computes(), 3: awaits(2)}, None, f"rank 3 is {BEHIND_2} in BACKWARD micro", ""),
        ({0: awaits(3), 2: computes(), 3: awaits(2)}, None, "rank 0 is waiting for activation 5 of",
         f" stage 3 from rank 3, which is {BEHIND_2} in BACKWARD micro-batch 4"),
        ({3: awaits(2)}, None, "", "from rank 2, which has not reported yet"),
        ({3: awaits(2), 2: awaits(3)}, None, "", "from rank 3, and so in a circle"),
        ({3: awaits(2), 2: SAVES}, None, "", f"{BEHIND_2} waiting for the other ranks (saving)"),
        ({3: awaits(2), 2: WAITS_FOR_ALL}, None, "", "for the other ranks (stage 0, UPDATE)"),
        ({n: awaits(n - 1) for n in range(8, 0, -1)}, None, "", ", and so on"),
        # of all that wait, one that waits for the culprit is named
        (CHAIN, 1, "rank 2 is waiting for activation 5 of stage 1", ""),
        (CHAIN, None, "rank 3 is waiting for activation 5 of stage 0", ""),
        # one that has only begun to wait is a link of the chain
        (BEGINS, 0, "rank 1 is waiting for activation 5 of stage 0 from rank 0, which is in", ""),
        (BEGINS, None, "rank 2", "which is in BACKWARD micro-batch 4"),
        # if no rank waits for a message, all are described
        ({**dict.fromkeys((0, 2, 3), CAPTURES), 1: BUILDS, 4: computes()}, None,
         "ranks 0, 2-3 are capturing the model; rank 1 is waiting for the other ranks (building the"
         " stages); rank 4 is in BACKWARD micro-batch 4", ""),
        ({rank: computes(rank) for rank in range(20)}, None, "rank 0 is in BACKWARD micro-batch 0;",
         "in BACKWARD micro-batch 5; 14 more ranks do something else"),
    ],
)  # fmt: skip
def test_who_waits_for_whom(activities, culprit, start, end):
    ranks = [RankReport(rank, activity=each) for rank, each in activities.items()]
    found = judge.describe_waits(ranks, culprit)
    assert found.startswith(start)
    assert found.endswith(end)


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
    given = [
        (paced, 1, 30, 1),
        (paced, 1, 1, 11),
        (paced, 1, 1, 1),
        ([], 2, 1, 0),
        ([], 320, 30, 0),
    ]
    assert [limit_s(*each) for each in given] == [30, 33, 6, 4, 40]
    assert [interval_s(nodes) for nodes in (1, 32, 320)] == [1, 1, 10]
