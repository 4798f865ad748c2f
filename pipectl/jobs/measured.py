"""What the metrics of a run say about its progress and speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from pipectl.plan import Plan

_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Measured:
    """Figures of a run so far; None where there is nothing to tell yet.

    Args:
        first_loss, last_loss: of the first and the last step that was written.
        step_time_s: median, without the first steps.
        evaluation: metric values of the last evaluation, made after ``evaluation_step``.
        not_finite: steps whose loss or gradients were not.
        fault: what was not finite in the last of these, e.g. ``the loss of micro-batch 2``.
    """

    step: int = 0
    steps: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    samples_per_s: float | None = None
    step_time_s: float | None = None
    evaluation_step: int | None = None
    evaluation: Mapping[str, float | None] = field(default_factory=dict)
    not_finite: tuple[int, ...] = ()
    fault: str = ""

    @property
    def remaining_s(self) -> float | None:
        """Time the remaining steps take at the measured pace."""
        if self.step_time_s is None or self.steps is None:
            return None
        return (self.steps - self.step) * self.step_time_s

    @property
    def waiting(self) -> Measured:
        """The same of a run whose next start is yet to come, on ranks whose pace is not known."""
        return replace(self, steps=None)


@dataclass(frozen=True)
class Expected:
    """What a plan says of the figures of its run.

    Args:
        step_time_s: the simulated step time; None where the plan has no prediction.
        compute_s: profiled time of all operators of a step, over all ranks.
        peak_memory_bytes: of each rank, process included; empty without a prediction.
    """

    step_time_s: float | None
    compute_s: float
    ranks: int
    peak_memory_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> Expected:
        """What this plan says."""
        micro_batch_s = sum(stage.cost.forward_s + stage.cost.backward_s for stage in plan.stages)
        update_s = sum(stage.cost.update_s for stage in plan.stages)
        micro_batches = plan.batch_size / plan.micro_batch_size
        found = plan.prediction
        return cls(
            step_time_s=None if found is None else found.step_time_s,
            compute_s=micro_batch_s * micro_batches + update_s,
            ranks=plan.ranks,
            peak_memory_bytes=() if found is None else found.peak_memory_bytes,
        )

    def efficiency(self, step_time_s: float) -> float:
        """Share of the ranks' time that the profile's compute explains.

        The operators' profiled time over all micro-batches, divided by ranks times the step time:
        1 for ranks that compute without a pause at the profile's pace.
        """
        return self.compute_s / (self.ranks * step_time_s)


def measured(lines: Iterable[Mapping[str, Any]]) -> Measured:
    """Sum up the lines of ``metrics.jsonl``, in order of steps and without repeated steps."""
    lines = list(lines)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "evaluation" in line]
    faults = [line for line in lines if isinstance(line.get("not_finite"), Mapping)]
    times = [line["step_time_s"] for line in steps if line.get("step_time_s")]
    step_time_s = median(times[min(_WARM_UP_STEPS, len(times) - 1) :]) if times else None
    last = steps[-1] if steps else {}
    evaluation = evaluations[-1] if evaluations else {}
    return Measured(
        step=last.get("step", 0),
        steps=last.get("steps"),
        first_loss=steps[0]["loss"] if steps else None,
        last_loss=last.get("loss"),
        samples_per_s=last.get("samples_per_s"),
        step_time_s=step_time_s,
        evaluation_step=evaluation.get("step"),
        evaluation=evaluation.get("evaluation") or {},
        not_finite=tuple(line["step"] for line in faults),
        fault=_fault(faults[-1]["not_finite"]) if faults else "",
    )


def _fault(found: Mapping[str, Any]) -> str:
    if "loss_of_micro_batch" in found:
        return f"the loss of micro-batch {found['loss_of_micro_batch']}"
    return f"the gradient of {found.get('gradient_of')!r} in stage {found.get('stage')}"
