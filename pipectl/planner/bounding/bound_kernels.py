"""Inner loop of the bounds, compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled
from pipectl.planner.bounding.recurrence import Stages, Transfers, step_s


class Pipelines(NamedTuple):
    """Pipelines of equally many stages.

    Args:
        forward_s, backward_s, update_s: on the stage's device; shape [pipelines, stages].
        source, target: of all transfers of all partitions.
        hold_s: by kind of link; shape [kinds, transfers].
        late_s: by kind of link.
        first: where activations and gradients of partition p begin, at 2 p and 2 p + 1.
        cut: partition of every pipeline.
        node, switch: of every stage; shape [pipelines, stages].
    """

    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    source: Integers
    target: Integers
    hold_s: Floats
    late_s: Floats
    first: Integers
    cut: Integers
    node: Integers
    switch: Integers


@compiled
def step_times(
    pipelines: Pipelines,
    warm_ups: Integers,
    micro_batches: int,
    last_share: float,
    begin: int,
    end: int,
    steps_s: Floats,
) -> None:
    """Fill in the step times of some pipelines.

    Args:
        warm_ups: by order and stage.
        begin, end: which pipelines.
        steps_s: shape [pipelines, orders].
    """
    stages = pipelines.forward_s.shape[1]
    nothing = np.zeros(stages, np.float64)
    for row in range(begin, end):
        place = 2 * pipelines.cut[row]
        ahead = _transfers(pipelines, row, pipelines.first[place], pipelines.first[place + 1])
        behind = _transfers(pipelines, row, pipelines.first[place + 1], pipelines.first[place + 2])
        for order in range(len(warm_ups)):
            costs = Stages(
                pipelines.forward_s[row],
                pipelines.backward_s[row],
                nothing,
                pipelines.update_s[row],
                warm_ups[order],
            )
            ends = np.zeros(stages, np.float64)
            steps_s[row, order] = step_s(costs, ahead, behind, micro_batches, last_share, ends)


@compiled
def _transfers(pipelines: Pipelines, row: int, begin: int, end: int) -> Transfers:
    """The transfers of one pipeline and direction on the links that they take there."""
    source, target = pipelines.source[begin:end], pipelines.target[begin:end]
    hold_s, late_s = np.empty(end - begin, np.float64), np.empty(end - begin, np.float64)
    for way in range(end - begin):
        kind = 0
        if pipelines.node[row, source[way]] != pipelines.node[row, target[way]]:
            near = pipelines.switch[row, source[way]] == pipelines.switch[row, target[way]]
            kind = 1 if near else 2
        hold_s[way] = pipelines.hold_s[kind, begin + way]
        late_s[way] = pipelines.late_s[kind]
    return Transfers(source, target, hold_s, late_s)
