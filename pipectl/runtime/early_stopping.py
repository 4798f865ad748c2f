"""Ending a training when a metric of its evaluations no longer improves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipectl.spec.models import EarlyStopping as EarlyStoppingSpec
from pipectl.units import plural


class EarlyStopping:
    """Decides from the results of the evaluations, which are the same on all ranks.

    Args:
        spec: None never ends a training.

    Attributes:
        metric_values: of all evaluations, in order.
        reason: why the training ends after the last of them; empty if it does not.
    """

    def __init__(self, spec: EarlyStoppingSpec | None) -> None:
        self._spec = spec
        self.metric_values: list[float] = []
        self.reason = ""

    def watch(self, result: Mapping[str, float]) -> None:
        """Take in the result of an evaluation."""
        if self._spec is not None:
            self.move_on([result[self._spec.metric]])

    def move_on(self, values: Sequence[float]) -> None:
        """Take in values of the metric, such as those of a checkpoint."""
        self.metric_values += values
        if (spec := self._spec) is None:
            return
        count = count_without_improvement(self.metric_values, spec.mode, spec.min_delta)
        waited = plural(spec.patience, "evaluation")
        is_over = count >= spec.patience
        self.reason = f"{spec.metric} has not improved in {waited}" if is_over else ""


def count_without_improvement(values: Sequence[float], mode: str, min_delta: float) -> int:
    """How many values at the end are not better than the best one before them.

    NaN is never better, and every number is better than NaN.

    Args:
        mode: ``min`` if smaller is better, or ``max``.
        min_delta: by how much more than this a value must be better.
    """
    best, count = float("nan"), 0
    for value in values:
        gain = best - value if mode == "min" else value - best
        if gain > min_delta or (best != best and value == value):
            best, count = value, 0
        else:
            count += 1
    return count
