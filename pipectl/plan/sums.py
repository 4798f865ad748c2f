"""How the replicas of a stage sum their gradients, and share out its optimizer state.

Gradients travel in buckets. Every replica owns a part of a bucket. It receives that part of all
others, adds them up in the order of the replicas, and sends the sum to all (three replicas, parts
a, b and c)::

    replica 0   a0 b0 c0    sends b0, c0    a = a0 + a1 + a2    sends a    a b c
    replica 1   a1 b1 c1    sends a1, c1    b = b0 + b1 + b2    sends b    a b c
    replica 2   a2 b2 c2    sends a2, b2    c = c0 + c1 + c2    sends c    a b c

A replica sends and receives as many bytes as in a ring, 2 (r - 1) / r of the bucket, in two rounds
instead of 2 (r - 1). And every sum is formed once, in one order: so its bits do not depend on MPI,
and all replicas have the same ones, neither of which an all-reduce of MPI promises.
"""

from __future__ import annotations

from collections.abc import Mapping

BUCKET_BYTES = 4 * 2**20
"""Small enough that the first leave while the backward goes on, large enough that a message's
latency does not count."""
ROUNDS = 2
"""The parts to their owners, and the sums to all."""


def parts_of_bucket(count: int, replicas: int, owner: int | None = None) -> list[range]:
    """The elements of a bucket that each replica owns.

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
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        found[name] = min(range(replicas), key=load.__getitem__)
        load[found[name]] += sizes[name]
    return {name: found[name] for name in sizes}
