"""Improve a partition by moving single blocks out of its most loaded stage.

Where no exhaustive search is possible, that is the last step; where one is, it starts from less. A
block may move to any stage between those of its
predecessors and those of its successors; only the loads of the two stages change, because a value
that other stages use crosses their borders before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pipectl.arrays import Integers
from pipectl.planner.exact.chains import Stages
from pipectl.planner.exact.load_model import LoadModel
from pipectl.planner.exact.request import DeviceKind


def improved(model: LoadModel, stages: Stages, expired: Callable[[], bool]) -> Stages:
    """The partition after moves that lower the largest load, until none does or time is up."""
    while not expired():
        better = _best_move(model, stages)
        if better is None:
            break
        stages = better
    return stages


def _best_move(model: LoadModel, stages: Stages) -> Stages | None:
    """The partition with the move after which the larger of the two stages is smallest."""
    loads = stages.loads_s(model)
    full = int(np.argmax(loads))
    stage_of = np.zeros(len(model), dtype=np.int64)
    for stage, blocks in enumerate(stages.blocks):
        stage_of[list(blocks)] = stage
    best_s, best = loads[full], None
    for block in stages.blocks[full] if len(stages.blocks[full]) > 1 else ():
        for target in _targets(model, stage_of, block, len(loads)):
            moved = _moved(stages, block, full, target)
            new = [model.load_s(moved.blocks[s], moved.devices[s]) for s in (full, target)]
            if max(new) < best_s and _fits(model, moved, target):
                best_s, best = max(new), moved
    return best


def _targets(model: LoadModel, stage_of: Integers, block: int, stages: int) -> Iterator[int]:
    """Other stages where a block may stand."""
    before = stage_of[model.predecessors.of_row(block)]
    after = stage_of[model.successors.of_row(block)]
    first, last = before.max(initial=0), after.min(initial=stages - 1)
    return (stage for stage in range(first, last + 1) if stage != stage_of[block])


def _moved(stages: Stages, block: int, source: int, target: int) -> Stages:
    blocks = list(stages.blocks)
    blocks[source] = tuple(other for other in blocks[source] if other != block)
    blocks[target] = tuple(sorted((*blocks[target], block)))
    return Stages(tuple(blocks), stages.devices)


def _fits(model: LoadModel, stages: Stages, stage: int) -> bool:
    """Whether a stage stays within the memory of its device."""
    if stages.devices[stage] is DeviceKind.CPU:
        return True
    return float(model.memory_bytes[list(stages.blocks[stage])].sum()) <= model.limit_bytes
