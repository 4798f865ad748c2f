"""The end of a step on one rank: shared gradients, loss scale, clipping, optimizer.

And whether there is anything to update with: a step whose loss or gradients are not finite is left
out, or ends the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from pipectl.errors import UsageError
from pipectl.runtime.optimizer import (
    LossScale,
    SharedGradients,
    clip_gradients,
    gradient_norms,
    shared_uses,
    total_norm,
)
from pipectl.runtime.setup import Setup
from pipectl.runtime.stepper import make_stepper
from pipectl.runtime.tracing import Recording
from pipectl.runtime.transport import Wire
from pipectl.runtime.vote import (
    Fault,
    Origin,
    Origins,
    Result,
    Vote,
    fault_of_gradients,
    fault_of_losses,
)

IGNORE, SKIP = "ignore", "skip"


class StepEnd:
    """What a rank does after its last backward of a step; making one is collective.

    Attributes:
        updated: the parameters that this rank updates, by full name.
        told: of these, those that it speaks for among all ranks that hold them.
        gradient_norm, used_rate, skipped: of the last step.

    Args:
        record: writes down what was not finite; called on all ranks.
        finish: what is under way, before the job stops; called on all ranks.
    """

    def __init__(
        self, setup: Setup, record: Callable[[Fault], None], finish: Callable[[], None]
    ) -> None:
        self._setup = setup
        self._record, self._finish = record, finish
        self._training = setup.job.spec.training
        me, replicas = setup.communicator.rank, setup.replicas
        self.updated = {n: p for n, p in setup.parameters.items() if replicas.updates(n)}
        self._trained_parameters = _trained(setup.parameters)
        self._trained_of = {each.index: _trained(each.parameters) for each in setup.updated_stages}
        self.owned_parameters = {
            name: parameter
            for name, parameter in self._trained_parameters.items()
            if replicas.counts(name, first=setup.owners[name] == me)
        }
        self.stepper = make_stepper(setup.job, self.updated)
        self._shared = SharedGradients(
            Wire(setup.communicator.Dup(), setup.device, setup.progress),
            shared_uses(setup.cut),
            [stage.updating_ranks for stage in setup.plan.stages],
            {slot: leaf for stage in setup.updated_stages for slot, leaf in stage.uses.items()},
            setup.parameters,
        )
        self.loss_scale = (
            LossScale(self._training.loss_scale, self._trained_parameters)
            if self._training.precision == "float16"
            else None
        )
        # Of every trained parameter, in model order, tied ones once.
        states = setup.job.states.items()
        self._dtypes = {name: tensor.dtype for name, tensor in states if tensor.requires_grad}
        self._clips = self._training.clip_grad_norm is not None
        self._vote = Vote(setup.communicator.Dup(), [*self._dtypes], with_norms=self._clips)
        self._origins = Origins.of(setup.cut)
        if self._looks:
            setup.training.origins = self._origins
        self.gradient_norm = self.used_rate = math.nan
        self.skipped = False
        self._undoes = False
        self._before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Remember, before a step, what leaving it out must bring back; drop what was before."""
        self._origins.forget()
        if self._skips:
            written = self._setup.written.items()
            self._before = {name: buffer.clone() for name, buffer in written}

    def undo(self) -> bool:
        """Bring the buffers of before the step back, if it was not finite and is left out.

        Overflows that a loss scale makes are no fault of the forwards, so their buffers stay.
        """
        if self._undoes:
            with torch.no_grad():
                for name, before in self._before.items():
                    self._setup.written[name].copy_(before)
        return self._undoes

    def run(
        self,
        step: int,
        micro_batches: Sequence[int],
        losses: Sequence[Tensor],
        weights: Sequence[float],
        recording: Recording | None,
    ) -> None:
        """Update, or leave the step out. Collective.

        Args:
            micro_batches: whose losses this rank has computed.
            weights: of all micro-batches of the step.

        Raises:
            WorkerError: something is not finite, and the job is to stop then.
        """
        self._shared.reduce()
        self.gradient_norm, self.used_rate = math.nan, self.stepper.learning_rate
        overflow = self.loss_scale is not None and self.loss_scale.unscale()
        if not self._meets:
            self.settle()  # what was voted a step ago
        fault = fault_of_losses(micro_batches, losses, weights) if self._looks else 0
        self._cast(step, fault, self._origins.first(), overflow=overflow)
        self.skipped = self._undoes = False
        result = self._vote.count() if self._meets else None
        if result is not None:
            self._undoes = self._is_faulty(result)
            self.skipped = self._undoes or result.overflow
            if self.loss_scale is not None:
                self.loss_scale.update(overflow=result.overflow)
        if self.skipped:
            self.stepper.skip()
            return
        if result is not None and self._training.clip_grad_norm is not None:
            total = total_norm(result.norms, [*self._dtypes.values()])
            clip_gradients(self._trained_parameters.values(), total, self._training.clip_grad_norm)
            self.gradient_norm = float(total)
        if recording is not None:
            recording.met()
        self.stepper.step()
        self._setup.replicas.share_parameters()

    def look(
        self,
        step: int,
        micro_batches: Sequence[int],
        losses: Sequence[Tensor],
        weights: Sequence[float],
        before: int,
    ) -> None:
        """If steps overlap: vote on this one, and count what all ranks have voted so far.

        Args:
            before: micro-batches of earlier steps.

        Raises:
            WorkerError: something was not finite in an earlier step.
        """
        if not self._looks:
            return
        while (result := self._vote.count(at_once=True)) is not None:
            if result.fault is not None:
                self._record(result.fault)
                self._vote.stop(result, together=False)
        fault = fault_of_losses(micro_batches, losses, weights) if losses else 0
        origin = self._origins.first(range(before, before + len(micro_batches)))
        if origin is not None:
            origin = origin._replace(micro_batch=origin.micro_batch - before)
        self._cast(step, fault, origin)

    def settle(self) -> None:
        """Count all votes so far, before something is made of their steps. Collective.

        Raises:
            WorkerError: one was not finite.
        """
        while (result := self._vote.count()) is not None:
            self._is_faulty(result)

    @property
    def _looks(self) -> bool:
        return self._training.on_nonfinite != IGNORE

    @property
    def _skips(self) -> bool:
        return self._training.on_nonfinite == SKIP

    @property
    def _meets(self) -> bool:
        return self._skips or self._clips or self.loss_scale is not None

    def _cast(
        self, step: int, fault: int, origin: Origin | None, *, overflow: bool = False
    ) -> None:
        """Vote on a step, if anybody needs the result; gradients are read once."""
        if not self._looks and not self._meets:
            return
        scaled = self.loss_scale is not None  # which looks at gradients itself
        norms = gradient_norms(self._trained_parameters) if self._clips or not scaled else {}
        if self._looks and not fault and not scaled:
            fault = fault_of_gradients(self._trained_of, norms, [*self._dtypes])
        told = {name: norm for name, norm in norms.items() if name in self.owned_parameters}
        self._vote.cast(step, fault, origin, overflow=overflow, norms=told)

    def _is_faulty(self, result: Result) -> bool:
        """Whether a step is to be left out.

        Raises:
            WorkerError: the training is to stop instead.
        """
        if result.fault is None:
            return False
        self._record(result.fault)
        if not self._skips:
            with suppress(UsageError):  # of the last checkpoint, of which rank 0 has warned
                self._finish()
            self._vote.stop(result, together=True)
        return True


def _trained(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: each for name, each in parameters.items() if each.requires_grad}
