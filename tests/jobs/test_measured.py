from __future__ import annotations

from typing import Any

import pytest

from pipectl.jobs.measured import Expected, measured
from pipectl.plan import Plan, Stage, StageCost


def line(step: int, step_time_s: float = 0.5, **more: Any) -> dict[str, Any]:
    return {"step": step, "steps": 10, "loss": 10.0 - step, "step_time_s": step_time_s, **more}


def test_nothing_yet() -> None:
    found = measured([])
    assert (found.step, found.steps, found.step_time_s, found.remaining_s) == (0, None, None, None)


def test_the_first_steps_do_not_count_for_the_step_time() -> None:
    found = measured([line(1, 9.0), line(2, 8.0), line(3, 7.0), line(4, 1.0), line(5, 3.0)])
    assert found.step_time_s == 2.0
    assert found.remaining_s == 5 * 2.0


def test_with_few_steps_the_last_one_counts() -> None:
    assert measured([line(1, 9.0)]).step_time_s == 9.0
    assert measured([line(1, 9.0), line(2, 1.0)]).step_time_s == 1.0


def test_losses_and_the_last_evaluation() -> None:
    lines = [
        line(1),
        {"step": 1, "evaluation": {"loss": 5.0}},
        line(2, samples_per_s=16.0),
        {"step": 2, "evaluation": {"loss": 4.0, "accuracy": 0.5}},
    ]
    found = measured(lines)
    assert (found.first_loss, found.last_loss, found.samples_per_s) == (9.0, 8.0, 16.0)
    assert (found.evaluation_step, found.evaluation) == (2, {"loss": 4.0, "accuracy": 0.5})


@pytest.mark.parametrize(("batch_size", "expected"), [(8, 1.0), (4, 4 / 7)])
def test_efficiency_is_profiled_compute_over_the_ranks_time(
    batch_size: int, expected: float
) -> None:
    cost = StageCost(1.0, 2.0, 1.0, 0, 0, 0)
    plan = Plan(
        name="x",
        fingerprint=None,
        schedule="gpipe",
        warm_up=(1, 1),
        batch_size=batch_size,
        micro_batch_size=4,
        micro_batches=2,
        stages=(Stage(("a",), (0,), cost), Stage(("b",), (1,), cost)),
        transfers=(),
        node_of_rank=(0, 0),
    )
    assert Expected.of(plan).efficiency(7.0) == pytest.approx(expected)
