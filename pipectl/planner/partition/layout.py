"""What searches choose: stages and their ranks, and everything that makes a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipectl.plan import Replication
from pipectl.planner.graph.downsets import Partition

Members = tuple[tuple[int, ...], ...]
"""Indices of the operators of every stage, ascending."""
Ranks = tuple[tuple[int, ...], ...]
"""The ranks of every stage."""


class Layout(NamedTuple):
    """Stages and their ranks.

    Args:
        recompute: which stages compute their forward again for their backward; empty if none.
    """

    partition: Partition
    ranks: Ranks
    recompute: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Choice:
    """Everything a plan decides.

    Args:
        ranks: of every stage, one per replica.
        size: samples of a micro-batch.
        replication: how replicas share the work.
        recompute: whether each stage computes its forward again for its backward; empty if none.
        backward_ranks: where the backward of each stage runs, if elsewhere; empty if none does.
    """

    members: Members
    ranks: Ranks
    size: int
    schedule: str
    warm_up: tuple[int, ...]
    replication: Replication = Replication.WHOLE
    recompute: tuple[bool, ...] = ()
    backward_ranks: Ranks = ()
