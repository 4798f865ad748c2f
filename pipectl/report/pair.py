"""Two runs side by side: the losses and figures of their steps, and how their jobs differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile
from typing import Any, TypedDict

from pipectl.errors import PipectlError
from pipectl.files import read_limited
from pipectl.report.charts import Points, chart_svgs, titled
from pipectl.runs import Columns, RunDirectory, Speed, read_columns, read_speed
from pipectl.spec import JobSpec, SpecFile
from pipectl.spec.document import MAX_BYTES
from pipectl.spec.settings import differences

_PER_STEP = "loss", "samples_per_s", "tokens_per_s", "learning_rate", "gradient_norm"


class PairJson(TypedDict):
    """Two runs. Lists have a value per run; null is what a run has not.

    Args:
        runs: their names.
        steps: number of their last steps.
        common_steps: how many steps both have made.
        equal_steps: for how many of these, from the first on, the losses are finite and equal to
            the bit.
        losses: after the last of the common steps, by name, such as ``evaluation.loss``; null of a
            run without such evaluations.
        step_time_s, samples_per_s: medians of the steps under the last plan, without the first.
        differences: both values of every key in which their jobs differ; null if a job cannot be
            read.
    """

    runs: list[str]
    steps: list[int]
    common_steps: int
    equal_steps: int
    losses: dict[str, list[float | None]]
    step_time_s: list[float | None]
    samples_per_s: list[float | None]
    differences: dict[str, list[Any]] | None


def read_job(run: RunDirectory) -> JobSpec | None:
    """Return the job of a run; None if it cannot be read, as those of an older pipectl."""
    try:
        text = read_limited(run.job, MAX_BYTES).decode(errors="replace")
        return SpecFile.read(run.job, text=text).spec(check_files=False)
    except (OSError, PipectlError):
        return None


@dataclass(frozen=True)
class Pair:
    """Two runs, and the figures of their steps."""

    runs: tuple[RunDirectory, RunDirectory]
    columns: tuple[Columns, Columns]
    speeds: tuple[Speed, Speed]
    differences: dict[str, tuple[Any, Any]] | None

    @classmethod
    def load(cls, first: RunDirectory, second: RunDirectory) -> Pair:
        """Read both runs."""
        jobs = read_job(first), read_job(second)
        differ = None
        if jobs[0] is not None and jobs[1] is not None:
            differ = differences(jobs[0], jobs[1], shared=True)
        runs = first, second
        columns = read_columns(first), read_columns(second)
        return cls(runs, columns, (read_speed(first), read_speed(second)), differ)

    @cached_property
    def common(self) -> dict[int, tuple[float | None, float | None]]:
        """The losses of the steps that both have made, in order; None if not finite."""
        first, second = (
            {
                step: loss
                for step, loss, time_s in zip(
                    columns["step"],
                    columns["loss"],
                    columns.get("step_time_s", columns["loss"]),
                    strict=True,
                )
                if loss is not None or time_s is not None
            }
            for columns in self.columns
        )
        return {int(step or 0): (first[step], second[step]) for step in first if step in second}

    @property
    def equal_steps(self) -> int:
        """For how many common steps, from the first on, the losses are finite and equal."""
        every = self.common.values()
        return sum(1 for _ in takewhile(lambda both: both[0] == both[1] is not None, every))

    @property
    def first_not_finite(self) -> int | None:
        """The first common step whose losses are not finite, if all before it are equal."""
        step, both = next(islice(self.common.items(), self.equal_steps, None), (None, ()))
        return step if set(both) == {None} else None

    @property
    def losses(self) -> dict[str, list[float | None]]:
        """Losses and other metrics after the last step for which both have them, or one if the
        other has none at all."""
        found: dict[str, list[float | None]] = {}
        for name in dict.fromkeys(name for columns in self.columns for name in columns):
            if name == "loss" or name.startswith("evaluation."):
                first, second = (dict(self._points(columns, name)) for columns in self.columns)
                last = max((step for step in first if step in second), default=None)
                if last is not None:
                    found[name] = [first[last], second[last]]
                elif name != "loss" and not (first and second):
                    found[name] = [each[max(each)] if each else None for each in (first, second)]
        return found

    @staticmethod
    def _points(columns: Columns, name: str) -> Points:
        values = columns.get(name, [])
        return [
            (float(step or 0), float(value))
            for step, value in zip(columns["step"], values, strict=False)
            if value is not None and math.isfinite(value)
        ]

    def charts(self, names: Sequence[str]) -> list[str]:
        """Draw every figure of both runs by step, one picture each.

        Args:
            names: what the curves are called.
        """
        evaluated = [n for columns in self.columns for n in columns if n.startswith("evaluation.")]
        figures = {
            titled(figure): {
                name: self._points(columns, figure)
                for name, columns in zip(names, self.columns, strict=True)
            }
            for figure in dict.fromkeys((*_PER_STEP, *evaluated))
        }
        return chart_svgs(figures)

    def to_json(self) -> PairJson:
        """Return the documented JSON object."""
        return {
            "runs": [run.name for run in self.runs],
            "steps": [int(max(filter(None, each["step"]), default=0)) for each in self.columns],
            "common_steps": len(self.common),
            "equal_steps": self.equal_steps,
            "losses": self.losses,
            "step_time_s": [speed.step_time_s for speed in self.speeds],
            "samples_per_s": [speed.samples_per_s for speed in self.speeds],
            "differences": None
            if self.differences is None
            else {key: list(both) for key, both in self.differences.items()},
        }
