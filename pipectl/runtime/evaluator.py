"""Evaluations: the held-out data through the stages, and the metrics over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pipectl.capture import CapturedJob
from pipectl.capture.data import split_batch
from pipectl.capture.step import target_weight
from pipectl.runtime.evaluation import Metrics
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import Batch, Step, StepInput
from pipectl.runtime.waiting import barrier
from pipectl.schedule import lower_evaluation


class Evaluator:
    """Evaluates on all ranks together."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._rank = setup.communicator.rank
        self._seed = setup.job.spec.training.seed
        self._metrics = setup.job.metrics()
        self._weigh = _weight_of(setup.job)

    def learn(self) -> None:
        """Send a micro-batch of every size, so that all ends of the channels know all layouts."""
        setup = self._setup
        for size in setup.division.evaluation_sizes:
            held_out = setup.evaluation_loader or setup.job.loader
            assert setup.evaluating is not None
            setup.evaluating.run(self._step([size]), self._example(size, held_out))

    def evaluate(self, step: int) -> dict[str, float]:
        """The loss and every metric by name, on every rank.

        Args:
            step: behind which this is.
        """
        setup = self._setup
        assert setup.evaluating is not None
        assert setup.division.evaluation_samples is not None
        sizes = split_batch(setup.division.evaluation_samples, setup.division.evaluation_size)
        metrics = Metrics(self._metrics, setup.job.evaluation_graph, self._weigh)
        setup.evaluating.on_evaluated = metrics.add
        seed = self._seed, "evaluation", step
        given = StepInput((), self._batches(setup.division.evaluation_samples), seed)
        setup.evaluating.run(self._step(sizes), given)
        barrier(setup.communicator)
        root = setup.rank_of_stage[setup.evaluating.cut.loss_stage]
        mine = metrics.result() if self._rank == root else None
        result: dict[str, float] = setup.communicator.bcast(mine, root)
        return result

    def _batches(self, samples: int) -> Iterator[Batch]:
        loader = self._setup.evaluation_loader
        if loader is None:
            return iter(())
        return loader.micro_batches([(0, range(samples))], self._setup.division.evaluation_size)

    def _example(self, size: int, loader: Any) -> StepInput:
        batches = iter([loader.example(size)]) if self._setup.evaluated else iter(())
        return StepInput((), batches, (self._seed, "layouts"))

    def _step(self, sizes: Sequence[int]) -> Step:
        """Forwards of micro-batches of these sizes."""
        found, stages = self._setup.evaluation_channels, self._setup.evaluated
        actions = lower_evaluation(found, stages, self._rank, len(sizes)).body
        return Step.plain(actions, found, self._rank, sizes)


def _weight_of(job: CapturedJob) -> Callable[[Any], float] | None:
    """What weighs a micro-batch by its targets, as in training; None weighs by samples."""
    weigh = job.weight()
    return None if weigh is None else partial(target_weight, weigh, job.spec.loss.weight)
