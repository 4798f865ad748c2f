"""The tables of the dynamic programme: sums over the blocks of every downset.

A stage costs what the sums over the two downsets that it begins and ends at differ by. A name that
several blocks use (a shared parameter, a saved value) counts at its first use. All values that
cross the downset at which a stage begins are taken to enter it. So costs are exact for chains, and
approximate if values skip stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers, Records, record
from pipectl.planner.graph.blocks import bits
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.problem import Problem
from pipectl.profile import Profile

_EXCLUDED = 1000.0
"""Load, relative to all work, of blocks that no replicas may compute: no chain chooses these."""
SUMS = record(
    floats="parameter_bytes trained_bytes summed_bytes state_bytes saved_bytes activation_bytes "
    "gradient_bytes"
)
"""Bytes per downset: parameters, those that an update changes, their gradients and the optimizer's
state; values kept for the backward of a micro-batch, besides those that enter the stage;
activations that cross a cut at the downset, and gradients that return."""


class CostTable(NamedTuple):
    """Sums by downset for one micro-batch size.

    Args:
        work_s: forward and backward, cached and uncached, one row per number of samples of a
            replica; shape [rows, 2, downsets].
        forward_s: of a recomputation; shape [rows, downsets].
        sums: shape [downsets].
        stage_s: overhead of a stage besides its operators.
        stage_forward_s: the part of it in the forward.
        cache_bytes: 0 if no data stays in a cache.
    """

    work_s: Floats
    forward_s: Floats
    sums: Records
    stage_s: float
    stage_forward_s: float
    cache_bytes: float

    def reordered(self, order: Integers) -> CostTable:
        """The table with the downsets in another order."""
        work_s, forward_s = (
            np.ascontiguousarray(each[..., order]) for each in (self.work_s, self.forward_s)
        )
        return self._replace(work_s=work_s, forward_s=forward_s, sums=self.sums[order])


def table_of(
    problem: Problem, space: CutSpace, size: int, samples: Sequence[int] = ()
) -> CostTable:
    """The cost table of micro-batches of ``size`` samples.

    Args:
        samples: of replicas, one row each; by default all samples.
    """
    rows = samples or (size,)
    work = [[problem.costs.block_times(row, cached=each) for each in (True, False)] for row in rows]
    for row in work[1:]:  # of several replicas
        for times in row:
            excluded_s = _EXCLUDED * sum(times)
            for block in bits(problem.unreplicated):
                times[block] += excluded_s
    forward = [problem.costs.block_times(row, forward=True) for row in rows]
    scale = problem.scale(size)
    return _sums(space, problem.profile, scale, np.array(work), np.array(forward))


def _sums(
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
    sums = np.zeros(len(space), dtype=SUMS)
    casts = (dict(pair for each in block for pair in each.casts) for block in inside)
    sums["parameter_bytes"] = space.sums(_first_uses(block.parameters for block in graph.blocks))
    sums["parameter_bytes"] += space.sums(_first_uses(casts))
    trained = profile.trained_parameters
    sums["trained_bytes"] = space.sums(
        _first_uses(
            dict(pair for index in block.operators for pair in trained[index])
            for block in graph.blocks
        )
    )
    state = profile.optimizer_cost.state_bytes_per_parameter_byte
    sums["state_bytes"] = state * sums["trained_bytes"]
    sums["summed_bytes"] = space.sums(
        [sum(size for each in block for _, size in each.parameter_gradients) for block in inside]
    )
    saved = _first_uses(block.saved for block in graph.blocks)
    sums["saved_bytes"] = space.sums(saved) * scale
    crossing = _crossing(space)
    for name, sizes in (
        ("activation_bytes", [value.size_bytes for value in graph.values]),
        ("gradient_bytes", [value.gradient_bytes for value in graph.values]),
    ):
        sums[name] = crossing @ np.array(sizes, dtype=np.float64) * scale
    # One product per row: others round differently, and ties between chains depend on rounding.
    work = (work_s[:, :, None] @ space.rows.T)[:, :, 0]
    return CostTable(
        work_s=np.ascontiguousarray(work),
        forward_s=np.stack([space.sums(row) for row in forward_s.tolist()]),
        sums=sums,
        stage_s=profile.stage.forward_s + profile.stage.backward_s,
        stage_forward_s=profile.stage.forward_s,
        cache_bytes=float(profile.stage.cache_bytes or 0),
    )


def _first_uses(blocks: Iterable[Mapping[str, int]]) -> list[float]:
    """Per block, the bytes of names that no earlier block has."""
    seen: set[str] = set()
    sizes = []
    for named in blocks:
        sizes.append(float(sum(size for name, size in named.items() if name not in seen)))
        seen.update(named)
    return sizes


def _crossing(space: CutSpace) -> Floats:
    """1 if a value is made before a cut and read after it; shape [downsets, values]."""
    rows, values = space.rows, space.graph.values
    crossing = np.zeros((len(space), len(values)))
    for place, value in enumerate(values):
        users = list(bits(value.blocks))
        crossing[:, place] = rows[:, value.producer] & ~rows[:, users].all(axis=1)
    return crossing
