"""The vote of all ranks on a step, in one reduction: faults, overflow and norms of gradients.

Every rank looks at what it has of a step. The largest number of all ranks says what was not finite,
a second one which stage was the first to make something of the kind, a third one whether scaled
gradients overflowed; the norms of all gradients go along if gradients are clipped. All of them are
whole numbers of which the largest counts, so that a single ``MPI_MAX`` serves.

If all ranks need the result before they update, they wait for it. Otherwise nobody waits: the
result is counted at the end of the next step, and before anything is saved.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn

from pipectl.capture import Cut
from pipectl.capture.step import first_undefined, own_name
from pipectl.errors import WorkerError
from pipectl.graph import TransferKind
from pipectl.runtime.layout import Tensors
from pipectl.runtime.optimizer import not_finite
from pipectl.runtime.waiting import barrier, poll, wait

_PLACES = 2**31
"""More than there are parameters or micro-batches; the first is the largest number."""
_STAGES = 2**20
"""More than there are stages."""
_LOSS = 2**62
"""Above all that parameters give: the gradients of such a loss are not finite either."""
_PATIENCE_S = 3.0
"""How long a rank lets another one report the fault that it has."""
_HEAD = 3
"""Words before the norms: fault, origin, overflow."""


class Origin(NamedTuple):
    """A stage whose output for a micro-batch is not finite."""

    micro_batch: int
    stage: int


class Origins:
    """Sums of what the stages of one rank hand on, in steps that are not over.

    Every stage sums its output while a cache still has it: a sum is finite only if all elements
    are. Nobody looks at the sums before the end of the step, so no accelerator is waited for.

    Args:
        values: operators whose values are looked at.
    """

    def __init__(self, values: Container[str]) -> None:
        self._values = values
        self._sums: list[tuple[Origin, Tensor]] = []

    @classmethod
    def of(cls, cut: Cut) -> Origins:
        """Of what has a gradient that comes back from another stage: masks may be infinite."""
        lanes = cut.lanes.items()
        back = (slots for lane, slots in lanes if lane.kind is TransferKind.GRADIENT)
        return cls({slot.value for slots in back for slot in slots})

    def note(self, micro_batch: int, stage: int, results: Tensors) -> None:
        """Sum what a stage has made of a micro-batch."""
        for slot, tensor in results.items():
            if tensor is not None and slot.value in self._values:
                wide = torch.promote_types(tensor.dtype, torch.float32)
                self._sums.append((Origin(micro_batch, stage), tensor.sum(dtype=wide)))

    def first(self, micro_batches: Container[int] | None = None) -> Origin | None:
        """The first micro-batch and stage, among some or all, that is not finite.

        They are forgotten.
        """
        mine, others = list[tuple[Origin, Tensor]](), list[tuple[Origin, Tensor]]()
        for origin, total in self._sums:
            is_asked_for = micro_batches is None or origin.micro_batch in micro_batches
            (mine if is_asked_for else others).append((origin, total))
        self._sums = others
        if not mine:
            return None
        finite = torch.stack([total.double() for _, total in mine]).isfinite().tolist()
        return min((o for (o, _), good in zip(mine, finite, strict=True) if not good), default=None)

    def forget(self) -> None:
        """Begin anew."""
        self._sums.clear()


@dataclass(frozen=True)
class Fault:
    """What was not finite in a step; the first that was computed, if several things were.

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
        """Where it comes from, as far as that is known: to be put after."""
        if self.origin < 0:
            return ""
        return f"; stage {self.origin} was the first to hand on something that is not"

    def to_json(self) -> dict[str, Any]:
        """For ``metrics.jsonl``."""
        if self.micro_batch >= 0:
            return {"loss_of_micro_batch": self.micro_batch}
        return {"gradient_of": self.parameter, "stage": self.stage}


def fault_of_losses(
    micro_batches: Sequence[int], losses: Sequence[Tensor], weights: Sequence[float]
) -> int:
    """What to vote on losses with a weight, one per micro-batch; 0 if all are finite."""
    index = first_undefined(losses, [weights[index] for index in micro_batches])
    return 0 if index is None else _LOSS + _PLACES - 1 - micro_batches[index]


def fault_of_gradients(
    stages: Mapping[int, Mapping[str, nn.Parameter]],
    norms: Mapping[str, float],
    names: Sequence[str],
) -> int:
    """What to vote on gradients: of the last stage, where backwards begin; 0 if all are finite.

    Args:
        stages: this rank's trained parameters by stage.
        norms: of their gradients, see :func:`pipectl.runtime.optimizer.gradient_norms`.
        names: of all trained parameters in model order.
    """
    for stage in sorted(stages, reverse=True):
        faulty = not_finite(stages[stage], norms)
        if faulty:
            first = min(names.index(name) for name in faulty)
            return (1 + stage) * _PLACES + _PLACES - 1 - first
    return 0


@dataclass(frozen=True)
class Result:
    """What all ranks said of a step.

    Args:
        fault: what was not finite, unless that is scaled gradients.
        is_mine: whether the fault is on this rank.
        overflow: whether a scaled gradient is not finite.
        norms: of gradients in model order; None for parameters without one, nothing if norms do not
            travel.
    """

    step: int
    fault: Fault | None
    is_mine: bool
    overflow: bool
    norms: list[float | None]


Words = np.ndarray[Any, np.dtype[np.int64]]


class Vote:
    """The votes of all ranks, a step each.

    Args:
        communicator: of its own.
        names: of all trained parameters in model order.
        with_norms: whether norms of gradients travel.
    """

    def __init__(
        self, communicator: MPI.Comm, names: Sequence[str], *, with_norms: bool = False
    ) -> None:
        self._communicator = communicator
        self._names = names
        self._with_norms = with_norms
        self._ballots: deque[tuple[int, int, Words, MPI.Request]] = deque()
        """Steps, faults of this rank, and what all ranks say once a request is complete."""

    def cast(
        self,
        step: int,
        fault: int = 0,
        origin: Origin | None = None,
        *,
        overflow: bool = False,
        norms: Mapping[str, float] | None = None,
    ) -> None:
        """Say what this rank found in a step; every rank says something of every step.

        Args:
            fault: see :func:`fault_of_losses` and :func:`fault_of_gradients`.
            origin: the first of its stages that made what is not finite.
            norms: of the gradients for which no other rank speaks.
        """
        words = np.zeros(_HEAD + len(self._names) * self._with_norms, dtype=np.int64)
        words[:_HEAD] = fault, _number(origin), overflow
        if self._with_norms and norms:
            # Floats from 0 up are in the order of their bits; 0 says that there is no gradient.
            values = [norms.get(name, -1.0) for name in self._names]
            bits = np.abs(np.array(values, dtype=np.float64)).view(np.int64) + 1
            words[_HEAD:] = np.where([name in norms for name in self._names], bits, 0)
        request = self._communicator.Iallreduce(MPI.IN_PLACE, words, MPI.MAX)
        self._ballots.append((step, fault, words, request))

    def count(self, *, at_once: bool = False) -> Result | None:
        """The result of the first vote that is not counted yet; None if there is none.

        Args:
            at_once: whether to leave what not all ranks have voted on, instead of waiting for it.
        """
        if not self._ballots:
            return None
        step, mine, words, request = self._ballots[0]
        if at_once and not request.Test():
            return None
        wait([request])
        self._ballots.popleft()
        fault, origin, overflow = words[:_HEAD].tolist()
        bits = words[_HEAD:]
        values = np.maximum(bits - 1, 0).view(np.float64).tolist()
        norms = [value if has else None for value, has in zip(values, bits > 0, strict=True)]
        described = self._describe(step, fault, origin) if fault else None
        return Result(step, described, mine == fault, bool(overflow), norms)

    def stop(self, result: Result, *, together: bool) -> None:
        """End the training: with an error where the fault is, for which the others wait.

        If not all ranks come here, one that waits starves those after it, and the one with the
        fault may never come: so the others wait for a moment, and then say the same.

        Args:
            together: whether all ranks come here, so that each can end what it does first.

        Raises:
            WorkerError: naming the fault.
        """
        if together:
            barrier(self._communicator)
        elif not result.is_mine:  # let messages move for a moment, unless all ranks wait here
            until = time.monotonic() + _PATIENCE_S
            others = self._communicator.Ibarrier()
            poll(lambda: bool(others.Test()) or time.monotonic() > until, lambda _: False)
        if result.is_mine or not together:
            fault = result.fault
            assert fault is not None
            raise WorkerError(
                f"step {fault.step}: {fault.what} is not finite (infinite or NaN){fault.where}",
                cure="lower the learning rate, clip gradients (training.clip_grad_norm) or look at "
                "the data; training.on_nonfinite: skip leaves such steps out; pipectl resume goes "
                "on from the last checkpoint",
            )
        barrier(self._communicator)

    def _describe(self, step: int, fault: int, origin: int) -> Fault:
        above, place = divmod(fault, _PLACES)
        index = _PLACES - 1 - place
        if fault >= _LOSS:
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
    if not number:
        return None
    micro_batch, stage = divmod(number - 1, _STAGES)
    return Origin(_PLACES - 1 - micro_batch, _STAGES - 1 - stage)
