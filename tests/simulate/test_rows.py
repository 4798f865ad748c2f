"""What the simulator takes from a plan in its own, shorter ways is what the schedule says."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.schedule import lower
from pipectl.simulate.network import Numbering
from pipectl.simulate.rows import given_parts, parts_of
from pipectl.simulate.tables import COMPUTE, KIND, OPERATIONS, STAGE, STREAM, WAIT


def expanded(part):
    """The rows of a rank with the plan's own numbers of stages and streams."""
    rows = part.rows.copy()
    stages, streams = np.array(part.stages), np.array(part.streams)
    computes = (OPERATIONS[rows[:, KIND]] == COMPUTE) | (rows[:, STAGE] >= 0)
    rows[computes, STAGE] = stages[rows[computes, STAGE]]
    moves = OPERATIONS[rows[:, KIND]] >= WAIT - 1
    rows[moves, STREAM] = streams[rows[moves, STREAM]]
    return rows.tolist()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_programs_made_from_surroundings_are_the_programs_of_the_plan(random_case, seed):
    plan, _ = random_case(seed)
    numbering = Numbering(plan)
    programs = [lower(plan, rank) for rank in range(plan.ranks)]
    whole = given_parts(plan, numbering, programs)
    assert [expanded(part) for part in parts_of(plan, numbering)] == [
        part.rows.tolist() for part in whole
    ]


def test_stages_that_do_the_same_share_their_rows(pipeline):
    plan = pipeline(40, 6)
    parts = parts_of(plan, Numbering(plan))
    assert len({id(part.rows) for part in parts}) == 8  # first, middle, and six with few to come
