"""Throughput plans whose answer can be worked out by hand."""

import pytest

from pipectl.errors import InfeasibleError, InvalidInputError
from pipectl.planner.throughput import ThroughputRequest, plan_throughput
from pipectl.profile import Variant


def test_equal_operators_are_spread_evenly(chain) -> None:
    plan = plan_throughput(chain(6), ThroughputRequest(devices=3, micro_batches=6))
    assert plan.exact
    assert plan.value_s == pytest.approx(6 * 3e-3 / 3)
    assert plan.devices == 3


def test_replicas_must_divide_the_micro_batches(chain) -> None:
    plan = plan_throughput(chain(1), ThroughputRequest(devices=5, micro_batches=6))
    assert [stage.data_parallel for stage in plan.stages] == [3]
    assert plan.value_s == pytest.approx(1e-3)


def test_stages_in_front_hold_more_micro_batches(make_operator, make_profile) -> None:
    ways = [(Variant(1, False, time_s, 0, 1000, 0),) for time_s in (3e-3, 9e-3)]
    operators = [make_operator(index, variants=variants) for index, variants in enumerate(ways)]
    profile = make_profile(operators, [(0, 1)])
    enough = plan_throughput(profile, ThroughputRequest(5, 3000, micro_batches=6))
    assert [(stage.data_parallel, stage.in_flight) for stage in enough.stages] == [(2, 3), (3, 1)]
    assert enough.value_s == pytest.approx(3e-3)
    short = plan_throughput(profile, ThroughputRequest(5, 2999, micro_batches=6))
    assert [(stage.data_parallel, stage.in_flight) for stage in short.stages] == [(3, 1)]
    assert short.value_s == pytest.approx(4e-3)


def test_summing_gradients_can_cost_more_than_replicas_gain(chain) -> None:
    profile = chain(2, parameter_bytes=10**6, parameters=(("w", 10**6),), output_bytes=0)
    slow = ThroughputRequest(devices=2, bandwidth_bytes_per_s=1e8, micro_batches=2)
    fast = ThroughputRequest(devices=2, bandwidth_bytes_per_s=1e12, micro_batches=2)
    assert [s.data_parallel for s in plan_throughput(profile, slow).stages] == [1, 1]
    assert plan_throughput(profile, fast).value_s == pytest.approx(3e-3, rel=1e-2)


def test_recomputation_where_memory_is_short(chain) -> None:
    saved = {"saved": (("x", 9000),), "parameters": (), "parameter_bytes": 0}
    profile = chain(4, **saved)
    roomy = plan_throughput(profile, ThroughputRequest(4, micro_batches=4))
    assert not any(stage.recomputed for stage in roomy.stages)
    limit = max(stage.memory_bytes for stage in roomy.stages)
    assert limit > 12000
    short = plan_throughput(profile, ThroughputRequest(4, 12000, micro_batches=4))
    assert any(stage.recomputed for stage in short.stages)
    assert all(stage.memory_bytes <= 12000 for stage in short.stages)
    assert short.value_s >= roomy.value_s


def test_too_little_memory_is_said(chain) -> None:
    with pytest.raises(InfeasibleError, match="no split over 2 devices fits into 10 bytes"):
        plan_throughput(chain(2), ThroughputRequest(2, 10))


@pytest.mark.parametrize(
    "figures", [{"devices": 0}, {"micro_batches": 0}, {"bandwidth_bytes_per_s": 0.0}]
)
def test_figures_out_of_range_are_refused(figures) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(figures))):
        ThroughputRequest(**{"devices": 1, **figures})
