"""The costs of a partition's stages and messages, their memory as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipectl.arrays import Integers
from pipectl.plan import StageCost, StagePeaks, Transfer


@dataclass(frozen=True)
class StageTable:
    """Costs of one full micro-batch; arrays have the shape [stages]."""

    costs: tuple[StageCost, ...]
    transfers: tuple[Transfer, ...]

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


def _peaks(cost: StageCost) -> tuple[int, int, int, int]:
    peaks = cost.peaks or StagePeaks(0, 0, cost.accumulated_bytes, 0)
    return (
        peaks.forward_bytes,
        peaks.first_backward_bytes,
        peaks.backward_bytes,
        peaks.update_bytes,
    )
