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
from pipectl.runtime.guard import Fault, Guard
from pipectl.runtime.loss_scale import LossScale
from pipectl.runtime.optimizer import Clipping, SharedGradients
from pipectl.runtime.origins import origins_of
from pipectl.runtime.recording import Recording
from pipectl.runtime.setup import Setup
from pipectl.runtime.stage_states import shared_uses
from pipectl.runtime.stepper import make_stepper

IGNORE, SKIP = "ignore", "skip"


class StepEnd:
    """What a rank does behind its last backward of a step; making one is collective.

    Attributes:
        updated: the parameters that this rank updates, by full name.
        told: of these, those that it speaks for among all ranks that hold them.
        guard: None where nobody looks for what is not finite.
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
        own = setup.replicas.updates
        self.updated = {n: p for n, p in setup.parameters.items() if own(n)}
        self._held = _trained(setup.parameters)
        self.told = {n: p for n, p in self._held.items() if self._tells(n)}
        self.stepper = make_stepper(setup.job, self.updated)
        self._sharings = setup.replicas.sharings()
        self.shared = self._make_shared()
        self._clipping = self._make_clipping()
        self.loss_scale = self._make_loss_scale()
        self.guard = self._make_guard()
        self._origins = origins_of(setup.cut)
        if self.guard is not None:
            setup.training.origins = self._origins
        self.gradient_norm = self.used_rate = math.nan
        self.skipped = False
        self._undoes = False
        self._before: dict[str, Tensor] = {}

    def begin(self, buffers: Mapping[str, Tensor]) -> None:
        """Remember, before a step, what leaving it out must bring back; drop what was before.

        Args:
            buffers: that forwards write.
        """
        self._origins.forget()
        if self._skips:
            self._before = {name: tensor.clone() for name, tensor in buffers.items()}

    def undo(self, buffers: Mapping[str, Tensor]) -> bool:
        """Bring the buffers of before the step back, if it was not finite and is left out.

        Overflows that a loss scale makes are no fault of the forwards, so their buffers stay.
        """
        if self._undoes:
            with torch.no_grad():
                for name, before in self._before.items():
                    buffers[name].copy_(before)
        return self._undoes

    def run(self, step: int, fault_of_loss: int, recording: Recording | None) -> None:
        """Update, or leave the step out. Collective.

        Args:
            fault_of_loss: see :meth:`Guard.in_losses`.

        Raises:
            WorkerError: something is not finite, and the job is to stop then.
        """
        self.shared.reduce()
        self.gradient_norm, self.used_rate = math.nan, self.stepper.learning_rate
        self._tell(step, fault_of_loss)
        self.skipped = self.loss_scale is not None and not self.loss_scale.unscale()
        if not self.skipped and self._training.clip_grad_norm is not None:
            self.gradient_norm = self._clipping.clip(self._training.clip_grad_norm)
        self._undoes = self._meets and self._is_faulty()
        if self._undoes or self.skipped:
            self.skipped, self.gradient_norm = True, math.nan
            self.stepper.skip()
            return
        if recording is not None:
            recording.met()
        self.stepper.step()
        for sharing in self._sharings:
            sharing.share()

    def look(
        self,
        step: int,
        micro_batches: Sequence[int],
        losses: Sequence[Tensor],
        weights: Sequence[float],
        before: int,
    ) -> None:
        """Where steps overlap: tell what is not finite here, and hear what all have told so far.

        Args:
            before: micro-batches of earlier steps.

        Raises:
            WorkerError: something was not finite in an earlier step.
        """
        if self.guard is None:
            return
        fault = self.guard.heard(at_once=True)
        if fault is not None:
            self._record(fault)
            self.guard.stop(fault, together=False)
        of_loss = self.guard.in_losses(micro_batches, losses, weights) if losses else 0
        origin = self._origins.first(range(before, before + len(micro_batches)))
        if origin is not None:
            origin = origin._replace(micro_batch=origin.micro_batch - before)
        self.guard.tell(step, of_loss or self.guard.in_gradients(), origin)

    def settle(self) -> None:
        """Hear of all steps so far, before something is made of them. Collective.

        Raises:
            WorkerError: one was not finite.
        """
        self._is_faulty()

    @property
    def _skips(self) -> bool:
        """Whether steps are left out that are not finite."""
        return self._training.on_nonfinite == SKIP

    @property
    def _meets(self) -> bool:
        """Whether all ranks wait for one another before an update anyway."""
        clips = self._training.clip_grad_norm is not None
        return self._skips or clips or self.loss_scale is not None

    def _tell(self, step: int, fault_of_loss: int) -> None:
        if self.guard is None:
            return
        if not self._meets:
            self.settle()  # what was told a step ago
        scaled = self.loss_scale is not None  # which looks at gradients itself
        found = fault_of_loss or (0 if scaled else self.guard.in_gradients())
        self.guard.tell(step, found, self._origins.first())

    def _is_faulty(self) -> bool:
        """Whether what was told is to be left out."""
        fault = None if self.guard is None else self.guard.heard()
        if fault is None:
            return False
        self._record(fault)
        if not self._skips:
            assert self.guard is not None
            with suppress(UsageError):  # of the last checkpoint, of which rank 0 has warned
                self._finish()
            self.guard.stop(fault, together=True)
        return True

    def _make_guard(self) -> Guard | None:
        if self._training.on_nonfinite == IGNORE:
            return None
        setup = self._setup
        trained = {stage.index: _trained(stage.parameters) for stage in setup.updated_stages}
        return Guard(setup.communicator.Dup(), [*self._dtypes()], trained)

    def _make_shared(self) -> SharedGradients:
        setup = self._setup
        return SharedGradients(
            setup.communicator.Dup(),
            shared_uses(setup.cut),
            [stage.updating_ranks for stage in setup.plan.stages],
            {slot: leaf for stage in setup.updated_stages for slot, leaf in stage.uses.items()},
            setup.parameters,
            setup.branching,
        )

    def _make_loss_scale(self) -> LossScale | None:
        training = self._training
        if training.precision != "float16":
            return None
        return LossScale(self._setup.communicator.Dup(), training.loss_scale, self._held)

    def _make_clipping(self) -> Clipping:
        communicator = self._setup.communicator.Dup()
        return Clipping(communicator, self._dtypes(), self.told, self._held)

    def _tells(self, name: str) -> bool:
        """Whether of all ranks that hold a parameter, this one speaks for it."""
        first = self._setup.owners[name] == self._setup.communicator.rank
        return self._setup.replicas.counts(name, first=first)

    def _dtypes(self) -> dict[str, torch.dtype]:
        """Of every trained parameter, in model order, tied ones once."""
        states = self._setup.job.states.items()
        return {name: tensor.dtype for name, tensor in states if tensor.requires_grad}


def _trained(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: each for name, each in parameters.items() if each.requires_grad}
