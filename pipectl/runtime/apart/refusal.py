"""Operators whose backward no other rank can run."""

from __future__ import annotations

from typing import NoReturn

from torch._ops import HigherOrderOperator

from pipectl.capture import Cut
from pipectl.capture.opaque import Opaque
from pipectl.errors import MismatchError
from pipectl.runtime.apart.trace import TOGETHER


def check_operators(cut: Cut, stage: int) -> None:
    """Refuse a stage whose autograd graph may differ from one micro-batch to the next.

    Raises:
        MismatchError: naming the operator.
    """
    for name in cut.operators(stage):
        target = cut.graph.operators[cut.graph.position[name]].target
        if isinstance(target, Opaque | HigherOrderOperator):
            what = repr(target) if isinstance(target, Opaque) else name
            raise MismatchError(
                f"plan.json: stages[{stage}] has its backward on another rank, but {what} runs "
                "code of its own, which may do otherwise from one micro-batch to the next",
                cure=TOGETHER,
            )


def refuse_compiled(stage: int) -> NoReturn:
    """Refuse a stage whose operators a compiler chooses.

    Raises:
        MismatchError: always.
    """
    raise MismatchError(
        f"plan.json: stages[{stage}] has its backward on another rank, which cannot follow what "
        "torch.compile makes of its forward",
        cure="set training.compile: false, or pipeline.backward: together",
    )
