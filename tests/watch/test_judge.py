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
    return Activity(9, 5, 2, in_program=True, action=action, **{"pace_s": 1.0, **fields})


def awaits(peer: int, step: int = 5) -> Activity:
    action, awaited = "RECEIVE_WAIT micro-batch 5", f"activation 5 of stage {peer} from rank {peer}"
    return Activity(9, step, 3, peer, True, True, action=action, awaited=awaited)


WAITS_FOR_ALL = Activity(9, 5, 0, in_program=True, waiting=True, action="UPDATE")
BUILDS = Activity(4, waiting=True, action="building the stages")
CAPTURES = Activity(3, action="capturing the model")
READS_AGAIN = Activity(9, action="reading the samples of earlier steps")
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


def deaths_and(ranks: dict[int, RankReport], silent_s: float) -> list[NodeReport]:
    return [node({0: died(3.3), 1: died(3.2)}), node(ranks, silent_s, "n2")]


def one_of_many(silent_s: float) -> list[NodeReport]:
    return [node({n: died(3.0) if n == 0 else LIVES}, silent_s * (n == 7)) for n in range(999)]


DEATHS = deaths_and({2: died(3.1)}, 0.0)
GONE = "2 of n2: no sign of life from it on n2 for {} s: the node is gone"
ASKED = [node(dict.fromkeys(range(3), died(3, was_asked=True)))]
SUSPENDED = [node({0: stopped(computes(), LONG)}), node({1: stopped(awaits(0), 1), 2: LEFT})]
WAITING = [node({0: known(awaits(1), LONG)}, name="n0"), node({1: known(awaits(0), LONG)})]
UNHEARD = node({1: known(computes(), 28)}, 28, "n2")


SILENT = {2: LIVES, 3: LIVES}


@pytest.mark.parametrize(
    ("ended_s", "nodes", "verdict"),
    [
        pytest.param(SETTLE_S / 2, DEATHS, None, id="another may have died before"),
        pytest.param(SETTLE_S, DEATHS, "2 of n2: killed", id="the first death counts"),
        # What was read together with the death is no sign that the node lives.
        (SETTLE_S, deaths_and(SILENT, SETTLE_S), None),
        (MISSED_S, deaths_and(SILENT, MISSED_S + 0.5), None),
        (MISSED_S + 0.1, deaths_and(SILENT, MISSED_S + 0.1), GONE.format(5)),
        (MISSED_S + 0.1, deaths_and(SILENT, MISSED_S + 0.6), GONE.format(6)),
        pytest.param(0.5, deaths_and({2: LIVES}, 0.4), "1 of n1", id="the other node lives"),
        pytest.param(0.5, deaths_and({2: LEFT}, 9), "1 of n1", id="the other node has ended"),
        pytest.param(MAX_WAIT_S, one_of_many(20.0), None, id="one of very many may be gone"),
        pytest.param(MAX_WAIT_S + 0.1, one_of_many(20.0), "7 of n1: no sign", id="not for ever"),
        pytest.param(1.0, ASKED, None, id="the job is cancelled"),
        pytest.param(1.0, [node({0: died(3.0), 1: FAILS})], None, id="a rank explains itself"),
    ],
)
def test_what_follows_from_deaths(nodes, ended_s, verdict):
    check(judge.judge(nodes, LIMIT, ended_s), verdict)


def check(lost: Any, verdict: str | None) -> None:
    if verdict is None:
        assert lost is None
    else:
        assert f"{lost[1].rank} of {lost[0].node}: {lost[1].message}".startswith(verdict)


@pytest.mark.parametrize(
    ("nodes", "verdict"),
    [
        ([], None),
        pytest.param(SUSPENDED, None, id="a run that is suspended"),
        ([*SUSPENDED, node({3: LIVES})], "0 of n1: its process is stopped (SIGSTOP), for 1000 s"),
        ([node({0: known(awaits(1), LIMIT), 1: known(computes(), LIMIT)})], None),  # slow, perhaps
        ([node({0: known(computes(pace_s=0.0), LONG)})], None),  # in the first step after a resume
        ([node({0: known(awaits(1), LONG), 1: known(READS_AGAIN, LONG)})], None),
        ([node({0: known(SAVES, LONG), 1: known(SAVES, LONG)})], None),  # a slow disk
        ([node({0: known(awaits(1), 40), 1: known(awaits(0), 40)})], None),  # a long message
        ([node({0: known(awaits(1), 8), 1: stopped(computes(), 8)})], None),
        ([node({0: known(BUILDS, LONG), 1: known(CAPTURES, LONG)})], None),  # a large model
        ([node({0: known(awaits(1), LONG), 1: LEFT})], None),  # alone, as the other has ended
        ([node({0: known(computes(), 1)}), UNHEARD], None),  # others move on
        (
            [node({0: known(awaits(1), 28), 1: stopped(computes(), 28)})],
            "1 of n1: its process is stopped (SIGSTOP), for 28 s now; rank 0 is waiting for "
            "activation 5 of stage 1 from rank 1, which is in BACKWARD micro-batch 4",
        ),
        (
            [node({0: known(awaits(1), LONG), 1: known(computes(), LONG)})],
            "1 of n1: has been in BACKWARD micro-batch 4 for 1000 s, and no rank has moved on; ra",
        ),
        ([node({0: known(CAPTURES, 28), 1: stopped(Activity(), 28)})], "1 of n1: its process is s"),
        (
            [node({0: known(BUILDS, 61), 1: known(BUILDS, 61)})],
            "0 of n1: all ranks have waited for each other for 61 s; ranks 0-1 are waiting for the "
            "other ranks (building the stages)",
        ),
        (
            [node({0: known(awaits(1, step=1), 61), 1: known(awaits(0, step=1), 61)})],
            "0 of n1: all ranks have waited for each other for 61 s; rank 1 is waiting for activ",
        ),
        (
            [node({0: known(awaits(1), 20)}), UNHEARD],
            "1 of n2: no sign of life from it on n2 for 28 s: the node is gone; rank 0 is waiting",
        ),
    ],
)
def test_which_of_living_ranks_is_lost(nodes, verdict):
    check(judge.judge(nodes, LIMIT, None), verdict)


def test_who_sees_some_nodes_only_blames_none_of_them_for_waiting():
    silent = [WAITING[0]._replace(silent_s=LONG), WAITING[1]]
    check(judge.judge(WAITING, LIMIT, None, complete=False), None)
    check(judge.judge(silent, LIMIT, None, complete=False), "0 of n0: no sign of life")


BEHIND_2 = "waiting for activation 5 of stage 2 from rank 2, which is"
CHAIN = {0: WAITS_FOR_ALL, 1: computes(), 3: awaits(0), 2: awaits(1)}
BEGINS = {0: computes(), 1: awaits(0)._replace(waiting=False), 2: awaits(1)}


@pytest.mark.parametrize(
    ("activities", "culprit", "start", "end"),
    [
        ({0: awaits(3), 2: computes(), 3: awaits(2)}, None, "rank 0 is waiting for activation 5 of",
         f" stage 3 from rank 3, which is {BEHIND_2} in BACKWARD micro-batch 4"),
        ({3: awaits(2)}, None, "rank 3 is", "from rank 2, which has not reported yet"),
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
