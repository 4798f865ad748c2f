"""The weight in a step's loss of what a rank computes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from torch import Tensor

from pipectl.capture.step import target_weight, weighted
from pipectl.runtime.reduction import group_of
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import Batch, Step, StepInput, narrowed
from pipectl.runtime.waiting import wait


class LossShares:
    """Weights of the parts of the loss that this rank's replica of the loss stage computes.

    Args:
        stage: the loss stage.
        weigh: the job's function of targets; None weighs by samples.
        group: of the replicas of the loss stage; None on all other ranks.
        name: of ``weigh``, for errors.
        apart: whether the second rank of the group begins the backwards of the first one's loss.
    """

    def __init__(
        self,
        rank: int,
        stage: int,
        weigh: Callable[[Any], Any] | None,
        group: MPI.Comm | None,
        name: str,
        *,
        apart: bool = False,
    ) -> None:
        self._rank = rank
        self._stage = stage
        self._weigh = weigh
        self._group = group
        self._name = name
        self._apart = apart

    @property
    def reads_targets(self) -> bool:
        """Whether this rank must see all its targets before the step begins."""
        return self._weigh is not None and self._group is not None

    def of(self, step: Step, batches: Sequence[Batch] = ()) -> list[float]:
        """The weight of every micro-batch, or of this rank's part of it. Collective if they
        depend on targets.

        Args:
            batches: of the pieces of the pass, where they do.
        """
        if self.reads_targets:
            return self._by_targets(step, batches)
        parts, total = step.parts(self._rank, self._stage), sum(step.sizes)
        sizes = [parts[i].size if i in parts else size for i, size in enumerate(step.sizes)]
        return [size / total for size in sizes]

    def step_input(
        self, step: Step, batches: Iterator[Batch], seed: tuple[int | str, ...], scale: float = 1.0
    ) -> StepInput:
        """What a pass works on; batches are read at once where weights depend on them."""
        known = list(batches) if self.reads_targets else []
        return StepInput(
            weights=self.of(step, known),
            batches=iter(known) if self.reads_targets else batches,
            seed=seed,
            scale=scale,
        )

    def computed(self, step: Step) -> list[int]:
        """The micro-batches whose loss, or part of it, this rank computes; in order."""
        return list(step.parts(self._rank, self._stage))

    def loss(self, step: Step, losses: Sequence[Tensor], weights: Sequence[float]) -> float:
        """What this rank adds to the loss of the step; NaN where it computes none of it."""
        own = self.computed(step)
        if not own:
            return 0.0 if self._group is not None else float("nan")
        return weighted(losses, [weights[index] for index in own])

    def _by_targets(self, step: Step, batches: Sequence[Batch]) -> list[float]:
        assert self._weigh is not None
        assert self._group is not None
        assert step.pieces is not None
        loaded = dict(zip(step.pieces, batches, strict=True))
        table = np.zeros((len(step.sizes), self._group.size))
        for index, rows in step.parts(self._rank, self._stage).items():
            targets = narrowed(loaded[index][1], rows, step.pieces[index])
            table[index, self._group.rank] = target_weight(self._weigh, self._name, targets)
        if self._group.size > 1:
            wait([self._group.Iallreduce(MPI.IN_PLACE, table)])  # adding zeros changes no bit
        total = float(sum(table.ravel().tolist()))
        mine: list[float] = table[:, 0 if self._apart else self._group.rank].tolist()
        return [weight / total if total else 0.0 for weight in mine]


def loss_shares_of(setup: Setup) -> LossShares:
    """Collective among the ranks that compute the loss or begin its backward."""
    rank, stage = setup.communicator.rank, setup.cut.loss_stage
    losing, seeding = setup.plan.stages[stage].ranks, setup.plan.stages[stage].updating_ranks
    apart = seeding != losing
    ranks = (*losing, *seeding) if apart else losing
    group = None
    if rank in ranks:
        group = group_of(setup.communicator, ranks, len(setup.plan.stages))
    weigh, name = setup.job.weight(), setup.job.spec.loss.weight
    return LossShares(rank, stage, weigh, group, name, apart=apart)
