"""The votes of all ranks on a step, in one reduction.

The maximum over all ranks of one word tells what was not finite, that of a second one the first
stage whose output was not, that of a third one whether scaled gradients overflowed, that of a
fourth one whether the training is to stop. The norms of all gradients follow if gradients are
clipped. All are whole numbers, so that a single ``MPI_MAX`` serves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn

from pipectl.capture import Cut
from pipectl.capture.model_with_loss import own_name
from pipectl.capture.shares import first_undefined
from pipectl.errors import StepError
from pipectl.lanes import TransferKind
from pipectl.runs import NotFinite
from pipectl.runtime.finite import not_finite
from pipectl.runtime.gradients import gradients_of
from pipectl.runtime.layout import Tensors
from pipectl.runtime.stopping import GO_ON
from pipectl.runtime.waiting import barrier, gather_all, poll, wait

T = TypeVar("T")
_PLACES = 2**31
"""Exceeds the number of parameters, stages or micro-batches."""
_LOSS = _PLACES - 1
"""Exceeds any stage: if a loss is not finite, neither are its gradients."""
_BUFFER = _LOSS - 1
"""Exceeds any stage, too: forwards write buffers."""
_PATIENCE_S = 3.0
"""How long a rank waits for the rank with the fault to report it."""
_MAX_SEARCHES = 8
"""Losses of micro-batches without a weight may be NaN in every step, and are no fault."""
_HEAD = 4
"""Numbers before the norms: fault, origin, overflow, answer."""
Ballot = np.ndarray[Any, np.dtype[np.int64]]
_SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Origin(NamedTuple):
    """A stage whose output for a micro-batch is not finite."""

    micro_batch: int
    stage: int


class Cause(NamedTuple):
    """What computed the first value of a stage for a micro-batch that is not finite."""

    micro_batch: int
    stage: int
    text: str


class Origins:
    """Sums of the outputs of one rank's stages, in steps that are not finished.

    Every stage sums what it sends: a sum is finite only if all elements are. On a CPU they are
    still in a cache. An accelerator reads them once more from its memory, which is short compared
    with sending them, and the sums are read only at the end of the step, so the rank does not wait.

    On a CPU, each sum is looked at at once: the first forward whose result is not finite is run
    again then, as long as its inputs are there, to find the module. On an accelerator that would
    wait for it in every forward.

    Args:
        values: operators whose values are summed.
        loss: the operator that computes the loss.
    """

    def __init__(self, values: Container[str], loss: str = "") -> None:
        self._values, self._loss = values, loss
        self._cause: Cause | None = None
        self._searches = 0
        self._sums: list[tuple[Origin, Tensor]] = []

    @classmethod
    def of(cls, cut: Cut) -> Origins:
        """Watch values whose gradient comes from another stage: masks may be infinite."""
        lanes = cut.lanes.items()
        back = (slots for lane, slots in lanes if lane.kind is TransferKind.GRADIENT)
        return cls({slot.value for slots in back for slot in slots}, cut.graph.loss)

    def note(
        self,
        micro_batch: int,
        stage: int,
        results: Tensors,
        find: Callable[[], str] = lambda: "",
    ) -> None:
        """Sum a stage's output for a micro-batch.

        Args:
            find: says what computed the first value of this forward that is not finite.
        """
        is_finite = True
        for slot, tensor in results.items():
            if tensor is not None and slot.value in self._values:
                wide = _SUMMED_AS.get(tensor.dtype)
                total = tensor.sum() if wide is None else tensor.sum(dtype=wide)
                self._sums.append((Origin(micro_batch, stage), total))
            elif tensor is not None and slot.value == self._loss:
                total = tensor.detach()
            else:
                continue
            is_finite &= total.device.type != "cpu" or bool(total.isfinite().all())
        if not is_finite and self._cause is None and self._searches < _MAX_SEARCHES:
            self._searches += 1
            self._cause = Cause(micro_batch, stage, find())

    def take_cause(self) -> Cause | None:
        """Return what was found since the last call."""
        cause, self._cause = self._cause, None
        return cause

    def take_first(self, end: int) -> Origin | None:
        """The first micro-batch before ``end`` and stage whose output is not finite; drops the sums
        of these micro-batches.
        """
        ended = [each for each in self._sums if each[0].micro_batch < end]
        self._sums = [each for each in self._sums if each[0].micro_batch >= end]
        if not ended:
            return None
        finite = torch.stack([total.double() for _, total in ended]).isfinite().tolist()
        pairs = zip(ended, finite, strict=True)
        return min((origin for (origin, _), good in pairs if not good), default=None)

    def forget(self) -> None:
        """Drop all sums."""
        self._sums.clear()


def fault_of_losses(
    micro_batches: Sequence[int], losses: Sequence[Tensor], weights: Sequence[float]
) -> int:
    """The vote on losses with a weight, one per micro-batch; 0 if all are finite."""
    index = first_undefined(losses, [weights[index] for index in micro_batches])
    return 0 if index is None else _encode(_LOSS, micro_batches[index])


def fault_of_gradients(
    stages: Mapping[int, Mapping[str, nn.Parameter]],
    norms: Mapping[str, float],
    names: Sequence[str],
) -> int:
    """The vote on gradients: of the last stage, at which backwards begin; 0 if all are finite.

    Args:
        stages: this rank's trained parameters by stage.
        norms: of their gradients, see :func:`pipectl.runtime.gradients.gradient_norms`.
        names: of all trained parameters in model order.
    """
    for stage in sorted(stages, reverse=True):
        faulty = not_finite(gradients_of(stages[stage]), norms)
        if faulty:
            first = min(names.index(name) for name in faulty)
            return _encode(1 + stage, first)
    return 0


def fault_of_buffers(faulty: Sequence[str], names: Sequence[str]) -> int:
    """The vote on buffers that are not finite: of the first in model order; 0 if there are none.

    Args:
        names: of all buffers in model order.
    """
    return _encode(_BUFFER, min(map(names.index, faulty))) if faulty else 0


@dataclass(frozen=True)
class Result:
    """The votes of all ranks on a step.

    Args:
        fault: what was not finite, except scaled gradients: the first value computed, if there were
            several.
        origin: the first stage whose output for the micro-batch of that loss was not finite; -1 if
            there was none.
        is_mine: whether the fault is on this rank.
        overflow: whether a scaled gradient is not finite.
        norms: of gradients in model order; None for parameters without a gradient; empty if norms
            are not exchanged.
    """

    step: int
    fault: NotFinite | None
    origin: int
    is_mine: bool
    overflow: bool
    norms: list[float | None]


class Vote:
    """Votes of all ranks, one per step.

    Args:
        communicator: used for nothing else.
        names: of all trained parameters in model order.
        buffers: names of all buffers in model order.
        with_norms: whether norms of gradients are exchanged.

    Attributes:
        answer: whether to stop, of the last vote that was read; see :mod:`.stopping`.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        names: Sequence[str],
        buffers: Sequence[str] = (),
        *,
        with_norms: bool = False,
    ) -> None:
        self.answer = GO_ON
        self._communicator = communicator
        self._names = names
        self._buffers = buffers
        self._with_norms = with_norms
        self._ballots: deque[tuple[int, int, Ballot, MPI.Request]] = deque()
        """Steps, this rank's faults, and the votes of all ranks once a request is complete."""

    def cast(
        self,
        step: int,
        fault: int = 0,
        origin: Origin | None = None,
        *,
        overflow: bool = False,
        norms: Mapping[str, float] | None = None,
        answer: int = GO_ON,
    ) -> None:
        """Vote on a step; every rank votes on every step.

        Args:
            fault: see :func:`fault_of_losses`, :func:`fault_of_gradients` and
                :func:`fault_of_buffers`.
            origin: the first of its stages whose output is not finite.
            norms: of the gradients that no other rank reports.
            answer: of rank 0, whether to stop.
        """
        words = np.zeros(_HEAD + len(self._names) * self._with_norms, dtype=np.int64)
        first = 0 if origin is None else _encode(_LOSS - origin.micro_batch, origin.stage)
        words[:_HEAD] = fault, first, overflow, answer
        if self._with_norms and norms:
            # Non-negative floats are in the order of their bits; 0 means that there is no gradient.
            values = [norms.get(name, -1.0) for name in self._names]
            bits = np.abs(np.array(values, dtype=np.float64)).view(np.int64) + 1
            words[_HEAD:] = np.where([name in norms for name in self._names], bits, 0)
        request = self._communicator.Iallreduce(MPI.IN_PLACE, words, MPI.MAX)
        self._ballots.append((step, fault, words, request))

    def count(self, *, waits: bool = True) -> Result | None:
        """The result of the first vote that was not read yet; None if there is none.

        Args:
            waits: whether to wait for ranks that have not voted, instead of returning None.
        """
        if not self._ballots:
            return None
        step, mine, words, request = self._ballots[0]
        if not waits and not request.Test():
            return None
        wait([request])
        self._ballots.popleft()
        fault, origin, overflow, self.answer = words[:_HEAD].tolist()
        bits = words[_HEAD:]
        values = np.maximum(bits - 1, 0).view(np.float64).tolist()
        norms = [value if has else None for value, has in zip(values, bits > 0, strict=True)]
        what, first = self._describe(fault, origin) if fault else (None, -1)
        return Result(step, what, first, mine == fault, bool(overflow), norms)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks. Collective."""
        return gather_all(self._communicator, value)

    def stop(self, result: Result, *, together: bool) -> None:
        """End the training with an error on the rank with the fault; the others wait for it.

        If not all ranks come here, a rank that waits blocks those after it, and the rank with the
        fault may never arrive. So the others wait for a moment, then raise the same error.

        Args:
            together: whether all ranks come here, so that each can first finish its work.

        Raises:
            StepError: naming the fault.
        """
        if together:
            barrier(self._communicator)
        elif not result.is_mine:  # let messages move for a moment, unless all ranks wait here
            until = time.monotonic() + _PATIENCE_S
            others = self._communicator.Ibarrier()
            poll(lambda: bool(others.Test()) or time.monotonic() > until)
        if result.is_mine or not together:
            assert result.fault is not None
            where = result.fault.cause
            if not where and result.origin >= 0:
                where = f"the first output that is not finite is that of stage {result.origin}"
            raise StepError(
                f"{result.fault} is not finite (infinite or NaN){where and f'; {where}'}",
                step=result.step,
                hint="lower the learning rate, clip gradients (training.clip_grad_norm) or look at "
                "the data; training.on_nonfinite: skip leaves such steps out; pipectl resume "
                "continues from the last checkpoint",
            )
        barrier(self._communicator)

    def _describe(self, fault: int, origin: int) -> tuple[NotFinite, int]:
        high, index = _decode(fault)
        if high == _BUFFER:
            return NotFinite(buffer=own_name(self._buffers[index])), -1
        if high < _LOSS:
            return NotFinite(gradient_of=own_name(self._names[index]), stage=high - 1), -1
        before, stage = _decode(origin)
        is_its = bool(origin) and _LOSS - before == index
        return NotFinite(loss_of_micro_batch=index), stage if is_its else -1


def _encode(high: int, low: int) -> int:
    """A positive number that rises with ``high`` and, for equal ``high``, falls with ``low``."""
    return high * _PLACES + _LOSS - low


def _decode(number: int) -> tuple[int, int]:
    high, low = divmod(number, _PLACES)
    return high, _LOSS - low
