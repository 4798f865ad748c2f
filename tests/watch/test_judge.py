"""Which rank is lost, by what nodes say: tables of what is known, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from pipectl.watch.board import NO_ROW, Activity
from pipectl.watch.files import NodeReport
from pipectl.watch.judge import (
    MAX_WAIT_S,
    SETTLE_S,
    Names,
    Node,
    Verdict,
    action,
    describe_stall,
    describe_waits,
    interval_s,
    judge,
    limit_s,
)
from pipectl.watch.rank import DIED, FAILS, LEFT, LIVES, STOPPED, Death, RankReport

NAMES = Names(["FORWARD", "BACKWARD", "UPDATE", "SEND_WAIT", "RECEIVE_WAIT"], ["activation"])
FORWARD, BACKWARD, UPDATE, SEND_WAIT, RECEIVE_WAIT = range(5)
LIMIT, LONG, MISSED_S = 30.0, 1000.0, 5.0


def computes(micro_batch: int = 4, **fields: Any) -> Activity:
    return Activity(9, BACKWARD, 2, micro_batch, step=5, **fields)


def awaits(peer: int, micro_batch: int = 5, step: int = 5) -> Activity:
    return Activity(9, RECEIVE_WAIT, 3, micro_batch, peer, peer, 0, step=step, waiting=True)


def offers(peer: int) -> Activity:
    return Activity(9, SEND_WAIT, 1, 2, peer, peer, 0, step=5, waiting=True)


WAITS_FOR_ALL = Activity(9, UPDATE, 0, -1, step=5, waiting=True)
BUILDS = Activity(4, waiting=True, phase="building the stages")
CAPTURES = Activity(3, phase="capturing the model")
SAVES = Activity(9, step=5, waiting=True, phase="saving")


def known(activity: Activity, still: float = 0.0, **fields: float) -> RankReport:
    state = STOPPED if fields.get("stopped_s") else LIVES
    return RankReport(0, state, activity, still_s=still, **fields)


def lives(state: str = LIVES) -> RankReport:
    return RankReport(0, state, computes())


def died(at: float, **fields: Any) -> RankReport:
    return RankReport(0, DIED, computes(), Death(at, **fields))


def node(ranks: dict[int, RankReport], silent_s: float = 0.0, name: str = "n1") -> Node:
    reports = tuple(rank._replace(rank=number) for number, rank in ranks.items())
    return Node(NodeReport(name, ranks=reports), silent_s)


def judged(*nodes: Node, ended_s: float | None = None) -> Verdict:
    verdict = judge(nodes, LIMIT, NAMES, ended_s)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    ("nodes", "rank"),
    [
        ([node({n: died(at)}) for n, at in enumerate((3.3, 3.2, 3.1))], 2),
        # the kernel knows which rank of a node ended first
        ([node({0: died(3.1, earlier=1), 2: died(3.2, earlier=2), 1: died(3.4)})], 1),
        # and only the time says which of several nodes
        ([node({0: died(3.1, earlier=1), 1: died(3.3)}), node({2: died(3.2)})], 2),
    ],
)
def test_of_several_deaths_the_first_counts(nodes: list[Node], rank: int) -> None:
    assert judge(nodes, LIMIT, NAMES, SETTLE_S / 2) is None
    verdict = judged(*nodes, ended_s=SETTLE_S)
    assert verdict.rank.rank == rank
    assert "was killed (SIGKILL, say)" in verdict.message
    assert verdict.at == verdict.rank.death.at


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
def test_what_is_said_of_a_death(fields: dict[str, Any], words: str) -> None:
    verdict = judged(node({1: died(3.0, **fields), 0: died(4.0, earlier=1)}), ended_s=1)
    assert words in verdict.message
    assert verdict.stack == fields.get("words", "")


@pytest.mark.parametrize("silent_s", [0.0, 0.5])
def test_a_node_that_is_silent_since_a_death_is_gone(silent_s: float) -> None:
    """What was read together with the death is no sign that the node lives."""
    dead = node({0: died(3.0), 1: died(3.1)})

    def after(ended_s: float) -> Verdict | None:
        silent = node({2: lives(), 3: lives()}, silent_s + ended_s, "n2")
        return judge([dead, silent], LIMIT, NAMES, ended_s)

    assert after(SETTLE_S) is after(MISSED_S) is None
    gone = after(MISSED_S + 0.1)
    assert gone is not None
    assert (gone.rank.rank, gone.node, gone.at) == (2, "n2", None)
    assert "nothing is heard of it on n2 any more: the node is gone" in gone.message
    assert judged(dead, node({2: lives()}, 0.4), ended_s=0.5).rank.rank == 0
    assert judged(dead, node({2: lives(LEFT)}, 9), ended_s=0.5).rank.rank == 0


def test_a_node_that_lives_but_can_write_nothing_new_does_not_hide_that_no_rank_moves_on() -> None:
    """Its disk is full: only the time of its file changes."""
    waits = [node({0: known(awaits(1), still=LONG)}), node({1: known(awaits(0), still=0.1)})]
    assert judge(waits, LIMIT, NAMES) is None
    waits[1] = waits[1]._replace(stale_s=LONG)
    assert "all ranks have waited for each other" in judged(*waits).message
    assert describe_stall(waits, LIMIT, NAMES)[0] == LONG


def test_the_time_for_which_all_were_stopped_does_not_count() -> None:
    stopped = node({0: known(computes(), still=LONG), 1: known(computes(), LONG, stopped_s=LONG)})
    still = node({0: known(awaits(1), still=LONG), 1: known(awaits(0), still=LONG)})
    for nodes in ([stopped], [still]):
        assert judge(nodes, LIMIT, NAMES) is not None
        assert judge(nodes, LIMIT, NAMES, awake_s=LIMIT / 2) is None
    assert describe_stall([still], LIMIT, NAMES, awake_s=LIMIT / 2) == (0.0, "")


def test_a_watcher_that_sees_some_nodes_blames_none_of_them_for_waiting() -> None:
    waits = [node({0: known(awaits(1), still=LONG)}), node({1: known(awaits(0), still=LONG)})]
    assert judge(waits, LIMIT, NAMES, complete=False) is None
    waits[0] = waits[0]._replace(silent_s=LONG)
    gone = judge(waits, LIMIT, NAMES, complete=False)
    assert gone is not None
    assert "the node is gone" in gone.message


def test_of_very_many_nodes_one_that_is_gone_is_named_before_the_watcher_ends() -> None:
    nodes = [node({0: died(3.0)}), *[node({n: lives()}) for n in range(1, 999)]]
    nodes[7] = node({7: lives()}, 20)
    assert judge(nodes, LIMIT, NAMES, MAX_WAIT_S) is None
    assert judged(*nodes, ended_s=MAX_WAIT_S + 0.1).rank.rank == 7


@pytest.mark.parametrize(
    "ranks",
    [
        {rank: died(3.0, asked=True) for rank in range(3)},  # the job is cancelled
        {0: died(3.0), 1: lives(FAILS)},  # it explains itself
        {0: lives(LEFT), 1: lives()},  # and no longer dead
    ],
)
def test_ends_without_a_culprit(ranks: dict[int, RankReport]) -> None:
    assert judge([node(ranks)], LIMIT, NAMES, 1.0) is None


def test_who_waits_for_whom() -> None:
    ranks = [known(awaits(3, 1)), known(computes())._replace(rank=2)]
    ranks.append(known(awaits(2))._replace(rank=3))
    words = "rank 3 waits for activation 5 of stage 2 from rank 2, which is in backward 4"
    assert describe_waits(ranks[1:], NAMES) == words
    assert describe_waits(ranks, NAMES).endswith(f"from rank 3, which {words[7:]}")


def waits(activities: dict[int, Activity], culprit: int | None = None) -> str:
    ranks = [known(each)._replace(rank=rank) for rank, each in activities.items()]
    return describe_waits(ranks, NAMES, culprit)


@pytest.mark.parametrize(
    ("activities", "words"),
    [
        ({3: awaits(2)}, "from rank 2, which was never heard of"),
        ({3: awaits(2), 2: awaits(3)}, "from rank 3, and so in a circle"),
        ({3: offers(2), 2: SAVES}, "which waits for the other ranks (saving)"),
        ({3: offers(2), 2: WAITS_FOR_ALL}, "waits for the other ranks (stage 0, update)"),
        ({3: offers(2), 2: computes()}, "rank 3 waits for rank 2 to take activation 2 of stage 1"),
        ({3: awaits(2, -1)}, "rank 3 waits for activations of stage 2"),
        ({n: awaits(n - 1) for n in range(8, 0, -1)}, ", and so on"),
    ],
)
def test_ends_of_chains(activities: dict[int, Activity], words: str) -> None:
    assert words in waits(activities)


def test_of_all_that_wait_one_that_waits_for_the_culprit_is_named() -> None:
    activities = {0: WAITS_FOR_ALL, 1: computes(), 2: awaits(1)}
    for culprit in (1, None):
        assert waits(activities, culprit).startswith("rank 2 waits for activation 5")
    assert waits({1: computes()}, 1) == ""
    # one that has only begun to wait is a link of the chain
    begins = {0: computes(), 1: awaits(0)._replace(waiting=False), 2: awaits(1)}
    words = "rank 1 waits for activation 5 of stage 0 from rank 0, which is in backward 4"
    assert waits(begins, 0) == words
    assert waits(begins).endswith(f"which {words[7:]}")
    # and the culprit ends it though it waits itself
    assert waits({0: awaits(1, 2), 1: awaits(0)}, 1) == (
        "rank 0 waits for activation 2 of stage 1 from rank 1, which is in receive wait 5"
    )


def test_if_no_rank_waits_for_a_message_all_are_described() -> None:
    assert waits({**dict.fromkeys((0, 2, 3), CAPTURES), 1: BUILDS, 4: computes()}) == (
        "ranks 0, 2-3 are capturing the model; rank 1 waits for the other ranks (building the "
        "stages); rank 4 is in backward 4"
    )
    many = waits({rank: computes(rank) for rank in range(20)})
    assert many.endswith("in backward 5; 14 more ranks do something else")


def test_a_stall_lasts_as_long_as_no_rank_moves_on() -> None:
    words = "no rank has moved on for 40 s: rank 0 waits for activation 5 of stage 1 from rank 1"
    stall_s, text = describe_stall(
        [node({0: known(awaits(1), 50)}), node({1: known(computes(), 30)}, 10)], 40, NAMES
    )
    assert (stall_s, text) == (40.0, f"{words}, which is in backward 4")
    ended = node({0: known(awaits(1), 50), 1: lives(LEFT)})
    for nodes in ([ended], [node({0: known(awaits(1), 39)})], []):
        assert describe_stall(nodes, 40, NAMES) == (0.0, "")


def test_actions_read_as_in_other_error_reports() -> None:
    assert action(computes(), NAMES) == "BACKWARD micro-batch 4"
    assert action(WAITS_FOR_ALL._replace(stage=-1), NAMES) == "UPDATE"
    assert action(CAPTURES, NAMES) == "capturing the model"
    assert NO_ROW not in range(len(NAMES.kinds))


def test_the_limit_is_three_steps_as_predicted_or_as_they_are_and_four_signs_of_life() -> None:
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
        {0: known(computes(), stopped_s=LONG), 1: known(computes(), stopped_s=LONG)},  # suspended
        {0: known(awaits(1), 8), 1: known(computes(), 8, stopped_s=8)},
        {0: known(CAPTURES, LONG), 1: known(CAPTURES, LONG)},
        {0: known(BUILDS, LONG), 1: known(CAPTURES, LONG)},  # a large model
        {0: known(awaits(1), LONG), 1: lives(LEFT)},  # alone, and the other has ended
    ],
)
def test_runs_that_may_go_on(ranks: dict[int, RankReport]) -> None:
    assert judge([node(ranks)], LIMIT, NAMES) is None


@pytest.mark.parametrize(
    ("ranks", "rank", "words"),
    [
        (
            {0: known(awaits(1), 28), 1: known(computes(), 28, stopped_s=28)},
            1,
            "its process is stopped (SIGSTOP), for 28 s now; rank 0 waits for activation 5 of "
            "stage 1 from rank 1, which is in backward 4",
        ),
        (
            {0: known(awaits(1), LONG), 1: known(computes(), LONG)},
            1,
            "has been in BACKWARD micro-batch 4 for 1000 s, and no rank has moved on; rank 0",
        ),
        (
            {0: known(awaits(1), 61), 1: known(awaits(0), 61)},
            0,
            "all ranks have waited for each other for 61 s; rank 1 waits for",
        ),
        (
            {0: known(CAPTURES, 28), 1: known(Activity(), 28, stopped_s=28)},
            1,
            "its process is stopped",
        ),
        (
            {0: known(BUILDS, 61), 1: known(BUILDS, 61)},
            0,
            "all ranks have waited for each other for 61 s; rank 1 waits for the other ranks "
            "(building the stages)",
        ),
        (
            {0: known(awaits(1, step=1), 61), 1: known(awaits(0, step=1), 61)},
            0,
            "all ranks have waited for each other for 61 s; rank 1 waits for activation 5",
        ),
    ],
)
def test_ranks_that_are_lost(ranks: dict[int, RankReport], rank: int, words: str) -> None:
    verdict = judged(node(ranks))
    assert (verdict.rank.rank, verdict.node) == (rank, "n1")
    assert verdict.message.startswith(words)


def test_a_silent_node_is_gone_unless_other_ranks_move_on() -> None:
    silent = node({1: known(computes())}, 28, "n2")
    verdict = judged(node({0: known(awaits(1), 20)}), silent)
    assert (verdict.rank.rank, verdict.node) == (1, "n2")
    words = "nothing was heard of it on n2 for 28 s: the node is gone; rank 0 waits"
    assert verdict.message.startswith(words)
    assert judge([node({0: known(computes(), 1)}), silent], LIMIT, NAMES) is None
