"""The loss and the user's metrics over the micro-batches of one evaluation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

from pipectl.capture.factories import call, call_in_training
from pipectl.errors import CaptureError

_REDUCE = "let a function or class of your own reduce it to one, for example by .mean()"


class Metrics:
    """Accumulates the loss and the user's metrics over the micro-batches of one evaluation.

    A metric with ``update(outputs, targets)`` and ``compute()`` is used in this way, from a fresh
    copy each time, after ``reset()`` if it has that; a plain function is averaged, weighted by
    samples. The loss is weighted as in training: a micro-batch without weight (no valid token, say)
    may have none.

    Args:
        metrics: by name, as in the spec.
        weigh: returns the weight of a micro-batch in the loss, from its targets; None weighs by
            samples.
        adds_up: whether losses are added up instead.

    Raises:
        CaptureError: a metric cannot be copied or reset.
    """

    def __init__(
        self,
        metrics: Mapping[str, Any],
        weigh: Callable[[Any], float] | None = None,
        *,
        adds_up: bool = False,
    ) -> None:
        self._weigh, self._adds_up = weigh, adds_up
        self._metrics = {
            name: call(_fresh, _key(name), metric) if is_stateful(metric) else metric
            for name, metric in metrics.items()
        }
        self._sums: dict[str, float] = {}
        self._loss: float = 0.0
        self._weight: float = 0
        self._samples = 0

    def add(self, samples: int, loss: float, outputs: Any, targets: Any) -> None:
        """Add one micro-batch.

        Args:
            loss: of the micro-batch.
            outputs: of the model, which the metrics receive.

        Raises:
            WorkerError: a metric raises.
            CaptureError: a function gives no number.
        """
        self._samples += samples
        weight = samples if self._weigh is None else self._weigh(targets)
        if weight:
            self._loss += loss if self._adds_up else loss * weight
            self._weight += weight
        for name, metric in self._metrics.items():
            update = metric.update if is_stateful(metric) else metric
            value = call_in_training(update, _key(name), outputs, targets)
            if not is_stateful(metric):
                self._sums[name] = self._sums.get(name, 0.0) + _number(name, value) * samples

    def result(self) -> dict[str, float]:
        """The loss and every metric by name; the loss is NaN if no micro-batch has a weight.

        Raises:
            WorkerError: a metric raises.
            CaptureError: a metric gives no number.
        """
        loss = math.nan
        if self._weight:
            loss = self._loss if self._adds_up else self._loss / self._weight
        means = {name: total / self._samples for name, total in self._sums.items()}
        computed = {
            name: _number(name, call_in_training(metric.compute, _key(name)))
            for name, metric in self._metrics.items()
            if is_stateful(metric)
        }
        return {"loss": loss, **means, **computed}


def _fresh(metric: Any) -> Any:
    """Return a copy of a metric that has seen nothing, whatever it keeps outside of itself."""
    metric = copy.deepcopy(metric)
    reset = getattr(metric, "reset", None)
    if callable(reset):
        reset()
    return metric


def _key(name: str) -> str:
    return f"evaluation.metrics.{name}"


def is_stateful(metric: Any) -> bool:
    """Whether a metric is computed from all samples, not averaged over micro-batches."""
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _number(name: str, value: Any) -> float:
    """The result of a metric as a number; refuses anything else."""
    shape = getattr(value, "shape", None)
    if isinstance(value, int | float) or shape == ():
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # such as a complex number
            shape = None
    hint = _REDUCE
    if value is None:
        what, hint = "nothing", "return a number"
    elif isinstance(value, Mapping):
        names = ", ".join(map(repr, list(value)[:3]))
        what = f"a {type(value).__name__} with {names or 'nothing'}"
        hint = "name each of these metrics by itself under evaluation.metrics"
    elif shape is None:
        what = f"a {type(value).__name__}"
    else:
        what = f"a tensor of shape {list(shape)}"
    raise CaptureError(f"{_key(name)}: must give one number, but gave {what}", hint=hint)
