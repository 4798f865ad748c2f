"""The end of a step on one rank: shared gradients, the vote of all ranks, clipping, update.

If all ranks need the result of the vote before they update, they wait for it: a step is skipped on
all ranks or on none. Otherwise no rank waits, unless steps are long: the result is read at the end
of the next step, and before anything is saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipectl.errors import UsageError
from pipectl.runs import NotFinite
from pipectl.runtime.finite import BufferCheck
from pipectl.runtime.gradients import LossScale, clip_gradients, gradient_norms, total_norm
from pipectl.runtime.optimizer import make_updater
from pipectl.runtime.option_trials import refuse_options_of_rank
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import Outcome, StepRun
from pipectl.runtime.stopping import GO_ON, MOVE, WAIT, StopRequest
from pipectl.runtime.vote import (
    Cause,
    Origins,
    Result,
    Vote,
    fault_of_buffers,
    fault_of_gradients,
    fault_of_losses,
)


class StepEnd:
    """What a rank does after its last backward of a step; making one is collective.

    Attributes:
        stages: whose backwards run on this rank, by index.
        updated: the parameters that this rank updates, by full name.
        owned_parameters: the trained ones among those that this rank saves; it reports the norms of
            their gradients.
        training: as in the spec.
        looks: whether the rank looks for what is not finite.
        origins: sums of the outputs of its stages, if it does.

    Args:
        stop_request: looked at on rank 0.
        record: writes what was not finite in a step; called on all ranks.
        finish: completes pending work before the job stops; called on all ranks.
    """

    def __init__(
        self,
        setup: Setup,
        stop_request: StopRequest,
        record: Callable[[int, NotFinite], None],
        finish: Callable[[], None],
    ) -> None:
        job, stages = setup.job, setup.updated_stages
        self._replicas, self._shared = setup.replicas, setup.shared_gradients
        self._written = setup.written
        self._record, self._finish = record, finish
        self._stop_request = stop_request if setup.communicator.rank == 0 else None
        self.training = job.spec.training
        self.stages = stages
        held = {n: each for stage in stages.values() for n, each in stage.parameters.items()}
        parameters = {name: held[name] for name in job.states if name in held}  # in model order
        sharded = setup.replicas.sharded
        self.updated = {n: p for n, p in parameters.items() if sharded.get(n, True)}
        trained = self._trained_parameters = _trained(parameters)
        self._trained_of = {i: _trained(stage.parameters) for i, stage in stages.items()}
        self.owned_parameters = {n: p for n, p in trained.items() if n in setup.saved}
        refuse_options_of_rank(job, setup.device.torch_device, self.updated)
        self.updater = make_updater(job, self.updated)
        self._follow_parameters()  # it may have moved them into one vector
        self.loss_scale = (
            LossScale(self.training.loss_scale, trained)
            if self.training.precision == "float16"
            else None
        )
        # All trained parameters in model order, tied ones once.
        states = job.states.items()
        self._dtypes = {name: tensor.dtype for name, tensor in states if tensor.requires_grad}
        self._clips = self.training.clip_grad_norm is not None
        self.looks = self.training.on_nonfinite != "ignore"
        self._skips = self.training.on_nonfinite == "skip"
        self._waits_for_all = self.training.updates_together
        buffers = self._buffers = [n for n, t in states if not isinstance(t, nn.Parameter)]
        names = [*self._dtypes]
        self._vote = Vote(setup.communicator.Dup(), names, buffers, with_norms=self._clips)
        self._check = BufferCheck(self._written if self.looks else {})
        self.origins = Origins.of(setup.training.cut)
        self._causes: dict[int, Cause] = {}
        self._before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Before a step, save the state that skipping it must restore; drop the earlier one."""
        self.origins.forget()
        if self._skips:
            self._before = {name: buffer.clone() for name, buffer in self._written.items()}

    def end_step(self, step: int, run: StepRun, before: int = 0) -> Outcome:
        """Update, or skip the step. Collective, unless steps overlap.

        Buffers become equal on all replicas, unless steps overlap. If the step is skipped because
        of a fault, they get the values from before it. An overflow due to the loss scale is no
        fault of the forwards, so their buffers stay.

        Args:
            run: its first losses are those of the step.
            before: micro-batches of earlier steps in the run.

        Raises:
            StepError: something is not finite, and the job is to stop in that case; if steps
                overlap, in an earlier step.
        """
        overlaps = run.per_step is not None
        if not overlaps:
            for stage in self.stages.values():
                stage.casts.drop()  # of weights that change now
                if stage.sums is not None:
                    stage.sums.finish()
            self._replicas.settle_writes()
        self._shared.reduce()
        rate, norm = self.updater.learning_rate, math.nan
        overflow = self.loss_scale is not None and self.loss_scale.unscale()
        if not self._waits_for_all:
            self.settle(waits=not overlaps)  # the votes on the previous step
        self._cast(step, run, before, overflow=overflow)
        is_faulty = has_overflow = False
        result = self._vote.count() if self._waits_for_all else None
        if result is not None:
            is_faulty, has_overflow = self._judge(result, together=True), result.overflow
            if self.loss_scale is not None:
                self.loss_scale.update(overflow=has_overflow)
        self._settle_buffers(run, restore=is_faulty)
        if is_faulty or has_overflow:
            self.updater.drop_gradients()
            return Outcome(rate, norm, skipped=True)
        if result is not None and self.training.clip_grad_norm is not None:
            total = total_norm(result.norms, [*self._dtypes.values()])
            clip_gradients(self._trained_parameters.values(), total, self.training.clip_grad_norm)
            norm = float(total)
        if run.recording is not None and not overlaps:
            run.recording.wait_ended()
        self.updater.step()
        self._replicas.share_parameters()
        self._follow_parameters()
        return Outcome(rate, norm, skipped=False)

    def settle(self, *, waits: bool = True) -> None:
        """Read all votes, before the results of their steps are used. Collective.

        Args:
            waits: whether to wait for other ranks; otherwise only complete votes are read.

        Raises:
            StepError: a step was not finite.
        """
        while (result := self._vote.count(waits=waits)) is not None:
            self._judge(result, together=waits)

    def answer(self, *, votes_again: bool = False) -> int:
        """Whether all ranks stop or move after this step; the same on all ranks. Collective.

        If steps are long, ranks wait for the vote on this step; otherwise they use the last vote
        that was read. A move is answered once, whatever comes of it: the votes that are under way,
        in which rank 0 asks for it again, are read with it. If one of them asks for a stop, all
        ranks stop.

        Args:
            votes_again: whether to vote once more, on this alone; if steps overlap, their own votes
                have no answer.
        """
        if votes_again:
            self._vote.cast(0, answer=self._own_answer())
        read = self._vote.answer
        if votes_again or read in (WAIT, MOVE):
            self.settle()
        answer = max(self._vote.answer, MOVE) if read == MOVE else self._vote.answer
        if answer == MOVE:
            self._vote.answer = GO_ON
        return answer

    def _own_answer(self) -> int:
        return GO_ON if self._stop_request is None else self._stop_request.answer()

    def _cast(self, step: int, run: StepRun, before: int, *, overflow: bool) -> None:
        """Vote on a step; reads gradients once, if at all."""
        overlaps, end = run.per_step is not None, before + (run.per_step or len(run.weights))
        fault = 0
        if self.looks:
            losses = run.losses[: run.per_step]
            micro_batches = range(len(losses)) if overlaps else [*run.step.losses]
            fault = fault_of_losses(micro_batches, losses, run.weights[before:end])
        origin = self.origins.take_first(end)
        self._causes = {number: each for number, each in self._causes.items() if number >= step - 1}
        if (cause := self.origins.take_cause()) is not None:
            self._causes[step] = cause
        if origin is not None:
            origin = origin._replace(micro_batch=origin.micro_batch - before)
        checks = self.looks and self.loss_scale is None  # which reads the gradients itself
        norms = gradient_norms(self._trained_parameters) if self._clips or checks else {}
        if self.looks and not fault:
            fault = fault_of_buffers(self._check.faults(), self._buffers)
        if checks and not fault:
            fault = fault_of_gradients(self._trained_of, norms, [*self._dtypes])
        own = {name: norm for name, norm in norms.items() if name in self.owned_parameters}
        answer = GO_ON if overlaps else self._own_answer()
        self._vote.cast(step, fault, origin, overflow=overflow, norms=own, answer=answer)

    def _find_cause(self, step: int, *, together: bool) -> str:
        """What computed the first value of a step that was not finite; empty if it is not known.

        Args:
            together: whether all ranks come here, so that each can tell the others.
        """
        own = self._causes.get(step)
        causes = self._vote.gather(own) if together else [own]
        known = [each for each in causes if each is not None and each.text]
        return min(known).text if known else ""

    def _settle_buffers(self, run: StepRun, *, restore: bool) -> None:
        if restore:
            with torch.no_grad():
                for name, value in self._before.items():
                    self._written[name].copy_(value)
        elif run.step.plan is not None and not run.step.plan.reproducible:
            self._replicas.agree_on_buffers(run.step.plan)

    def _follow_parameters(self) -> None:
        for stage in self.stages.values():
            stage.follow_parameters()

    def _judge(self, result: Result, *, together: bool) -> bool:
        """Record a fault that was found in a step.

        Args:
            together: whether all ranks come here.

        Returns:
            Whether the step is to be skipped.

        Raises:
            StepError: the training is to stop instead.
        """
        if result.fault is None:
            return False
        cause = self._find_cause(result.step, together=together)
        result = replace(result, fault=replace(result.fault, cause=cause))
        assert result.fault is not None
        self._record(result.step, result.fault)
        if not self._skips:
            if together:
                with suppress(UsageError):  # a failed last checkpoint: rank 0 has warned of it
                    self._finish()
            self._vote.stop(result, together=together)
        return True


def _trained(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: each for name, each in parameters.items() if each.requires_grad}
