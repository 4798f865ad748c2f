"""What schedules without flushes cannot do with the rest of a job."""

from pathlib import Path

import pytest

from pipectl.errors import SpecError
from pipectl.spec import load

JOB = Path(__file__).parents[2] / "configs" / "digits-cnn.yaml"


@pytest.mark.parametrize(
    ("schedule", "override", "message"),
    [
        ("pipedream", "training.clip_grad_norm=1", "clip_grad_norm: needs the gradients of all"),
        ("pipedream-2bw", "training.clip_grad_norm=1", "or use another schedule than pipedream-2"),
        ("pipedream-2bw", "training.precision=float16", "precision: float16 skips a step if any"),
        ("pipedream", "pipeline.micro_batches=4", "micro_batches: 4 have no meaning with schedule"),
        ("pipedream", "pipeline={stages: 2, warm_up: [2, 1], schedule: pipedream}",
         "warm_up: has no meaning with schedule pipedream"),
    ],
)  # fmt: skip
def test_it_is_refused_by_name(schedule: str, override: str, message: str) -> None:
    given = [f"pipeline={{schedule: {schedule}}}", override]
    with pytest.raises(SpecError, match=message):
        load(JOB, given)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_what_they_can_do_loads(schedule: str) -> None:
    spec = load(JOB, [f"pipeline={{schedule: {schedule}}}", "training.precision=bf16"])
    assert spec.pipeline.schedule == schedule
