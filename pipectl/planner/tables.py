"""The costs of a partition's stages and messages as arrays, for bounds on many candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipectl.graph import TransferKind
from pipectl.plan import StageCost, StagePeaks, Transfer

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StageTable:
    """Costs of one full micro-batch; shapes [stages] and [transfers]."""

    costs: tuple[StageCost, ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def forward_s(self) -> Floats:
        """Forward of every stage."""
        return np.array([cost.forward_s for cost in self.costs])

    @cached_property
    def backward_s(self) -> Floats:
        """Backward of every stage."""
        return np.array([cost.backward_s for cost in self.costs])

    @cached_property
    def update_s(self) -> Floats:
        """Optimizer step of every stage."""
        return np.array([cost.update_s for cost in self.costs])

    @cached_property
    def resident_bytes(self) -> Integers:
        """There from one step to the next."""
        return np.array([cost.resident_bytes for cost in self.costs])

    @cached_property
    def gradient_bytes(self) -> Integers:
        """Gradients of the parameters."""
        return np.array([cost.accumulated_bytes for cost in self.costs])

    @cached_property
    def saved_bytes(self) -> Integers:
        """Kept from forward to backward, without and with recomputation; shape [2, stages]."""
        kept = [[cost.saved_bytes, cost.input_bytes] for cost in self.costs]
        return np.array(kept).T

    @cached_property
    def peaks(self) -> Integers:
        """Of forward, first and later backwards, and update; shape [4, stages]."""
        return np.array([_peaks(cost) for cost in self.costs]).T

    @cached_property
    def routes(self) -> Integers:
        """Source and target of every transfer, activations by rising source before gradients by
        rising target; shape [2, transfers]."""
        pairs = [(item.source, item.target) for item in self._ordered]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    @cached_property
    def size_bytes(self) -> Floats:
        """Of every transfer, in the same order."""
        return np.array([item.size_bytes for item in self._ordered], dtype=float)

    @cached_property
    def activations(self) -> int:
        """How many of the transfers are activations."""
        return sum(item.kind is TransferKind.ACTIVATION for item in self.transfers)

    @cached_property
    def _ordered(self) -> Sequence[Transfer]:
        return sorted(self.transfers, key=_order)


def _order(item: Transfer) -> tuple[bool, int]:
    backward = item.kind is TransferKind.GRADIENT
    return backward, item.target if backward else item.source


def _peaks(cost: StageCost) -> tuple[int, int, int, int]:
    peaks = cost.peaks or StagePeaks(0, 0, cost.accumulated_bytes, 0)
    return (
        peaks.forward_bytes,
        peaks.first_backward_bytes,
        peaks.backward_bytes,
        peaks.update_bytes,
    )
