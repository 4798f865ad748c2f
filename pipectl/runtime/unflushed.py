"""What a training whose steps overlap cannot have."""

from __future__ import annotations

from collections.abc import Mapping

from pipectl.capture.model_with_loss import own_name
from pipectl.errors import CaptureError, MismatchError
from pipectl.schedule import SCHEDULES
from pipectl.schedule.combinations import clashes, traits_of
from pipectl.spec.checks import features_of
from pipectl.spec.models import Pipeline, Training


def refuse(training: Training, schedule: str, shared: Mapping[str, object]) -> None:
    """Refuse what needs all ranks at once, or has no versions.

    Args:
        shared: parameters that several operators use.

    Raises:
        MismatchError: the job needs it.
        CaptureError: the model needs it.
    """
    traits = traits_of(SCHEDULES[schedule])
    for clash in clashes({*features_of(Pipeline(), training), *traits}):
        raise MismatchError(f"{clash.feature.key}: {clash.fault(schedule)}", hint=clash.hint())
    if shared:
        raise CaptureError(
            f"model: {own_name(next(iter(shared)))!r} is used by several operators, "
            f"whose gradients schedule {schedule} would take from different steps",
            hint="use a weight of its own for each, or a schedule that flushes",
        )
