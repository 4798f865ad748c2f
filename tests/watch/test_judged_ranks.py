"""Which rank all others wait for: tables of what is known, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from pipectl.watch.board import NO_ROW, Sight
from pipectl.watch.judge import (
    Names,
    RankState,
    action,
    describe_chain,
    describe_waits,
    judge_ranks,
    limit_s,
)

NAMES = Names(["FORWARD", "BACKWARD", "UPDATE", "SEND_WAIT", "RECEIVE_WAIT"], ["activation"])
FORWARD, BACKWARD, UPDATE, SEND_WAIT, RECEIVE_WAIT = range(5)
LIMIT = 30.0
LONG = 1000.0


def computes(micro_batch: int = 4, kind: int = BACKWARD, **fields: Any) -> Sight:
    return Sight(9, kind, 2, micro_batch, step=5, **fields)


def awaits(peer: int, micro_batch: int = 5) -> Sight:
    return Sight(9, RECEIVE_WAIT, 3, micro_batch, peer, peer, 0, step=5, waiting=True)


def offers(peer: int) -> Sight:
    return Sight(9, SEND_WAIT, 1, 2, peer, peer, 0, step=5, waiting=True)


WAITS_FOR_ALL = Sight(9, UPDATE, 0, -1, step=5, waiting=True)
BUILDS = Sight(4, waiting=True, phase="building the stages")
SAVES = Sight(9, step=5, waiting=True, phase="saving")


def known(sight: Sight, still: float = 0.0, **more: float) -> RankState:
    return RankState(sight, "n1", still_s=still, **more)


def test_who_waits_for_whom() -> None:
    sights = {3: awaits(2), 2: computes()}
    words = "rank 3 waits for activation 5 of stage 2 from rank 2, which is in backward 4"
    assert describe_chain(3, sights, NAMES) == words
    longer = {**sights, 0: awaits(3, 1)}
    assert describe_chain(0, longer, NAMES).endswith(
        f"from rank 3, which {words.removeprefix('rank 3 ')}"
    )


@pytest.mark.parametrize(
    ("sights", "words"),
    [
        ({3: awaits(2)}, "from rank 2, which was never heard of"),
        ({3: awaits(2), 2: awaits(3)}, "from rank 3, and so in a circle"),
        ({3: offers(2), 2: SAVES}, "which waits for the other ranks (saving)"),
        ({3: offers(2), 2: WAITS_FOR_ALL}, "waits for the other ranks (stage 0, update)"),
        ({3: offers(2), 2: computes()}, "rank 3 waits for rank 2 to take activation 2 of stage 1"),
        ({3: awaits(2, -1)}, "rank 3 waits for activations of stage 2"),
        ({i: awaits(i - 1) for i in range(1, 9)} | {3: awaits(2)}, ", and so on"),
    ],
)
def test_ends_of_chains(sights: dict[int, Sight], words: str) -> None:
    assert words in describe_chain(8 if 8 in sights else 3, sights, NAMES)


def test_actions_read_as_in_other_error_reports() -> None:
    assert action(computes(), NAMES) == "BACKWARD micro-batch 4"
    assert action(WAITS_FOR_ALL._replace(stage=-1), NAMES) == "UPDATE"
    assert action(Sight(phase="capturing the model"), NAMES) == "capturing the model"


def test_three_steps_as_predicted_or_as_they_are() -> None:
    assert limit_s(30, 1, 2) == 30
    assert limit_s(30, 11, 2) == 33
    assert limit_s(30, 11, 20) == 60


@pytest.mark.parametrize(
    "seen",
    [
        {},
        {0: known(computes())},
        {0: known(awaits(1), 29), 1: known(computes(), 29)},
        {0: known(awaits(1), LIMIT), 1: known(computes(), LIMIT)},  # slow, as far as is known
        {0: known(SAVES, LONG), 1: known(SAVES, LONG)},  # a slow disk
        {0: known(awaits(1), 40), 1: known(awaits(0), 40)},  # a long message, perhaps
        {0: known(computes(), stopped_s=LONG), 1: known(computes(), stopped_s=LONG)},  # suspended
        {0: known(awaits(1), 8), 1: known(computes(), 8, stopped_s=8)},
        {0: known(computes(), 1), 1: known(computes(), LONG, silent_s=LONG)},  # only word is lost
        {0: known(Sight(phase="capturing"), LONG), 1: known(Sight(phase="capturing"), LONG)},
        {0: known(BUILDS, LONG), 1: known(Sight(phase="capturing"), LONG)},  # a large model
    ],
)
def test_runs_that_may_go_on(seen: dict[int, RankState]) -> None:
    assert judge_ranks(seen, LIMIT, NAMES) is None


@pytest.mark.parametrize(
    ("seen", "rank", "words"),
    [
        (
            {0: known(awaits(1), 28), 1: known(computes(), 28, stopped_s=28)},
            1,
            "its process is stopped (SIGSTOP), for 28 s now; rank 0 waits for activation 5 of "
            "stage 1 from rank 1, which is in backward 4",
        ),
        (
            {0: known(awaits(1), 20), 1: known(computes(), 28, silent_s=28)},
            1,
            "nothing was heard of it on n1 for 28 s: the node is gone; rank 0 waits",
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
            {0: known(Sight(phase="capturing"), 28), 1: known(Sight(), 28, stopped_s=28)},
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
            {0: known(awaits(1)._replace(step=1), 61), 1: known(awaits(0)._replace(step=1), 61)},
            0,
            "all ranks have waited for each other for 61 s; rank 1 waits for activation 5",
        ),
    ],
)
def test_ranks_that_are_lost(seen: dict[int, RankState], rank: int, words: str) -> None:
    found = judge_ranks(seen, LIMIT, NAMES)
    assert found is not None
    assert found.rank == rank
    assert found.message.startswith(words)


def test_of_all_that_wait_one_that_waits_for_the_culprit_is_told_of() -> None:
    seen = {0: known(WAITS_FOR_ALL), 1: known(computes()), 2: known(awaits(1))}
    assert describe_waits(seen, NAMES, 1).startswith("rank 2 waits for activation 5")
    assert describe_waits(seen, NAMES).startswith("rank 2 waits for activation 5")
    assert describe_waits({1: known(computes())}, NAMES, 1) == ""


def test_if_no_rank_waits_for_a_message_all_are_told_of() -> None:
    captures = Sight(3, phase="capturing the model")
    seen = {rank: known(captures) for rank in (0, 2, 3)} | {1: known(BUILDS), 4: known(computes())}
    assert describe_waits(seen, NAMES) == (
        "ranks 0, 2-3 are capturing the model; rank 1 waits for the other ranks (building the "
        "stages); rank 4 is in backward 4"
    )
    many = {rank: known(computes(rank)) for rank in range(20)}
    assert describe_waits(many, NAMES).endswith("in backward 5; 14 more ranks do something else")


def test_ranks_that_only_begin_to_wait_are_links_of_the_chain() -> None:
    begins = awaits(0)._replace(waiting=False)
    seen = {0: known(computes()), 1: known(begins), 2: known(awaits(1))}
    words = "rank 1 waits for activation 5 of stage 0 from rank 0, which is in backward 4"
    assert describe_waits(seen, NAMES, culprit=0) == words
    assert describe_waits(seen, NAMES).endswith(f"which {words.removeprefix('rank 1 ')}")


def test_a_chain_ends_at_the_culprit_though_it_waits_itself() -> None:
    seen = {0: known(awaits(1, 2)), 1: known(awaits(0))}
    words = "rank 0 waits for activation 2 of stage 1 from rank 1, which is in receive wait 5"
    assert describe_waits(seen, NAMES, 1) == words


def test_no_row_is_no_kind() -> None:
    assert NO_ROW not in range(len(NAMES.kinds))
