"""Who updates what, where the replicas of a stage share out its optimizer state."""

from __future__ import annotations

from collections.abc import Mapping


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
