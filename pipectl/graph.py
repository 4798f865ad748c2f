"""What crosses a cut, and what replicas of a stage send each other to sum their gradients.

Both the planner (on profile costs) and the runtime (on tensors) take their messages from
:func:`routes`, and the parts of sums from :func:`parts_of_bucket`, so what is simulated is what is
sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

BUCKET_BYTES = 4 * 2**20
"""Gradients are summed in buckets: small enough that the first leave while the backward goes on,
large enough that a message's latency does not count."""
ROUNDS = 2
"""Of messages per sum: the parts to their owners, and the sums to all."""


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


def parts_of_bucket(count: int, replicas: int, owner: int | None = None) -> list[range]:
    """The elements of a bucket of gradients that each replica owns.

    Every replica receives its part of all others, adds them up in the order of the replicas, and
    sends the sum to all (three replicas, parts a, b and c)::

        replica 0   a0 b0 c0    sends b0, c0    a = a0 + a1 + a2    sends a    a b c
        replica 1   a1 b1 c1    sends a1, c1    b = b0 + b1 + b2    sends b    a b c
        replica 2   a2 b2 c2    sends a2, b2    c = c0 + c1 + c2    sends c    a b c

    A replica sends and receives as many bytes as in a ring, 2 (r - 1) / r of the bucket, in two
    rounds instead of 2 (r - 1). Every sum is formed once, in one order: its bits do not depend on
    MPI, and all replicas have the same ones. An all-reduce of MPI promises neither.

    Args:
        owner: the replica that owns all of them.
    """
    if owner is not None:
        return [range(count if index == owner else 0) for index in range(replicas)]
    return [
        range(index * count // replicas, (index + 1) * count // replicas)
        for index in range(replicas)
    ]


def owners_of(sizes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """The replica that updates each parameter: the largest first, to who has least so far.

    Args:
        sizes: bytes of the parameters by name.
    """
    load = [0] * replicas
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = min(range(replicas), key=load.__getitem__)
        load[owners[name]] += sizes[name]
    return {name: owners[name] for name in sizes}
