"""Evaluations: the held-out data through the stages, and metrics on the rank that has the loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedGraph, CapturedJob, Slot
from pipectl.capture.factories import call_in_training
from pipectl.capture.slices import Rows
from pipectl.capture.step import target_weight
from pipectl.errors import CaptureError
from pipectl.runtime.division import Division
from pipectl.runtime.engine import Engine
from pipectl.runtime.feed import Demand, Feed, wants
from pipectl.runtime.layout import Tensors
from pipectl.runtime.step import Batch, Step, StepRun
from pipectl.runtime.waiting import broadcast, gather_all
from pipectl.schedule import Channel, lower_evaluation


class Metrics:
    """Accumulates the loss and the user's metrics over the micro-batches of one evaluation.

    A metric with ``update(outputs, targets)`` and ``compute()`` is used in this way, from a fresh
    copy each time; a plain function is averaged, weighted by samples. The loss is weighted as in
    training: a micro-batch without weight (no valid token, say) may have none.

    Args:
        metrics: by name, as in the spec.
        graph_of: returns the evaluation graph for micro-batches of a shape, whose outputs the
            metrics receive.
        weigh: returns the weight of a micro-batch in the loss, from its targets; None weighs by
            samples.
    """

    def __init__(
        self,
        metrics: Mapping[str, Any],
        graph_of: Callable[[int, int], CapturedGraph],
        weigh: Callable[[Any], float] | None = None,
    ) -> None:
        self._graph_of = graph_of
        self._weigh = weigh
        self._metrics = {n: copy.deepcopy(m) if _is_stateful(m) else m for n, m in metrics.items()}
        self._sums: dict[str, float] = {}
        self._loss: float = 0.0
        self._weight: float = 0
        self._samples = 0

    def add(self, rows: Rows, results: Tensors, targets: Any) -> None:
        """Add the loss and outputs among the ``results`` of one micro-batch."""
        graph, size = self._graph_of(*rows.shape), rows.size
        loss = results[Slot(graph.loss)]
        assert isinstance(loss, Tensor)
        self._samples += size
        weight = size if self._weigh is None else self._weigh(targets)
        if weight:
            self._loss += float(loss) * weight
            self._weight += weight
        outputs = _outputs(graph, rows, results) if self._metrics else None
        for name, metric in self._metrics.items():
            update = metric.update if _is_stateful(metric) else metric
            value = call_in_training(update, f"evaluation.metrics.{name}", outputs, targets)
            if not _is_stateful(metric):
                self._sums[name] = self._sums.get(name, 0.0) + _number(name, value) * size

    def result(self) -> dict[str, float]:
        """The loss and every metric by name; the loss is NaN if no micro-batch has a weight."""
        loss = self._loss / self._weight if self._weight else math.nan
        means = {name: total / self._samples for name, total in self._sums.items()}
        computed = {
            name: _number(name, call_in_training(metric.compute, f"evaluation.metrics.{name}"))
            for name, metric in self._metrics.items()
            if _is_stateful(metric)
        }
        return {"loss": loss, **means, **computed}


def _is_stateful(metric: Any) -> bool:
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _number(name: str, value: Any) -> float:
    """The result of a metric as a number; refuses anything else."""
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


def _outputs(graph: CapturedGraph, rows: Rows, results: Tensors) -> Any:

    def value(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return graph.size_at(item, *rows.shape)
        if not isinstance(item, str):
            return item
        tensor = results.get(Slot(item))
        return None if tensor is None else tensor.cpu()

    return pytree.tree_unflatten(list(map(value, graph.outputs)), graph.output_spec)


class Evaluator:
    """Evaluates on all ranks together; of the replicas of a stage, only the first takes part.

    Args:
        communicator: of all ranks.
        engine: of the evaluation graph.
        ranks: the first of every stage.
        writes: names of the buffers that an evaluation writes, on all ranks.
        reader: the rank that reads the data for all; None if each reads what it needs.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        job: CapturedJob,
        division: Division,
        engine: Engine,
        ranks: Sequence[int],
        writes: set[str],
        reader: int | None,
    ) -> None:
        self._communicator, self._job, self._division = communicator, job, division
        assert job.evaluation_loader is not None
        self._engine, self._loader, self.writes = engine, job.evaluation_loader, writes
        self._stages = tuple(i for i, rank in enumerate(ranks) if rank == communicator.rank)
        self._channels = tuple(
            Channel(*lane, ranks[lane.source], ranks[lane.target], size_bytes=0)
            for lane in sorted(engine.cut.lanes)
        )
        self._loss_rank = ranks[engine.cut.loss_stage]
        self._metrics = job.metrics()
        self._reads_for_all = reader == communicator.rank
        has_loss = communicator.rank == self._loss_rank
        mine = [engine.stages[i] for i in self._stages]
        wanted = wants(engine.cut.graph, mine, training=False, targets=has_loss)
        reading = gather_all(communicator, has_loss or bool(wanted))
        every = dict(enumerate(division.evaluated))
        needs = {rank: every for rank, reads in enumerate(reading) if reads or rank == reader}
        losses = {self._loss_rank: every}
        self._demand = Demand(communicator.rank, division.evaluated, needs, losses)
        assert job.spec.evaluation is not None
        source = f"evaluation.data.factory: {job.spec.evaluation.data.factory}"
        size = division.evaluation_size
        self._feed = Feed(communicator.Dup(), self._loader, size, source, reader, wanted)
        self._weigh = None
        if (weigh := job.weight()) is not None:
            self._weigh = partial(target_weight, weigh, job.spec.loss.weight)

    def learn(self) -> None:
        """Send a micro-batch of every shape, so that both ends of all channels know all layouts.

        A metric that fails on the first micro-batch does so here, not after an hour of training.
        """
        for rows in self._division.evaluation_sizes:
            is_first = rows == self._division.evaluated[0]
            self._engine.on_evaluated = self._fresh_metrics().add if is_first else None
            example = partial(self._loader.example, rows.whole, length=rows.length)
            batches = iter([example()] if self._stages else ())
            self._run([rows], batches, lambda _: None, "layouts")

    def evaluate(self, step: int) -> dict[str, float]:
        """The loss and every metric by name, on every rank.

        Args:
            step: the last step before the evaluation.
        """
        metrics = self._fresh_metrics()
        self._engine.on_evaluated = metrics.add
        planned = self._loader.epoch(0)
        self._feed.open(planned)
        taken = self._feed.take(self._demand, planned, ahead=1)
        self._run(self._division.evaluated, *taken, "evaluation", step)
        self._feed.finish()
        self._engine.board.phase("computing metrics")
        mine = metrics.result() if self._communicator.rank == self._loss_rank else {}
        return broadcast(self._communicator, mine, self._loss_rank)

    def _fresh_metrics(self) -> Metrics:
        return Metrics(self._metrics, self._job.evaluation_graph, self._weigh)

    def _run(
        self,
        sizes: Sequence[Rows],
        batches: Iterator[Batch],
        meet: Callable[[int], None],
        *seed: int | str,
    ) -> None:
        rank = self._communicator.rank
        actions = lower_evaluation(self._channels, self._stages, rank, len(sizes))
        step = Step(actions, self._channels, rank, sizes, pieces=dict(enumerate(sizes)))
        seeds = self._job.spec.training.seed, *seed
        run = StepRun(step, (), batches, seeds, meet=meet, loads=self._reads_for_all)
        self._engine.run(run)
