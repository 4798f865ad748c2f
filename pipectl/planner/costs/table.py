"""What stages cost, as sums over the downsets that they begin and end at.

A stage from one downset to another costs the difference of their sums. A name that several blocks
use (a shared parameter, a saved value) counts where it is first used; what enters a stage is taken
to be all that crosses the downset it begins at. So figures are exact for chains, and nearly so
where values skip stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.planner.costs.liveness import parameter_gradients, trained_parameters
from pipectl.planner.graph.blocks import bits
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.profile import Profile


class CostTable(NamedTuple):
    """Sums by downset for one micro-batch size; bytes as float64.

    Args:
        work_s: forward and backward in stages whose data stays in the cache, and in others; one row
            per number of samples that a replica may get; shape [rows, 2, downsets].
        forward_s: of a recomputation; shape [rows, downsets].
        stage_s: what a stage takes besides its operators.
        stage_forward_s: the part of it in a forward.
        cache_bytes: 0 if no data stays in a cache.
        summed_bytes: the parameters' gradients.
        state_bytes: of the optimizer.
        saved_bytes: kept for the backward of a micro-batch, besides what enters the stage.
        activation_bytes, gradient_bytes: what crosses a cut at the downset, and comes back.
    """

    work_s: Floats
    forward_s: Floats
    stage_s: float
    stage_forward_s: float
    cache_bytes: float
    parameter_bytes: Floats
    summed_bytes: Floats
    state_bytes: Floats
    saved_bytes: Floats
    activation_bytes: Floats
    gradient_bytes: Floats

    def reordered(self, order: Integers) -> CostTable:
        """With the downsets in another order."""
        sums: dict[str, Any] = {
            name: np.ascontiguousarray(value[..., order])
            for name, value in self._asdict().items()
            if isinstance(value, np.ndarray)
        }
        return self._replace(**sums)


def cost_table(
    space: CutSpace,
    profile: Profile,
    scale: float,
    work_s: Floats,
    forward_s: Floats,
) -> CostTable:
    """The table of a micro-batch size.

    Args:
        scale: micro-batch size over the profile's.
        work_s: forward and backward of every block, cached and not; shape [rows, 2, blocks].
        forward_s: of every block; shape [rows, blocks].
    """
    graph, operators = space.graph, profile.operators
    inside = [[operators[index] for index in block.operators] for block in graph.blocks]
    parameters = space.sums(_first_uses(block.parameters for block in graph.blocks))
    trained = space.sums(
        _first_uses(
            dict(pair for each in block for pair in trained_parameters(each)) for block in inside
        )
    )
    gradients = space.sums(
        [sum(size for each in block for _, size in parameter_gradients(each)) for block in inside]
    )
    state = profile.optimizer_cost.state_bytes_per_parameter_byte
    crossing = _crossing(space)
    sent, returned = (
        crossing @ np.array(sizes, dtype=np.float64) * scale
        for sizes in (
            [value.size_bytes for value in graph.values],
            [value.gradient_bytes for value in graph.values],
        )
    )
    overhead = profile.stage
    # One product per row: other products round otherwise, and ties between chains depend on that.
    work = (work_s[:, :, None] @ space.rows.T)[:, :, 0]
    return CostTable(
        work_s=np.ascontiguousarray(work),
        forward_s=np.stack([space.sums(row) for row in forward_s.tolist()]),
        stage_s=overhead.forward_s + overhead.backward_s,
        stage_forward_s=overhead.forward_s,
        cache_bytes=float(overhead.cache_bytes or 0),
        parameter_bytes=parameters,
        summed_bytes=gradients,
        state_bytes=state * trained,
        saved_bytes=space.sums(_first_uses(block.saved for block in graph.blocks)) * scale,
        activation_bytes=sent,
        gradient_bytes=returned,
    )


def _first_uses(blocks: Iterable[Mapping[str, int]]) -> list[float]:
    """Bytes of every block that no earlier one names."""
    seen: set[str] = set()
    found = []
    for named in blocks:
        found.append(float(sum(size for name, size in named.items() if name not in seen)))
        seen.update(named)
    return found


def _crossing(space: CutSpace) -> Floats:
    """1 where a value is made before a cut and read after it; shape [downsets, values]."""
    rows, values = space.rows, space.graph.values
    found = np.zeros((len(space), len(values)))
    for place, value in enumerate(values):
        users = list(bits(value.blocks))
        found[:, place] = rows[:, value.producer] & ~rows[:, users].all(axis=1)
    return found
