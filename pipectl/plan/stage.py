"""A stage of a plan: its operators, the ranks that hold it, and how it runs on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipectl.plan.blocks import Blocks
from pipectl.plan.cost import StageCost


@dataclass(frozen=True)
class Stage:
    """A convex part of the graph, the ranks that hold it, and what they keep for its backward.

    Args:
        nodes: operator ids in graph order.
        ranks: one per replica.
        backward_ranks: where the backward of each replica runs, and its optimizer step; empty
            if on the same rank as its forward.
        recompute: whether only the stage's inputs are kept, and the rest computed once more.
        offload: whether what is kept leaves the device's memory until the backward.
        blocks: parts that recompute one after the other; None if all of the stage at once.
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    cost: StageCost
    backward_ranks: tuple[int, ...] = ()
    recompute: bool = False
    offload: bool = False
    blocks: Blocks | None = None

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return len(self.ranks)

    @property
    def load_s(self) -> float:
        """Time of a micro-batch on the replicas, which work side by side."""
        return (self.cost.forward_s + self.cost.backward_s) / self.replicas

    @property
    def updating_ranks(self) -> tuple[int, ...]:
        """Where the backward of each replica runs."""
        return self.backward_ranks or self.ranks

    @property
    def kept_bytes(self) -> int:
        """Kept from forward to backward by one full micro-batch, on the device or elsewhere."""
        return self.running.input_bytes if self.recompute else self.running.saved_bytes

    @cached_property
    def running(self) -> StageCost:
        """What it costs as it runs: in blocks if it has any; without the time of RECOMPUTE."""
        return self.cost if self.blocks is None else self.blocks.running(self.cost)

    @property
    def recompute_s(self) -> float:
        """Seconds of what runs again before the gradients of its results are there."""
        return self.cost.forward_s if self.blocks is None else self.blocks.recompute_s

    @property
    def recompute_peak_bytes(self) -> int:
        """The most that this allocates at once; 0 where nothing is known of temporary values."""
        if self.blocks is not None:
            return self.blocks.recompute_peak_bytes
        return 0 if self.cost.peaks is None else self.cost.peaks.forward_bytes

    @property
    def input_half_bytes(self) -> int:
        """What the first half of a split backward holds at once more than a whole backward."""
        # Of blocks, what weights need adds up while one after the other is recomputed.
        return self.running.grown_bytes if self.blocks is None else self.running.between_bytes

    @property
    def reduction_bytes(self) -> int:
        """Held by each replica, besides its gradients, while these are summed: a copy to send from,
        and what arrives, first the others' versions of its part, then the sums of theirs."""
        if self.replicas == 1:
            return 0
        return self.cost.accumulated_bytes * (2 * self.replicas - 1) // self.replicas
