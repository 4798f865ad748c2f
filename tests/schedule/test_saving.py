"""Memory for the copy while a checkpoint is written."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pipectl.plan import Plan, Prediction, StageCost
from pipectl.simulate.memory import copy_bytes, room_bytes

COST = StageCost(1.0, 2.0, 0.5, 40, 0, 0)


@pytest.mark.parametrize(
    ("limit", "room", "copies"), [(64, 49, 40), (16, 1, 0), (10, 0, 0), (None, None, 40)]
)
def test_a_copy_is_made_if_a_rank_has_room_for_all_of_it(
    pipeline: Callable[..., Plan], limit: int | None, room: int | None, copies: int
):
    plan = replace(pipeline(1, 4, costs=[COST]), prediction=Prediction(1.0, 0.0, (1.0,), (15,)))
    assert room_bytes(plan, 0, limit) == room
    assert copy_bytes(plan, 0, limit) == copies
