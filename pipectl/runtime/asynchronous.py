"""Training without flushes: steps overlap, from one evaluation or checkpoint to the next.

At these points the pipeline is empty, and the versions of the weights start anew. Between them,
every rank updates independently, after the last backward of a step on it, so no rank may need a
value from all ranks at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from pipectl.capture.data import Loader, Samples, split_batch
from pipectl.capture.shares import loss_parts, sample_shares, target_shares
from pipectl.capture.slices import Span
from pipectl.errors import CaptureError
from pipectl.plan import Plan
from pipectl.runtime.gradients import shared_uses
from pipectl.runtime.step import Batch, Outcome, Step, StepRun
from pipectl.runtime.steps import Steps
from pipectl.runtime.unflushed import refuse
from pipectl.runtime.waiting import barrier
from pipectl.schedule import channels
from pipectl.schedule.actions import EMPTY
from pipectl.schedule.lowering import stretch
from pipectl.schedule.unflushed import steps_apart, versions_kept


@dataclass
class _Stretch:
    """The steps from one empty pipeline to the next.

    Args:
        first: number of the first.
        batches: the samples of each.
        unread: micro-batches that this rank reads only for the weights of its losses.
        begin_s: when they began.
        since_s: when the last one that is done ended.
    """

    first: int
    batches: Sequence[Samples]
    unread: Iterator[Batch]
    begin_s: float
    since_s: float


class AsynchronousSteps(Steps):
    """Steps that overlap, from empty pipeline to empty pipeline.

    If one of these steps is to be recorded, the first ones are, as many as the prediction shows.
    """

    overlap = True

    def begin(self, loader: Loader, steps: int, done: int) -> None:
        """Open the data, and keep versions of the weights from now on; see :class:`Steps`.

        Raises:
            MismatchError: see :func:`refuse`.
            CaptureError: see :func:`refuse`; or a step differs from the plan in its number of
                micro-batches.
        """
        refuse(self._step_end.training, self._plan.schedule, shared_uses(self._engine.cut))
        _check_counts(islice(loader.epoch(0), steps), self._plan)  # further epochs are like it
        if self._batches.loader is not None:
            self._batches.feed.open(islice(loader.batches(), steps), done)
        for index, stage in self._step_end.stages.items():
            corrects = self._step_end.training.correct_delay
            stage.keep_versions(versions_kept(self._plan, index), corrects=corrects)

    def train(self, first: int, batches: Sequence[Samples]) -> None:
        """Train some steps; see :class:`Steps`."""
        barrier(self._batches.communicator)
        for stage in self._step_end.stages.values():
            assert stage.versions is not None
            stage.versions.restart()
            stage.casts.drop()
        self._step_end.begin()
        rank, size = self._batches.communicator.rank, self._plan.micro_batch_size
        count, sizes = self._plan.micro_batches, [split_batch(each.size, size) for each in batches]
        whole = [
            Span.of(samples, batch.length)
            for batch, each in zip(batches, sizes, strict=True)
            for samples in each
        ]
        loaded, compare = self._batches.take_whole(whole, batches)
        adds_up = self._batches.adds_up
        weights = [share for each in sizes for share in sample_shares(each, adds_up=adds_up)]
        unread: Iterator[Batch] = iter(())
        if self._batches.weigh is not None:
            weights = []
            loaded = self._add_weights(self._batches.weigh, loaded, weights)
            if not self._batches.reads:
                unread = loaded
        _read_weights(unread, count)
        loads = dict(enumerate(whole))
        step = Step(EMPTY, channels(self._plan), rank, whole, loads=loads)
        seed = self._batches.seed, first
        is_recorded = any(map(self._tracing.wants, range(first, first + len(batches))))
        recording = self._tracing.begin(first) if is_recorded else None
        begin_s = time.perf_counter()
        steps = _Stretch(first, batches, unread, begin_s, since_s=begin_s)
        update = partial(self._update, steps)
        run = StepRun(
            step, weights, loaded, seed, update=update, recording=recording, per_step=count
        )
        run.compare_readings = compare
        parts = stretch(self._plan, rank, len(batches))
        self._engine.run(run, parts)
        self._end_recording(steps, run)

    def _add_weights(
        self, weigh: Callable[[Any], float], loaded: Iterator[Batch], weights: list[float]
    ) -> Iterator[Batch]:
        """The micro-batches; before the first of a step, ``weights`` get those of the step."""
        name = self._batches.name
        while step := list(islice(loaded, self._plan.micro_batches)):
            weights += target_shares(weigh, name, [targets for _, targets in step])
            yield from step

    def _update(self, steps: _Stretch, run: StepRun, stage: int, micro_batch: int) -> Outcome:
        """The end of a step on this rank: its update, or its last forward if it updates nothing."""
        count = self._plan.micro_batches
        index, before = micro_batch // count, micro_batch // count * count
        step, losses = steps.first + index, run.losses[:count]
        updated = self._step_end.stages.get(stage)
        with nullcontext() if updated is None else updated.updating():
            outcome = self._step_end.end_step(step, run, before)
        self._engine.board.step(step + 1)
        if index == steps_apart(self._plan):
            self._end_recording(steps, run)
        del run.losses[:count]
        shares = run.weights[before : before + count]
        loss = loss_parts(losses, shares) if losses else ()
        _read_weights(steps.unread, count)
        batch = steps.batches[index]
        steps.since_s = self._finish(step, batch, run, outcome, loss, steps.since_s)
        run.called_s = run.called_cpu_s = run.worked_s = 0.0
        return outcome

    def _end_recording(self, steps: _Stretch, run: StepRun) -> None:
        batches = steps.batches[: steps_apart(self._plan) + 1]
        self._tracing.end(steps.first, run.recording, steps.begin_s, batches, skipped=False)
        run.recording = None


def _read_weights(unread: Iterator[Batch], micro_batches: int) -> None:
    """Read the weights of the next step, if no forward of this rank reads its batch."""
    deque(islice(unread, micro_batches), maxlen=0)


def _check_counts(planned: Iterable[Samples], plan: Plan) -> None:
    """Refuse steps whose number of micro-batches differs from the plan, before training."""
    sizes = {batch.size for batch in planned}
    counts = {len(split_batch(size, plan.micro_batch_size)) for size in sizes}
    other = next(iter(sorted(counts - {plan.micro_batches})), None)
    if other is not None:
        raise CaptureError(
            f"data: the last batch of an epoch fills {other} of {plan.micro_batches} "
            f"micro-batches; schedule {plan.schedule} takes as many in every step",
            hint="set data.drop_last: true",
        )
