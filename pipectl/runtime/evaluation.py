"""Metrics over held-out data, gathered on the rank that computes the loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedGraph, Slot
from pipectl.capture.factories import call
from pipectl.errors import CaptureError
from pipectl.runtime.layout import Tensors


class Metrics:
    """Accumulates the loss and the user's metrics over the micro-batches of one evaluation.

    A metric with ``update(outputs, targets)`` and ``compute()`` is used as such, from a fresh copy
    each time; a plain function is averaged, weighted by samples. The loss is weighted as in
    training: a micro-batch without weight (no valid token, say) may have none.

    Args:
        metrics: by name, as the spec gives them.
        graph_of: the evaluation graph for a number of samples, whose outputs the metrics see.
        weigh: gives the weight of a micro-batch in the loss, from its targets; None weighs by
            samples.
    """

    def __init__(
        self,
        metrics: Mapping[str, Any],
        graph_of: Callable[[int], CapturedGraph],
        weigh: Callable[[Any], float] | None = None,
    ) -> None:
        self._graph_of = graph_of
        self._weigh = weigh
        self._stateful = {n: copy.deepcopy(m) for n, m in metrics.items() if _is_stateful(m)}
        self._functions: dict[str, Callable[[Any, Any], Any]] = {
            name: metric for name, metric in metrics.items() if not _is_stateful(metric)
        }
        self._sums: dict[str, float] = {}
        self._loss: float = 0.0
        self._weight: float = 0
        self._samples = 0

    def add(self, size: int, results: Tensors, targets: Any) -> None:
        """One micro-batch of ``size`` samples: the loss and outputs among ``results`` count."""
        graph = self._graph_of(size)
        loss = results[Slot(graph.loss)]
        assert isinstance(loss, Tensor)
        self._samples += size
        self._add_loss(loss, size if self._weigh is None else self._weigh(targets))
        if not self._stateful and not self._functions:
            return
        outputs = _outputs(graph, size, results)
        for name, metric in self._stateful.items():
            call(metric.update, f"evaluation.metrics.{name}", outputs, targets)
        for name, function in self._functions.items():
            value = call(function, f"evaluation.metrics.{name}", outputs, targets)
            self._sum(name, _number(name, value) * size)

    def result(self) -> dict[str, float]:
        """The loss and every metric by name; the loss is NaN where nothing has a weight."""
        loss = self._loss / self._weight if self._weight else math.nan
        means = {name: total / self._samples for name, total in self._sums.items()}
        computed = {
            name: _number(name, call(metric.compute, f"evaluation.metrics.{name}"))
            for name, metric in self._stateful.items()
        }
        return {"loss": loss, **means, **computed}

    def _add_loss(self, loss: Tensor, weight: float) -> None:
        if weight:
            self._loss += float(loss) * weight
            self._weight += weight

    def _sum(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value


def _is_stateful(metric: Any) -> bool:
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _number(name: str, value: Any) -> float:
    """What a metric gave, as a number.

    Raises:
        CaptureError: it is none.
    """
    if isinstance(value, int | float | np.number) or getattr(value, "shape", None) == ():
        return float(value)
    shape = getattr(value, "shape", None)
    found = f"a {type(value).__name__}" if shape is None else f"a tensor of shape {list(shape)}"
    raise CaptureError(
        f"evaluation.metrics.{name}: must give one number, but gave {found}",
        cure="reduce it, for example with .mean()",
    )


def _on_host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def _outputs(graph: CapturedGraph, size: int, results: Tensors) -> Any:
    """What the model returned, with tensors on the host."""

    def value(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return graph.size_at(item, size)
        return _on_host(results.get(Slot(item))) if isinstance(item, str) else item

    return pytree.tree_unflatten(list(map(value, graph.outputs)), graph.output_spec)
