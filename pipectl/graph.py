"""What crosses a cut: which stage sends which value, and by which way its gradient returns.

Both the planner (on profile costs) and the runtime (on tensors) take their messages from
:func:`routes`, so what is simulated is what is sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class TransferKind(StrEnum):
    """What a message holds.

    Activations go to later stages, gradients to earlier ones. Where forward and backward of a
    stage have ranks of their own, saved values go from the first to the second, and new weights
    back.
    """

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    SAVED = "saved"
    WEIGHT = "weight"


@dataclass(frozen=True, order=True)
class Route:
    """One value, or its gradient, on its way from stage ``source`` to stage ``target``."""

    kind: TransferKind
    value: str
    source: int
    target: int


def is_chained(producer: int, uses: Sequence[int]) -> bool:
    """Whether the gradient of a value can be summed on its way back.

    Autograd adds the gradients of a value's uses last use first. Where the uses, in graph order,
    lie in stages that never decrease, each consumer stage can add its own uses to the partial sum
    of the next later consumer, and the result equals one process to the bit. Otherwise every
    use's gradient travels to the producer on its own and is summed there in that order.

    Args:
        producer: stage that computes the value.
        uses: stage of every use, in graph order.
    """
    return all(early <= late for early, late in zip((producer, *uses), uses, strict=False))


def routes(value: str, producer: int, uses: Sequence[int], *, has_gradient: bool) -> list[Route]:
    """The messages one value needs under a cut.

    A picture, for a value made in stage 0 and used in stages 1 and 3::

        activation   0 ---> 1        gradient   0 <--- 1 <--- 3
                     0 -----------> 3

    Args:
        value: id of the value.
        producer: stage that computes it.
        uses: stage of every use, in graph order; the producer's own uses included.
        has_gradient: whether a gradient comes back.

    Returns:
        Activation routes by rising target, then gradient routes by falling source.
    """
    consumers = sorted({stage for stage in uses if stage != producer})
    forward = [Route(TransferKind.ACTIVATION, value, producer, stage) for stage in consumers]
    if not has_gradient:
        return forward
    back = (
        zip(consumers, (producer, *consumers), strict=False)
        if is_chained(producer, uses)
        else ((stage, producer) for stage in consumers)
    )
    gradients = [Route(TransferKind.GRADIENT, value, source, target) for source, target in back]
    return forward + gradients[::-1]


def topological_order(nodes: Sequence[int], arcs: Iterable[tuple[int, int]]) -> list[int]:
    """The topological order that always takes the smallest node that is ready.

    Args:
        nodes: ascending.
        arcs: distinct (from, to) pairs; one from a node to itself counts for nothing.

    Returns:
        ``nodes``, without those on a cycle or after one.
    """
    targets: dict[int, list[int]] = {node: [] for node in nodes}
    missing = dict.fromkeys(nodes, 0)
    for source, target in arcs:
        if source != target:
            targets[source].append(target)
            missing[target] += 1
    ready = [node for node in nodes if not missing[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for target in targets[node]:
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, target)
    return order
