"""Division of the data into steps and micro-batches, with their sizes and weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from pipectl.capture import CapturedJob
from pipectl.capture.data import Loader, Samples, split_batch
from pipectl.capture.slices import Rows
from pipectl.capture.step import target_weight, weighted_loss
from pipectl.errors import CaptureError, MismatchError
from pipectl.plan import Plan
from pipectl.runtime.reduction import group_of
from pipectl.runtime.step import Batch, Step, StepRun, narrowed
from pipectl.runtime.waiting import gather_all, wait


@dataclass(frozen=True)
class Division:
    """The division of training and held-out data.

    Attributes:
        planned: the micro-batch of the plan: full, and of the largest length.
        sizes: micro-batches of every shape in training, largest first.
        evaluated: the micro-batches of an evaluation, in order.
        evaluation_size: samples of each, except the last of a length.
    """

    planned: Rows
    sizes: tuple[Rows, ...]
    evaluated: tuple[Rows, ...]
    evaluation_size: int

    @property
    def evaluation_sizes(self) -> list[Rows]:
        """Micro-batches of every shape in evaluation, largest first."""
        return sorted(set(self.evaluated), reverse=True)

    @classmethod
    def of(
        cls, job: CapturedJob, plan: Plan, held_out: Loader | None, communicator: MPI.Comm
    ) -> Division:
        """Divide the data; collective.

        Raises:
            MismatchError: ranks have different numbers of samples, or lengths.
            CaptureError: the data do not fill a batch, or evaluation would not end.
        """
        spec, size = job.spec, plan.micro_batch_size
        batches = _agreed("data", job.loader, communicator)
        if not batches:
            raise CaptureError(
                f"data: {job.loader.samples} samples fill no batch of {spec.training.batch_size}",
                cure="make the batch smaller, or set data.drop_last: false",
            )
        planned, evaluated = Rows.of(size, job.loader.lengths[-1]), list[Rows]()
        evaluation_size = (spec.evaluation and spec.evaluation.batch_size) or size
        if held_out is not None:
            if held_out.samples is None:
                raise CaptureError(
                    "evaluation.data: is iterable, so that its end is not known",
                    cure="use a dataset with __len__ and __getitem__ for evaluation",
                )
            held_out_batches = _agreed("evaluation.data", held_out, communicator)
            evaluated = _micro_batches(held_out_batches, evaluation_size)
        sizes = {planned, *_micro_batches(batches, size)}
        return cls(planned, tuple(sorted(sizes, reverse=True)), tuple(evaluated), evaluation_size)


def _micro_batches(batches: Sequence[Samples], size: int) -> list[Rows]:
    return [
        Rows.of(samples, batch.length)
        for batch in batches
        for samples in split_batch(batch.size, size)
    ]


def _agreed(section: str, loader: Loader, communicator: MPI.Comm) -> list[Samples]:
    """The batches of the first epoch, after a check that all ranks have the same."""
    batches = loader.epoch(0)
    found = gather_all(communicator, (loader.samples, hash(tuple(batches))))
    counts = sorted({samples for samples, _ in found}, key=str)
    if len(set(found)) > 1:
        what = f"numbers of samples: {counts}" if len(counts) > 1 else "lengths of samples"
        raise MismatchError(
            f"{section}: the ranks find different {what}",
            cure="check that all nodes see the same files",
        )
    return batches


class LossShares:
    """Weights of the parts of the loss that this rank's replica of the loss stage computes.

    The constructor is collective among the ranks that compute the loss or begin its backward. If
    these differ, the ranks that begin the backward use the loss of those that compute it.

    Args:
        stage: the loss stage.
    """

    def __init__(self, communicator: MPI.Comm, job: CapturedJob, plan: Plan, stage: int) -> None:
        self._weigh, self._name = job.weight(), job.spec.loss.weight
        losing, seeding = plan.stages[stage].ranks, plan.stages[stage].updating_ranks
        self._seeded_elsewhere = seeding != losing
        ranks = (*losing, *seeding) if self._seeded_elsewhere else losing
        self._group: MPI.Comm | None = None
        if communicator.rank in ranks:
            self._group = group_of(communicator, ranks, len(plan.stages))

    def make_run(
        self, step: Step, batches: Iterator[Batch], seed: tuple[int | str, ...], scale: float = 1.0
    ) -> StepRun:
        """The run of a step; batches are read at once if weights depend on them."""
        if self._weigh is None or self._group is None:
            total = sum(rows.size for rows in step.sizes)
            shares = [step.losses.get(i, rows).size / total for i, rows in enumerate(step.sizes)]
            return StepRun(step, shares, batches, seed, scale)
        known = list(batches)
        return StepRun(step, self._by_targets(step, known), iter(known), seed, scale)

    def loss(self, run: StepRun) -> float:
        """This rank's part of the loss of a step; NaN if it computes none of it."""
        losses = run.step.losses
        if not losses:
            return 0.0 if self._group is not None else float("nan")
        return weighted_loss(run.losses, [run.weights[index] for index in losses])

    def _by_targets(self, step: Step, batches: Sequence[Batch]) -> list[float]:
        assert self._weigh is not None
        assert self._group is not None
        assert step.pieces is not None
        loaded = dict(zip(step.pieces, batches, strict=True))
        table = np.zeros((len(step.sizes), self._group.size))
        for index, rows in step.losses.items():
            targets = narrowed(loaded[index][1], rows, step.pieces[index])
            table[index, self._group.rank] = target_weight(self._weigh, self._name, targets)
        if self._group.size > 1:
            wait([self._group.Iallreduce(MPI.IN_PLACE, table)])  # adding zeros changes no bit
        total = float(sum(table.ravel().tolist()))
        mine: list[float] = table[:, 0 if self._seeded_elsewhere else self._group.rank].tolist()
        return [weight / total if total else 0.0 for weight in mine]
