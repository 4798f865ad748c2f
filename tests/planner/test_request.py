import pytest

from pipectl.errors import InfeasibleError
from pipectl.planner import PlanRequest
from pipectl.planner.request import micro_batch_sizes, open_orders, stage_counts


@pytest.mark.parametrize(
    ("batch", "most", "sizes"),
    [
        (64, 16, [64, 32, 16, 8, 4]),
        (64, 1, [64]),
        (48, 8, [48, 24, 12, 6]),
        (96, 16, [96, 48, 24, 12, 6]),
        (20, 16, [20, 10, 5, 4, 2]),
        (7, 100, [7, 4, 2]),
        (13, 8, [13, 7, 4, 2]),
        (1, 8, [1]),
    ],
)
def test_sizes_halve_and_divide_the_batch_where_they_can(batch, most, sizes) -> None:
    assert micro_batch_sizes(PlanRequest("job", batch), most) == sizes


def test_more_micro_batches_than_samples_cannot_be() -> None:
    with pytest.raises(InfeasibleError, match="9 micro-batches of 8 samples"):
        micro_batch_sizes(PlanRequest("job", 8, micro_batches=9), 99)


def test_up_to_eight_stages_all_numbers_are_tried_then_fewer() -> None:
    assert stage_counts(PlanRequest("job", 8), ranks=4, blocks=100) == [1, 2, 3, 4]
    assert stage_counts(PlanRequest("job", 8), ranks=9, blocks=3) == [1, 2, 3]
    many = stage_counts(PlanRequest("job", 8), ranks=1024, blocks=2000)
    assert many[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert many[-1] == 1024
    assert len(many) < 40


def test_more_stages_than_cuts_says_how_many_there_are() -> None:
    with pytest.raises(InfeasibleError, match="5 stages, but the graph has 2 possible cuts"):
        stage_counts(PlanRequest("job", 8, stages=5), ranks=8, blocks=3)


def test_more_stages_than_ranks_says_so() -> None:
    with pytest.raises(InfeasibleError, match="3 stages, but only 2 ranks"):
        stage_counts(PlanRequest("job", 8, warm_up=(3, 2, 1)), ranks=2, blocks=10)


def test_schedules_from_the_fewest_in_flight_on() -> None:
    assert open_orders(PlanRequest("job", 8), 3, 8) == [
        ("1f1b", (3, 2, 1)),
        ("1f1b", (5, 3, 1)),
        ("gpipe", (8, 8, 8)),
    ]


def test_equal_warm_ups_are_tried_once() -> None:
    assert open_orders(PlanRequest("job", 8), 3, 1) == [("1f1b", (1, 1, 1))]
    assert open_orders(PlanRequest("job", 8, schedule="gpipe"), 3, 1) == [("gpipe", (1, 1, 1))]


def test_given_warm_up_is_kept() -> None:
    request = PlanRequest("job", 8, warm_up=(4, 2))
    assert open_orders(request, 2, 8) == [("1f1b", (4, 2))]
    assert open_orders(request, 2, 3) == [("1f1b", (3, 2))]
