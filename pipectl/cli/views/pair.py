"""Two runs side by side as text: losses, speed, and how their jobs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from rich.console import Group, RenderableType

from pipectl.cli.console import plain, table
from pipectl.jobs.state import RunStatus
from pipectl.report.charts import titled
from pipectl.report.pair import Pair
from pipectl.runs import REHEARSAL, TRAINING
from pipectl.units import format_bytes, format_long_time, format_time, plural

Row = tuple[str, ...]
"""A label, and what each run has."""
_EVEN = 0.005
"""Relative difference of speeds that is none."""
_MAX_VALUE = 60
"""Maximum characters of a value of a job in a table."""


class PairView:
    """What is said of two runs, in the terminal and on a page."""

    def __init__(self, pair: Pair, statuses: tuple[RunStatus, RunStatus]) -> None:
        self.pair, self._statuses = pair, statuses
        self.names = [status.run.name for status in statuses]

    @property
    def verdict(self) -> Iterator[str]:
        """Sentences on their losses and their speed."""
        kinds = (one.record.kind if one.record else TRAINING for one in self._statuses)
        if REHEARSAL not in kinds:  # which has none
            yield self._compare_losses()
        first, second = (speed.samples_per_s for speed in self.pair.speeds)
        if first and second:
            ratio = max(first, second) / min(first, second)
            faster, slower = self.names if first > second else reversed(self.names)
            same = ratio - 1 < _EVEN
            how = f"{faster} is {ratio:.2f} times as fast as {slower}, by samples/s"
            yield f"speed: {'the same' if same else how}"

    def _compare_losses(self) -> str:
        common, equal = len(self.pair.common), self.pair.equal_steps
        if not common:
            return "they have no step in common"
        if equal == common:
            return f"losses: equal to the bit in {plural(common, 'common step')}"
        differ = f"different from {'then' if equal else 'the first step'} on"
        if (step := self.pair.first_not_finite) is not None:
            differ = f"not finite in step {step} of both"
        alike = f"equal to the bit for {plural(equal, 'step')}, " if equal else ""
        return f"losses: {alike}{differ}"

    @cached_property
    def figures(self) -> list[Row]:
        """What both have reached, and how fast."""
        return [row for row in self._figures() if any(row[1:])]

    def _figures(self) -> Iterator[Row]:
        first, second = self._statuses
        yield "state", first.job.state.value, second.job.state.value
        steps = (f"{one.step} of {one.steps}" for one in self._statuses)
        yield "steps", *steps
        for name, values in self.pair.losses.items():
            label = "loss, last common step" if name == "loss" else titled(name)
            yield label, *(_or_empty(value, "{:.6g}".format) or "none" for value in values)
        speeds = self.pair.speeds
        yield "median step", *(_or_empty(each.step_time_s, format_time) for each in speeds)
        yield "samples/s", *(_or_empty(each.samples_per_s, "{:.1f}".format) for each in speeds)
        predicted = (first.predicted_step_s, second.predicted_step_s)
        yield "predicted step", *(_or_empty(each, format_time) for each in predicted)
        peaks = [max((p.measured_bytes for p in one.peaks), default=None) for one in self._statuses]
        yield "memory of a rank", *(_or_empty(each, format_bytes) for each in peaks)
        ran = (_or_empty(one.times.run_s, format_long_time) for one in self._statuses)
        last = (" (last start)" if one.restarts else "" for one in self._statuses)
        yield "ran for", *(time and time + which for time, which in zip(ran, last, strict=True))
        hours = (first.times.node_hours, second.times.node_hours)
        yield "node-hours", *(_or_empty(each, "{:.3g}".format) for each in hours)
        plans = [one.plan.summary if one.plan else "" for one in self._statuses]
        yield "plan", *(text.partition(": ")[2] or text for text in plans)

    @cached_property
    def differences(self) -> list[Row] | None:
        """Keys in which their jobs differ; None if a job cannot be read."""
        differ = self.pair.differences
        if differ is None:
            return None
        return [(key, *map(_value, both)) for key, both in differ.items()]

    def draw(self) -> RenderableType:
        """All of it for a terminal."""
        parts: list[RenderableType] = [plain(line, "bold") for line in self.verdict]
        heads = ("", *self.names)
        parts += ["", table(heads, self.figures, left=heads, wrap=True), ""]
        if self.differences is None:
            parts += [plain("the job of one of them cannot be read", "dim")]
        elif self.differences:
            heads = ("in the jobs", *self.names)
            parts += [table(heads, self.differences, left=heads, wrap=True)]
        else:
            parts += [plain("their jobs are the same")]
        return Group(*parts)


def _or_empty(value: float | None, form: Any) -> str:
    return "" if value is None else form(value)


def value_text(value: Any) -> str:
    """A value of a job: texts as they are, the rest as JSON, which is YAML."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _value(value: Any) -> str:
    text = value_text(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
