"""Blocks of a stage that recompute one after the other, and what the stage costs with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pipectl.plan.cost import StageCost, StagePeaks


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
        peaks: as :attr:`pipectl.plan.StageCost.peaks`.
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
