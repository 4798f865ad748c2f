"""Evaluations: the held-out data through the stages, and metrics on the rank that has the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI
from torch import Tensor, fx

from pipectl.capture import CapturedGraph, CapturedJob, Slot
from pipectl.capture.shares import target_weight
from pipectl.capture.slices import Span
from pipectl.errors import WorkerError
from pipectl.runtime.division import Division
from pipectl.runtime.engine import Engine
from pipectl.runtime.evaluation_metrics import Metrics
from pipectl.runtime.feed import Demand, Feed, wants
from pipectl.runtime.layout import Tensors
from pipectl.runtime.rank_process import say
from pipectl.runtime.step import Batch, Step, StepRun
from pipectl.runtime.waiting import broadcast, gather_all
from pipectl.schedule import Channel, lower_evaluation
from pipectl.torch_api import pytree


def outputs_of(graph: CapturedGraph, span: Span, results: Tensors) -> Any:
    """The outputs of the user's model among the results of one micro-batch, on the host."""

    def value(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return graph.size_of_node(item, *span.shape)
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
        has_loss = self._has_loss = communicator.rank == self._loss_rank
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

        Every metric gets them, too: one that fails does so here, not after an hour of training.
        Some metrics have no result for so few samples. Then all held-out data are evaluated.

        Raises:
            WorkerError: a metric raises.
            CaptureError: a metric gives no number.
        """
        metrics = self._fresh_metrics()
        for span in self._division.evaluation_sizes:
            example = partial(self._loader.example, span.whole, length=span.length)
            batches = iter([example()] if self._stages else ())
            self._run([span], batches, lambda _: None, "layouts")
        fault = ""
        if self._has_loss:
            try:
                metrics.result()
            except WorkerError as error:
                fault = error.message
        if fault := broadcast(self._communicator, fault, self._loss_rank):
            if self._communicator.rank == 0:
                say(f"{fault}; it is tried on all held-out data")
            self.evaluate(0)

    def evaluate(self, step: int) -> dict[str, float]:
        """The loss and every metric by name, on every rank.

        Args:
            step: the last step before the evaluation.
        """
        metrics = self._fresh_metrics()
        planned = self._loader.epoch(0)
        self._feed.open(planned)
        taken = self._feed.take(self._demand, planned, ahead=1)
        self._run(self._division.evaluated, *taken, "evaluation", step)
        self._feed.finish()
        self._engine.board.phase("computing metrics")
        mine = metrics.result() if self._has_loss else {}
        return broadcast(self._communicator, mine, self._loss_rank)

    def _fresh_metrics(self) -> Metrics:
        """New metrics, which take all that is evaluated from now on."""
        metrics = Metrics(self._metrics, self._weigh, adds_up=self._job.spec.loss.adds_up)

        def add(span: Span, results: Tensors, targets: Any) -> None:
            graph = self._job.evaluation_graph(*span.shape)
            loss = results[Slot(graph.loss)]
            assert isinstance(loss, Tensor)
            outputs = outputs_of(graph, span, results) if self._metrics else None
            metrics.add(span.size, float(loss), outputs, targets)

        self._engine.on_evaluated = add
        return metrics

    def _run(
        self,
        sizes: Sequence[Span],
        batches: Iterator[Batch],
        compare: Callable[[int], None],
        *seed: int | str,
    ) -> None:
        rank = self._communicator.rank
        actions = lower_evaluation(self._channels, self._stages, rank, len(sizes))
        step = Step(actions, self._channels, rank, sizes, loads=dict(enumerate(sizes)))
        seeds = self._job.spec.training.seed, *seed
        run = StepRun(
            step, (), batches, seeds, compare_readings=compare, loads_for_others=self._reads_for_all
        )
        self._engine.run(run)
