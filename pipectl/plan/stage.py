"""A stage of a plan: its operators, the ranks that hold it, how it runs, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class StagePeaks:
    """Most bytes a stage allocates at once, above what it held before; full micro-batches.

    Args:
        forward_bytes: in a forward; saved bytes included, received values not.
        backward_bytes: in a backward that adds to gradients from before.
        first_backward_bytes: in a backward that makes the parameters' gradients.
        update_bytes: in an optimizer step.
    """

    forward_bytes: int
    backward_bytes: int
    first_backward_bytes: int
    update_bytes: int


@dataclass(frozen=True)
class StageCost:
    """Predicted cost of a stage: seconds for one full micro-batch, and resident bytes.

    Args:
        update_s: optimizer step of the stage, once per step.
        parameter_bytes: parameters.
        optimizer_bytes: optimizer state.
        saved_bytes: kept from forward to backward by one micro-batch, without recomputation.
        input_bytes: the part of them that recomputation starts from.
        gradient_bytes: of the parameters, from the first backward of a step to its end; as much
            as the parameters if None.
        buffer_bytes: buffers, such as BatchNorm's statistics.
        peaks: of the most samples that a replica takes at once; None where nothing is known of
            temporary values.
        weight_s: the part of ``backward_s`` in which a split backward makes the gradients of the
            parameters; half of it if None.
        deferred_bytes: kept by one micro-batch between the halves of a split backward; as much as
            ``saved_bytes`` if None.
        flops: floating-point operations of forward and backward; None if nobody counted.
    """

    forward_s: float
    backward_s: float
    update_s: float
    parameter_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    gradient_bytes: int | None = None
    buffer_bytes: int = 0
    input_bytes: int = 0
    peaks: StagePeaks | None = None
    weight_s: float | None = None
    deferred_bytes: int | None = None
    flops: int | None = None

    @property
    def halves_s(self) -> tuple[float, float]:
        """Seconds of the input half and of the weight half of a split backward."""
        weight_s = self.backward_s / 2 if self.weight_s is None else self.weight_s
        return self.backward_s - weight_s, weight_s

    @property
    def between_bytes(self) -> int:
        """Kept by one micro-batch between the halves of a split backward."""
        return self.saved_bytes if self.deferred_bytes is None else self.deferred_bytes

    @property
    def grown_bytes(self) -> int:
        """By how much one micro-batch keeps more between these halves than before them."""
        return max(0, self.between_bytes - self.saved_bytes)

    @property
    def freed_bytes(self) -> int:
        """By how much one micro-batch keeps less between these halves than before them."""
        return max(0, self.saved_bytes - self.between_bytes)

    @property
    def accumulated_bytes(self) -> int:
        """The parameters' gradients."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def resident_bytes(self) -> int:
        """What is there from one step to the next: parameters, optimizer state and buffers."""
        return self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes


@dataclass(frozen=True)
class Blocks:
    """Parts of a stage that recompute one after the other, each just before its own backward.

    Only the forward of the last one can run again before the gradients of the stage's results are
    there; those of the others are within the stage's backward.

    Args:
        firsts: the first operator of every block but the first one, in graph order.
        forward_s: of all blocks.
        recompute_s: the forward of the last block.
        backward_s: backwards of all blocks, and forwards of all but the last.
        kept_bytes: what one micro-batch keeps from forward to backward: the inputs of all blocks.
        last_bytes: what the last block saves besides its inputs.
        peaks: as :attr:`StageCost.peaks`.
        recompute_peak_bytes: most bytes that the forward of the last block allocates at once.
    """

    firsts: tuple[str, ...]
    forward_s: float
    recompute_s: float
    backward_s: float
    kept_bytes: int
    last_bytes: int
    peaks: StagePeaks | None = None
    recompute_peak_bytes: int = 0

    def fault(self, nodes: Sequence[str]) -> str | None:
        """Why these cannot be blocks of a stage with some operators; None if they can."""
        place = {node: index for index, node in enumerate(nodes)}
        places = [0, *(place.get(node, -1) for node in self.firsts)]
        rising = all(early < late for early, late in pairwise(places))
        return None if rising else f"begin with {list(self.firsts)}, not in the stage's order"

    def running(self, cost: StageCost) -> StageCost:
        """The cost of a stage that runs in these blocks."""
        return replace(
            cost,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            saved_bytes=self.kept_bytes + self.last_bytes,
            input_bytes=self.kept_bytes,
            peaks=self.peaks,
            weight_s=cost.halves_s[1],
            deferred_bytes=cost.between_bytes,
        )


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
