"""What the files of a run say of it so far: how far it is, and what broke it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pipectl.errors import DataFileError
from pipectl.runs.directory import RunDirectory
from pipectl.runs.readers import read_errors, read_figures, read_heartbeat, read_report
from pipectl.runs.record import PROFILING, Record

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


def sum_up(lines: Iterable[Mapping[str, Any]]) -> Measured:
    """Sum up the lines of ``metrics.jsonl``, in order of steps and without repeated steps."""
    lines = list(lines)
    steps = [line for line in lines if "loss" in line]
    first, last = (steps[0], steps[-1]) if steps else ({}, {})
    evaluation: Mapping[str, Any] = next(
        (one for one in reversed(lines) if "evaluation" in one), {}
    )
    times = [line["step_time_s"] for line in steps if line.get("step_time_s")]
    faults = [line for line in lines if isinstance(line.get("not_finite"), Mapping)]
    fault = ""
    if faults:
        what = faults[-1]["not_finite"]
        fault = f"the gradient of {what.get('gradient_of')!r} in stage {what.get('stage')}"
        if "loss_of_micro_batch" in what:
            fault = f"the loss of micro-batch {what['loss_of_micro_batch']}"
    return Measured(
        step=last.get("step", 0),
        steps=last.get("steps"),
        first_loss=first.get("loss"),
        last_loss=last.get("loss"),
        samples_per_s=last.get("samples_per_s"),
        step_time_s=median(times[min(_WARM_UP_STEPS, len(times) - 1) :]) if times else None,
        evaluation_step=evaluation.get("step"),
        evaluation=evaluation.get("evaluation") or {},
        not_finite=tuple(line["step"] for line in faults),
        fault=fault,
    )


def read_measured(run: RunDirectory, record: Record | None) -> Measured:
    """What a run has done so far; the steps of one that only measures are percent."""
    if record is None or record.kind != PROFILING:
        return sum_up(read_figures(run))
    return Measured(step=sound_heartbeat(run).get("step") or 0, steps=record.steps)


@dataclass(frozen=True)
class FirstFailure:
    """The failure that broke a run.

    Args:
        where: e.g. ``rank 3 on n1, stage 2, BACKWARD micro-batch 5, step 17``.
        others: how many further ranks reported an error.
    """

    where: str
    message: str
    cure: str | None
    exit_code: int
    others: int


def find_first_failure(run: RunDirectory) -> FirstFailure | None:
    """The failure of a run that came first, on whatever rank; None if nothing reported one."""
    preparation = read_report(run.preparation_error)
    reports = [*([] if preparation is None else [preparation]), *read_errors(run)]
    if not reports:
        return None
    first = reports[0]
    rank, stage, kind, code = (first.get(key) for key in ("rank", "stage", "type", "exit_code"))
    where = "preparation" if rank is None else f"rank {rank}"
    if first.get("host"):
        where += f" on {first['host']}"
    if stage is not None and stage >= 0:
        where += f", stage {stage}"
    if first.get("action") and rank is not None:
        where += f", {first['action']}"
    if first.get("step") is not None:
        where += f", step {first['step']}"
    return FirstFailure(
        where=where,
        message=f"{kind}: {first.get('message')}" if kind else str(first.get("message")),
        cure=first.get("cure"),
        exit_code=code if code is not None and 0 < code < 128 else 1,
        others=len(reports) - 1,
    )


def sound_heartbeat(run: RunDirectory) -> Mapping[str, Any]:
    """The last heartbeat; empty if there is none, or it is damaged."""
    with suppress(DataFileError):
        return read_heartbeat(run) or {}
    return {}
