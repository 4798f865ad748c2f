"""Evaluations: the held-out data through the stages, and metrics on the rank that has the loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedGraph, Slot
from pipectl.capture.data import split_batch
from pipectl.capture.factories import call
from pipectl.capture.step import target_weight
from pipectl.errors import CaptureError
from pipectl.runtime.layout import Tensors
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import Batch, Step, StepInput
from pipectl.runtime.waiting import barrier
from pipectl.schedule import lower_evaluation


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
        weight = size if self._weigh is None else self._weigh(targets)
        if weight:
            self._loss += float(loss) * weight
            self._weight += weight
        if not self._stateful and not self._functions:
            return
        outputs = _outputs(graph, size, results)
        for name, metric in self._stateful.items():
            call(metric.update, f"evaluation.metrics.{name}", outputs, targets)
        for name, function in self._functions.items():
            value = call(function, f"evaluation.metrics.{name}", outputs, targets)
            self._sums[name] = self._sums.get(name, 0.0) + _number(name, value) * size

    def result(self) -> dict[str, float]:
        """The loss and every metric by name; the loss is NaN where nothing has a weight."""
        loss = self._loss / self._weight if self._weight else math.nan
        means = {name: total / self._samples for name, total in self._sums.items()}
        computed = {
            name: _number(name, call(metric.compute, f"evaluation.metrics.{name}"))
            for name, metric in self._stateful.items()
        }
        return {"loss": loss, **means, **computed}


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
    description = (
        f"a {type(value).__name__}" if shape is None else f"a tensor of shape {list(shape)}"
    )
    raise CaptureError(
        f"evaluation.metrics.{name}: must give one number, but gave {description}",
        cure="reduce it, for example with .mean()",
    )


def _outputs(graph: CapturedGraph, size: int, results: Tensors) -> Any:

    def value(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return graph.size_at(item, size)
        if not isinstance(item, str):
            return item
        tensor = results.get(Slot(item))
        return None if tensor is None else tensor.cpu()

    return pytree.tree_unflatten(list(map(value, graph.outputs)), graph.output_spec)


class Evaluator:
    """Evaluates on all ranks together."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._rank = setup.communicator.rank
        self._seed = setup.job.spec.training.seed
        self._metrics = setup.job.metrics()
        self._weigh = None
        if (weigh := setup.job.weight()) is not None:
            self._weigh = partial(target_weight, weigh, setup.job.spec.loss.weight)

    def learn(self) -> None:
        """Send a micro-batch of every size, so that all ends of the channels know all layouts."""
        setup = self._setup
        for size in setup.division.evaluation_sizes:
            assert setup.evaluating is not None
            loader: Any = setup.evaluation_loader or setup.job.loader
            batches = iter([loader.example(size)] if setup.evaluated else ())
            step_input = StepInput((), batches, (self._seed, "layouts"))
            setup.evaluating.run(self._step([size]), step_input)

    def evaluate(self, step: int) -> dict[str, float]:
        """The loss and every metric by name, on every rank.

        Args:
            step: after which this is.
        """
        setup = self._setup
        samples, size = setup.division.evaluation_samples, setup.division.evaluation_size
        assert setup.evaluating is not None
        assert samples is not None
        metrics = Metrics(self._metrics, setup.job.evaluation_graph, self._weigh)
        setup.evaluating.on_evaluated = metrics.add
        batches: Iterator[Batch] = iter(())
        if setup.evaluation_loader is not None:
            batches = setup.evaluation_loader.micro_batches([(0, range(samples))], size)
        step_input = StepInput((), batches, (self._seed, "evaluation", step))
        setup.evaluating.run(self._step(split_batch(samples, size)), step_input)
        barrier(setup.communicator)
        root = setup.rank_of_stage[setup.evaluating.cut.loss_stage]
        mine = metrics.result() if self._rank == root else None
        result: dict[str, float] = setup.communicator.bcast(mine, root)
        return result

    def _step(self, sizes: Sequence[int]) -> Step:
        channels, stages = self._setup.evaluation_channels, self._setup.evaluated
        actions = lower_evaluation(channels, stages, self._rank, len(sizes)).body
        return Step.plain(actions, channels, self._rank, sizes)
