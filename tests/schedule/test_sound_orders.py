"""Orders are sound: what waits has a later turn, so that no placement of ranks can deadlock."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipectl.schedule import default_ranks, default_warm_up
from pipectl.schedule.actions import Kind
from pipectl.schedule.registry import NAMES, order_of

TWO_STAGES_A_RANK = ("interleaved", "looped-bfs", "zb-v", "dualpipev", "v-half", "v-min")


def planned(pipeline, schedule, ranks, micro_batches):
    stages = ranks * (2 if schedule in TWO_STAGES_A_RANK else 1)
    places = default_ranks(schedule, stages, ranks)
    warm_up = default_warm_up(schedule, stages, micro_batches, ranks=ranks)
    return pipeline(stages, micro_batches, schedule=schedule, ranks=places, warm_up=warm_up)


@pytest.mark.parametrize("schedule", NAMES)
@given(ranks=st.integers(1, 6), micro_batches=st.integers(1, 9))
def test_an_action_has_a_later_turn_than_what_it_depends_on(
    pipeline, schedule, ranks, micro_batches
):
    count = 1 if schedule == "pipedream" else micro_batches
    plan = planned(pipeline, schedule, ranks, count)
    order, every = order_of(plan, count), np.arange(count)
    kinds = [Kind.FORWARD, *order.parts(Kind.BACKWARD)]
    turns = {
        (kind, stage): order.turns(kind, stage, every)
        for kind in kinds
        for stage in range(len(plan.stages))
    }
    for stage in range(len(plan.stages)):
        for early, late in pairwise(kinds):
            assert np.all(turns[early, stage] < turns[late, stage])
        if stage:
            assert np.all(turns[Kind.FORWARD, stage - 1] < turns[Kind.FORWARD, stage])
            assert np.all(turns[kinds[1], stage] < turns[kinds[1], stage - 1])
