"""The simulator against a second, straightforward one."""

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from reference_simulation import Reference

from pipectl.schedule import lower
from pipectl.simulate import simulate


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6))
@example(seed=8248)
@example(seed=247219)
def test_both_simulators_agree(random_case, seed):
    plan, cluster = random_case(seed)
    programs = [lower(plan, rank) for rank in range(plan.ranks)]
    reference = Reference(plan, cluster, programs)
    expected_s = reference.run()
    found = simulate(plan, cluster)
    times = [found.step_time_s, *found.utilisation]
    expected = [expected_s, *(busy / expected_s for busy in reference.busy)]
    agree = times == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assume(agree or not reference.tied)
    assert agree, (times, expected)
    assert simulate(plan, cluster, programs) == found
