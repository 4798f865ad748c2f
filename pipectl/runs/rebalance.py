"""What rank 0 and the process that plans again for it tell each other, as files of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipectl.fields import DataFile, Positive


@dataclass(frozen=True)
class Imbalance(DataFile):
    """``rebalance/imbalance.json``: how fast ranks compute, compared with their plan.

    Args:
        steps: that are left to train.
        move_s: what it costs to go on under another plan.
        shares: of each rank: share of its device's speed that it gets; the fastest gets 1.
        factors: of each stage: its measured time over its predicted time.
    """

    hint: ClassVar[str] = "the run goes on without it"
    steps: int
    move_s: float
    shares: tuple[Positive, ...]
    factors: tuple[Positive, ...]


@dataclass(frozen=True)
class Balance(DataFile):
    """``rebalance/balance.json``: the answer; ``plan.json`` and ``predicted.json`` are beside it.

    Args:
        pays: whether the training should go on under that plan.
        before_s, after_s: predicted seconds of a step under the plan before and under that one.
        operators: how many change their rank.
    """

    hint: ClassVar[str] = "the run goes on without it"
    pays: bool
    before_s: float
    after_s: float
    operators: int
