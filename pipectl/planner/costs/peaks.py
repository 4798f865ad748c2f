"""Memory of a stage's rank that no order of actions avoids: plans above a limit are dropped.

    peak = process + parameters + buffers + optimizer state + micro-batches in flight
                   + gradients of the parameters, from the first backward on
                   + what the action that runs holds for itself

The simulator adds the buffers of messages under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipectl.arrays import Floats, Integers
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


def least_peaks_bytes(
    table: StageTable,
    warm_up: Sequence[int],
    shares: Sequence[float],
    recompute: Sequence[bool] = (),
) -> Floats:
    """Lower bounds on the memory of the ranks of all stages, without the process.

    Args:
        warm_up: micro-batches in flight.
        shares: sizes of the step's micro-batches, relative to a full one.
        recompute: stages that keep only their inputs, and hold the rest in one backward.
    """
    depth = np.minimum(np.array(warm_up), len(shares))
    goes_on = depth < len(shares)
    flying = np.where(goes_on, depth, len(shares) - 1 + shares[-1])
    again = np.array(recompute, dtype=np.int64) if len(recompute) else np.zeros_like(depth)
    kept = np.where(again, table.saved_bytes[1], table.saved_bytes[0])
    saved, last, gradients = flying * kept, shares[0] * kept, table.gradient_bytes
    whole = np.where(again, shares[0] * (table.saved_bytes[0] - kept), 0)
    forward, first_backward, backward, update = table.peaks
    later = np.where(goes_on, gradients, 0)  # there in the last forward of a full pipeline
    moments = (
        later + saved,
        later + saved - last + forward,
        saved + whole + first_backward,
        gradients + np.where(goes_on, saved, saved - last) + whole + backward * (depth > 1),
        gradients + update,
    )
    highest: Floats = np.maximum.reduce(moments) + table.resident_bytes
    return highest


def largest_peak_bytes(
    costs: Sequence[StageCost], warm_up: Sequence[int], baseline_bytes: int, micro_batches: int
) -> int:
    """The same for the most demanding of some stages, when every micro-batch is full."""
    table = StageTable(tuple(costs), ())
    peaks = least_peaks_bytes(table, warm_up, (1.0,) * micro_batches)
    return baseline_bytes + round(float(peaks.max()))
