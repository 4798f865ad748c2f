"""Messages across a cut, and messages that sum gradients over the replicas of a stage.

The planner (on profile costs) and the runtime (on tensors) both take the messages from
:func:`routes` and the parts of sums from :func:`parts_of_bucket`, so both have the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipectl.older_python import StrEnum

BUCKET_BYTES = 4 * 2**20
"""Size of the buckets in which gradients are summed: small enough that the first bucket is sent
while the backward is running, large enough that the latency of a message does not matter."""
ROUNDS = 2
"""Rounds of messages per sum: the parts to their owners, then the sums to all replicas."""


class TransferKind(StrEnum):
    """What a message contains.

    Activations go to later stages and gradients to earlier stages. If the forward and the backward
    of a stage run on different ranks, saved values go to the backward and new weights come back.
    """

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    SAVED = "saved"
    WEIGHT = "weight"


class Lane(NamedTuple):
    """A directed connection between two stages: one message per micro-batch."""

    kind: TransferKind
    source: int
    target: int


def is_chained(producer: int, uses: Sequence[int]) -> bool:
    """Return whether the gradient of a value can be summed stage by stage on its way back.

    Autograd adds the gradients of a value's uses, the last use first. If the stages of the uses, in
    graph order, never decrease, each consumer stage adds its own uses to the partial sum of the
    next later consumer, and the result is bitwise equal to that of one process. Otherwise the
    gradient of every use goes to the producer, which adds them in that order.

    Args:
        producer: stage that computes the value.
        uses: stage of every use, in graph order.
    """
    return all(early <= late for early, late in zip((producer, *uses), uses, strict=False))


def routes(producer: int, uses: Sequence[int], *, has_gradient: bool) -> list[Lane]:
    """Return the lanes on which one value, and its gradient, are sent under a cut.

    For example, for a value produced in stage 0 and used in stages 1 and 3::

        activation   0 ---> 1        gradient   0 <--- 1 <--- 3
                     0 -----------> 3

    Args:
        producer: stage that computes the value.
        uses: stage of every use, in graph order, including uses in the producer's stage.
        has_gradient: whether the value has a gradient.

    Returns:
        Activation lanes by ascending target, then gradient lanes by descending source.
    """
    consumers = sorted({stage for stage in uses if stage != producer})
    forward = [Lane(TransferKind.ACTIVATION, producer, stage) for stage in consumers]
    if not has_gradient:
        return forward
    back = (
        zip(consumers, (producer, *consumers), strict=False)
        if is_chained(producer, uses)
        else ((stage, producer) for stage in consumers)
    )
    gradients = [Lane(TransferKind.GRADIENT, source, target) for source, target in back]
    return forward + gradients[::-1]


def parts_of_bucket(count: int, replicas: int, owner: int | None = None) -> list[range]:
    """Return the elements of a gradient bucket that each replica owns.

    Each replica receives its part from all others, adds the parts in the order of the replicas, and
    sends the sum to all (three replicas, parts a, b and c)::

        replica 0   a0 b0 c0    sends b0, c0    a = a0 + a1 + a2    sends a    a b c
        replica 1   a1 b1 c1    sends a1, c1    b = b0 + b1 + b2    sends b    a b c
        replica 2   a2 b2 c2    sends a2, b2    c = c0 + c1 + c2    sends c    a b c

    A replica sends and receives 2 (r - 1) / r of the bucket, as in a ring all-reduce, but in two
    rounds instead of 2 (r - 1). Each sum is computed once, in a fixed order, so its bits are the
    same on all replicas and do not depend on MPI. An all-reduce of MPI guarantees neither.

    Args:
        owner: replica that owns the whole bucket; None to split it.
    """
    if owner is not None:
        return [range(count if index == owner else 0) for index in range(replicas)]
    return [
        range(index * count // replicas, (index + 1) * count // replicas)
        for index in range(replicas)
    ]


def owners_of(sizes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """Assign each parameter to the replica that updates it, largest first, to the smallest load.

    Args:
        sizes: bytes of each parameter by name.
    """
    load = [0] * replicas
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = min(range(replicas), key=load.__getitem__)
        load[owners[name]] += sizes[name]
    return {name: owners[name] for name in sizes}
