"""Losses and gradients that are not finite: found on one rank, known to all.

Every rank looks at what it has of a step, and one number, the largest of all ranks', says what was
wrong with it; a second says which stage was the first to make something of the kind. They travel
beside whatever all ranks wait for at the end of a step anyway. Where there is nothing of that kind,
a job that stops need not wait at all: they are read at the end of the next step, and before
anything is saved.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn

from pipectl.capture.step import first_undefined, own_name
from pipectl.errors import WorkerError
from pipectl.runtime.loss_scale import alike
from pipectl.runtime.origins import Origin
from pipectl.runtime.waiting import barrier, poll, wait

_PLACES = 2**31
"""More than there are parameters or micro-batches; the first is the largest number."""
_STAGES = 2**20
"""More than there are stages."""
_LOSS = 2**62
"""Above all that parameters give: the gradients of such a loss are not finite either."""
_PATIENCE_S = 3.0
"""How long a rank lets another one report the fault that it has."""


@dataclass(frozen=True)
class Fault:
    """What was not finite in a step; the first that was computed, where several things were.

    Args:
        micro_batch: whose loss it was; -1 for a gradient.
        stage: of the gradient; -1 for a loss.
        parameter: whose gradient it was.
        origin: the first stage that handed on what was not finite, of that micro-batch; -1 if
            none did.
    """

    step: int
    micro_batch: int = -1
    stage: int = -1
    parameter: str = ""
    origin: int = -1

    @property
    def what(self) -> str:
        """In words."""
        if self.micro_batch >= 0:
            return f"the loss of micro-batch {self.micro_batch}"
        return f"the gradient of {self.parameter!r} in stage {self.stage}"

    @property
    def where(self) -> str:
        """Where it comes from, as far as that is known: to be put behind."""
        if self.origin < 0:
            return ""
        return f"; stage {self.origin} was the first to hand on something that is not"

    def to_json(self) -> dict[str, Any]:
        """For ``metrics.jsonl``."""
        if self.micro_batch >= 0:
            return {"loss_of_micro_batch": self.micro_batch}
        return {"gradient_of": self.parameter, "stage": self.stage}


@dataclass(frozen=True)
class _Told:
    step: int
    mine: int
    largest: np.ndarray[Any, Any]
    request: MPI.Request


class Guard:
    """Looks for what is not finite, and agrees on it with all ranks.

    Args:
        communicator: of its own.
        names: of all trained parameters in model order, in the user's words.
        parameters: this rank's trained parameters, by its stages; full names as in ``names``.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        names: Sequence[str],
        parameters: Mapping[int, Mapping[str, nn.Parameter]],
    ) -> None:
        self._communicator = communicator
        self._names = names
        self._index = {name: index for index, name in enumerate(names)}
        self._stages = parameters
        self._waiting: deque[_Told] = deque()
        self._found_here = False

    def in_losses(self, micro_batches: Iterable[int], losses: Iterable[Tensor],
                  weights: Sequence[float]) -> int:  # fmt: skip
        """What to tell of losses with a weight, one a micro-batch; 0 if all are finite."""
        of = list(micro_batches)
        found = first_undefined(losses, [weights[index] for index in of])
        return 0 if found is None else _LOSS + _PLACES - 1 - of[found]

    def in_gradients(self) -> int:
        """What to tell of all gradients: of the last stage, where backwards begin."""
        for stage in sorted(self._stages, reverse=True):
            found = not_finite(self._stages[stage])
            if found:
                first = min(self._index[name] for name in found)
                return (1 + stage) * _PLACES + _PLACES - 1 - first
        return 0

    def tell(self, step: int, mine: int, origin: Origin | None = None) -> None:
        """Say what this rank found in a step; every rank says something of every step.

        Args:
            origin: the first of its stages that made what is not finite.
        """
        largest = np.array([mine, _number(origin)], dtype=np.int64)
        request = self._communicator.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX)
        self._waiting.append(_Told(step, mine, largest, request))

    def heard(self, *, at_once: bool = False) -> Fault | None:
        """The first fault in what was told and not yet heard.

        Args:
            at_once: whether to leave what not all ranks have told, instead of waiting for it.
        """
        while self._waiting:
            told = self._waiting[0]
            if at_once and not told.request.Test():
                return None
            wait([told.request])
            self._waiting.popleft()
            found = int(told.largest[0])
            if found:
                self._found_here = told.mine == found
                return self._fault(told.step, found, int(told.largest[1]))
        return None

    def stop(self, fault: Fault, *, together: bool) -> None:
        """End the training: with an error where the fault is, for which the others wait.

        Where not all ranks come here, one that waits starves those behind it, and the one with the
        fault may never come: so the others wait for a moment, and then say the same.

        Args:
            together: whether all ranks come here, so that each can end what it does first.

        Raises:
            WorkerError: naming the fault.
        """
        if together:
            barrier(self._communicator)
        elif not self._found_here:
            self._pause()
        if self._found_here or not together:
            raise WorkerError(
                f"step {fault.step}: {fault.what} is not finite (infinite or NaN){fault.where}",
                cure="lower the learning rate, clip gradients (training.clip_grad_norm) or look at "
                "the data; training.on_nonfinite: skip leaves such steps out; pipectl resume goes "
                "on from the last checkpoint",
            )
        barrier(self._communicator)

    def _pause(self) -> None:
        """Let messages move for a moment, unless all ranks wait here."""
        until = time.monotonic() + _PATIENCE_S
        others = self._communicator.Ibarrier()
        poll(lambda: bool(others.Test()) or time.monotonic() > until, lambda _: False)

    def _fault(self, step: int, found: int, origin: int) -> Fault:
        above, place = divmod(found, _PLACES)
        index = _PLACES - 1 - place
        if found >= _LOSS:
            first = _origin(origin)
            stage = first.stage if first is not None and first.micro_batch == index else -1
            return Fault(step, micro_batch=index, origin=stage)
        return Fault(step, stage=above - 1, parameter=own_name(self._names[index]))


def _number(origin: Origin | None) -> int:
    """The larger, the earlier; 0 for none."""
    if origin is None:
        return 0
    return (_PLACES - 1 - origin.micro_batch) * _STAGES + _STAGES - origin.stage


def _origin(number: int) -> Origin | None:
    """The inverse of :func:`_number`."""
    if not number:
        return None
    micro_batch, stage = divmod(number - 1, _STAGES)
    return Origin(_PLACES - 1 - micro_batch, _STAGES - 1 - stage)


def not_finite(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The parameters whose gradient has an element that is not finite.

    Gradients are read once: a norm is finite only if all elements are.
    """
    given = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    norms = [torch.stack(torch._foreach_norm(same)) for same in alike(given.values())]
    if all(bool(norm.isfinite().all()) for norm in norms):
        return []
    return [name for name, gradient in given.items() if not bool(gradient.isfinite().all())]
