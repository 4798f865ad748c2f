"""Plans in Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.report import render
from pipectl.timeline import Timeline
from pipectl.units import format_time

if TYPE_CHECKING:
    from pipectl.jobs.plan_search import StepAnswer


class Plan:
    """How a model is divided into stages, and what a step is predicted to take.

    In a notebook it shows itself as a table with a picture of the step; `rich.print` shows what
    `pipectl plan` prints.
    """

    def __init__(self, answer: StepAnswer) -> None:
        self._answer = answer
        self._plan = answer.plan

    @property
    def name(self) -> str:
        """Name of the job."""
        return self._plan.name

    @property
    def summary(self) -> str:
        """Such as ``2 stages on 2 ranks, 1f1b, 8 micro-batches of 4 (batch 32)``."""
        return self._plan.summary

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of one optimizer step."""
        return self._plan.predicted_step_s

    @property
    def samples_per_s(self) -> float:
        """Predicted samples per second; 0 if a step takes no time."""
        step_s = self._plan.predicted_step_s
        return self._plan.batch_size / step_s if step_s else 0.0

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Predicted peak memory of each rank's process."""
        prediction = self._plan.prediction
        return () if prediction is None else tuple(prediction.peak_memory_bytes)

    @property
    def bubble(self) -> float:
        """Predicted share of the ranks' time in which they wait, from 0 to 1."""
        return 0.0 if self._plan.prediction is None else self._plan.prediction.bubble

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self._plan.stages)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._plan.ranks

    @property
    def schedule(self) -> str:
        """Name of the schedule, such as ``1f1b``."""
        return self._plan.schedule

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return self._plan.micro_batches

    @property
    def timeline(self) -> Timeline:
        """The predicted step: what each rank does and when."""
        return self._answer.simulation.timeline

    @property
    def warnings(self) -> tuple[str, ...]:
        """What in the job, its profile or its cluster may be other than expected."""
        return self._answer.inputs.warnings

    def to_json(self) -> dict[str, Any]:
        """What `pipectl plan --json` prints: the keys of ``plan.json``, and more."""
        return self._answer.to_json()

    def save(self, path: str | Path) -> None:
        """Write ``plan.json`` to a path."""
        self._plan.save(Path(path))

    def svg(self) -> str:
        """A picture of the predicted step, as a text in SVG."""
        from pipectl.report.gantt import gantt_svg

        return gantt_svg(self.timeline, "")

    def __repr__(self) -> str:
        step = format_time(self.step_time_s)
        return f"<pipectl.Plan {self.name}: {self.summary}; {step} per step>"

    def _repr_html_(self) -> str:
        from pipectl.cli.views.plan import mark_lines, verdict

        answer, plan = self._answer, self._plan
        names = {operator.id: operator.name for operator in answer.inputs.profile.operators}
        return render(
            "notebook.html.j2",
            title=f"{plan.name}: {plan.summary}",
            state="",
            is_bad=False,
            lines=[
                *plan.describe_prediction(answer.inputs.cluster, answer.range_s),
                *mark_lines(plan),
            ],
            facts=[(label, text, "") for label, text in verdict(answer)],
            plan=plan,
            names=names,
            pictures={"the predicted step": self.svg()},
            notes=[
                *(("warning", text) for text in self.warnings),
                *(("assumed", text) for text in plan.assumptions),
            ],
        )

    def __rich__(self) -> Any:
        from pipectl.cli.views.plan import step_view

        return step_view(self._answer)
