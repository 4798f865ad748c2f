"""Division of the data into steps and micro-batches, their sizes, and a rank's parts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import numpy as np
from mpi4py import MPI

from pipectl.capture import CapturedJob, Cut
from pipectl.capture.data import Loader, Samples, split_batch
from pipectl.capture.shares import loss_parts, target_weight
from pipectl.capture.slices import Span
from pipectl.errors import MismatchError
from pipectl.plan import Plan
from pipectl.runtime.feed import Compare, Demand, Feed, wants
from pipectl.runtime.reduction import group_of
from pipectl.runtime.stage import Stage
from pipectl.runtime.step import Batch, Step, StepRun, Update, loads_of, narrowed, parts_of
from pipectl.runtime.waiting import gather_all, wait
from pipectl.schedule import plan_of_step


@dataclass(frozen=True)
class Division:
    """The division of training and held-out data.

    Attributes:
        planned: the micro-batch of the plan: full, and of the largest length.
        sizes: micro-batches of every shape in training, largest first.
        evaluated: the micro-batches of an evaluation, in order.
        evaluation_size: samples of each, except the last of a length.
    """

    planned: Span
    sizes: tuple[Span, ...]
    evaluated: tuple[Span, ...]
    evaluation_size: int

    @property
    def evaluation_sizes(self) -> list[Span]:
        """Micro-batches of every shape in evaluation, largest first."""
        return sorted(set(self.evaluated), reverse=True)

    @classmethod
    def of(cls, job: CapturedJob, plan: Plan, communicator: MPI.Comm) -> Division:
        """Divide the data; collective.

        Raises:
            MismatchError: ranks have different numbers of samples, or lengths.
            CaptureError: the data do not fill a batch, or evaluation would not end.
        """
        spec, size, held_out = job.spec, plan.micro_batch_size, job.evaluation_loader
        batches = _agreed("data", job.loader, communicator)
        job.check_counts()
        planned, evaluated = Span.of(size, job.loader.lengths[-1]), list[Span]()
        evaluation_size = (spec.evaluation and spec.evaluation.batch_size) or size
        if held_out is not None:
            held_out_batches = _agreed("evaluation.data", held_out, communicator)
            evaluated = _micro_batches(held_out_batches, evaluation_size)
        sizes = {planned, *_micro_batches(batches, size)}
        return cls(planned, tuple(sorted(sizes, reverse=True)), tuple(evaluated), evaluation_size)


def _micro_batches(batches: Sequence[Samples], size: int) -> list[Span]:
    return [
        Span.of(samples, batch.length)
        for batch in batches
        for samples in split_batch(batch.size, size)
    ]


def _agreed(section: str, loader: Loader, communicator: MPI.Comm) -> list[Samples]:
    """The batches of the first epoch, after a check that all ranks have the same."""
    batches = loader.epoch(0)
    found = gather_all(communicator, (loader.samples, _digest(batches)))
    counts = sorted({samples for samples, _ in found}, key=str)
    if len(set(found)) > 1:
        what = f"numbers of samples: {counts}" if len(counts) > 1 else "lengths of samples"
        raise MismatchError(
            f"{section}: the ranks find different {what}",
            hint="check that all nodes see the same files, and let the dataset have all samples in "
            "every process: pipectl divides batches among ranks itself (no sampler or split by "
            "rank), and nothing may be left out by a generator of its own, the time or the process",
        )
    return batches


def _digest(batches: Sequence[Samples]) -> bytes:
    """Equal for equal batches in every process, which Python's ``hash`` is not."""
    rows = [(b.positions.start, b.positions.stop, b.length, b.tokens) for b in batches]
    return blake2b(np.array(rows, np.int64).tobytes()).digest()


class Batches:
    """What a rank loads and computes of every batch, and how its parts of the loss are weighted.

    The constructor is collective among the ranks that compute the loss or begin its backward. If
    these differ, the ranks that begin the backward use the loss of those that compute it.

    Args:
        stages: of this rank, by index.
        cut: of the training graph.
        once: whether one rank reads the data for all.

    Attributes:
        feed: the training data of this rank.
        reader: the rank that reads all data; None if each rank reads what it needs.
        loader: of the training data; None if this rank reads none.
        reads: whether a stage of this rank computes with the data; the rank may also read them for
            the weights of its losses alone.
        step_for: this rank's step for a number of samples, with sequences of a length; made once.
        weigh: returns the weight of a micro-batch from its targets; None without one.
        adds_up: whether the losses of micro-batches are added up.
        name: of that function, in the spec.
        seed: of the run.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        job: CapturedJob,
        plan: Plan,
        stages: Mapping[int, Stage],
        cut: Cut,
        *,
        once: bool = False,
    ) -> None:
        self.communicator, self.seed = communicator, job.spec.training.seed
        self._loss_stage = cut.loss_stage
        self.weigh = job.weight() if cut.loss_stage in stages else None
        self.name, self.adds_up = job.spec.loss.weight, job.spec.loss.adds_up
        self.reads = any(stage.reads(training=True) for stage in stages.values())
        weighing = None if self.weigh is None else cut.loss_stage
        self._reading = [
            i for i, stage in stages.items() if stage.reads(training=True) or i == weighing
        ]
        found = gather_all(communicator, (self._reading, self.reads))
        self._reading_of = [reading for reading, _ in found]
        self.loader = job.loader if self._reading else None
        self.step_for: Callable[[int, int], Step] = cache(
            lambda samples, length: self.step_of(plan_of_step(plan, samples), length)
        )
        self._load_whole = job.loader.takes_whole
        self.reader: int | None = None
        if once:
            lowest = min((stage for each in self._reading_of for stage in each), default=0)
            self.reader = plan.stages[lowest].ranks[0]
        self._weighs = job.spec.loss.weigher is not None
        self._per_step = plan.micro_batches
        self.feed = Feed(
            communicator.Dup(),
            job.loader,
            plan.micro_batch_size,
            f"data.factory: {job.spec.data.factory}",
            self.reader,
            wants(cut.graph, stages.values(), training=True, targets=weighing is not None),
        )
        self._demand_for: Callable[[int, int], Demand] = cache(
            lambda samples, length: self._demand_of(plan_of_step(plan, samples), length)
        )
        self._tokens_per_sample = cut.graph.tokens_per_sample
        loss_stage = plan.stages[cut.loss_stage]
        losing, seeding = loss_stage.ranks, loss_stage.updating_ranks
        self._seeded_elsewhere = seeding != losing
        ranks = (*losing, *seeding) if self._seeded_elsewhere else losing
        self._late = frozenset(
            rank
            for rank, (reading, reads) in enumerate(found)
            if rank in seeding and rank not in losing and reading and not reads
        )
        self._loss_ranks = (*losing, *self._late)
        self._group: MPI.Comm | None = None
        if communicator.rank in ranks:
            self._group = group_of(communicator, ranks, len(plan.stages))

    def step_of(self, plan: Plan, length: int) -> Step:
        """This rank's step of a plan, with sequences of a length."""
        rank, whole = self.communicator.rank, self._load_whole
        return Step.of(plan, rank, self._reading, self._loss_stage, length=length, load_whole=whole)

    def _demand_of(self, plan: Plan, length: int) -> Demand:
        step, ranks = self.step_for(plan.batch_size, length), range(self.communicator.size)
        needs = {
            rank: loads_of(plan, rank, reading, length, load_whole=self._load_whole)
            for rank, reading in enumerate(self._reading_of)
            if reading
        }
        losses = {rank: parts_of(plan, rank, self._loss_stage, length) for rank in ranks}
        return Demand(self.communicator.rank, step.sizes, needs, losses)

    def take(self, batch: Samples) -> tuple[Iterator[Batch], Compare]:
        """What this rank loads of the next batch; see :meth:`Feed.take`."""
        demand = self._demand_for(batch.size, batch.length)
        every = len(demand.sizes)
        alone = len(demand.needs.get(self.reader or 0, ())) == every and not self._weighs
        return self.feed.take(demand, [batch], 1 if alone else every)

    def take_whole(
        self, sizes: Sequence[Span], batches: Sequence[Samples]
    ) -> tuple[Iterator[Batch], Compare]:
        """The next micro-batches of several batches, if this rank reads any.

        Args:
            sizes: of all micro-batches.
        """
        every = dict(enumerate(sizes))
        needs = {rank: every for rank, reading in enumerate(self._reading_of) if reading}
        losses = dict.fromkeys(self._loss_ranks, every)
        demand = Demand(self.communicator.rank, sizes, needs, losses, self._late)
        return self.feed.take(demand, batches, self._per_step if self._weighs else 1)

    def tokens_of(self, batch: Samples) -> int:
        """Tokens in a batch, without the padding of buckets; 0 if the model reads none."""
        tokens = self._tokens_per_sample
        return tokens and (batch.tokens or batch.size * tokens)

    def make_run(
        self,
        step: Step,
        batches: Iterator[Batch],
        number: int | str,
        scale: float = 1.0,
        update: Update = lambda *_: None,
    ) -> StepRun:
        """The run of a step; batches are read at once if weights depend on them.

        Args:
            batches: that the step loads.
            number: of the step, for random operators.
            scale: of the loss.
            update: see :class:`StepRun`.
        """
        seed = self.seed, number
        if self.weigh is None:
            total = sum(span.size for span in step.sizes)
            mine = [step.losses.get(i, span) for i, span in enumerate(step.sizes)]
            shares = [1.0 if self.adds_up else span.size / total for span in mine]
            return StepRun(step, shares, batches, seed, scale, update)
        known = list(batches)
        return StepRun(step, self._by_targets(step, known), iter(known), seed, scale, update)

    def loss(self, run: StepRun) -> tuple[float, ...]:
        """This rank's parts of the loss of a step, of its micro-batches."""
        return loss_parts(run.losses, [run.weights[index] for index in run.step.losses])

    def _by_targets(self, step: Step, batches: Sequence[Batch]) -> list[float]:
        assert self.weigh is not None
        assert self._group is not None
        loaded = dict(zip(step.loads, batches, strict=True))
        table = np.zeros((len(step.sizes), self._group.size))
        for index, span in step.losses.items():
            targets = narrowed(loaded[index][1], span, step.loads[index])
            table[index, self._group.rank] = target_weight(self.weigh, self.name, targets)
        if self._group.size > 1:
            wait([self._group.Iallreduce(MPI.IN_PLACE, table)])  # adding zeros changes no bit
        total = float(sum(table.ravel().tolist()))
        mine: list[float] = table[:, 0 if self._seeded_elsewhere else self._group.rank].tolist()
        return [weight / total if total else 0.0 for weight in mine]
