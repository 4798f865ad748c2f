"""Nodes of imported profiles that no device computes.

PipeDream's profiler records the input pipeline (``Input0``) and the unpacking of tuples
(``__getitem__(0)``) as nodes. Its planner, and DAPPLE's, which reads the same files, drop them
before they partition; whoever compares with these planners drops them too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pipectl.profile import Profile

PIPEDREAM_FILES = ("pipedream-", "dapple-")
"""How the names of profiles begin to which PipeDream's rule applies."""


def prepared(profile: Profile) -> Profile:
    """The profile as the planner takes it: by PipeDream's rule where its name tells that source."""
    return pipedream_pruned(profile) if profile.name.startswith(PIPEDREAM_FILES) else profile


def pipedream_pruned(profile: Profile) -> Profile:
    """Drop sources called ``Input…``, then those sinks called ``__getitem__…`` that there are."""
    targets = {target for _, target in profile.edges}
    without_inputs = _without(profile, "Input", targets)
    sources = {source for source, _ in without_inputs.edges}
    return _without(without_inputs, "__getitem__", sources)


def _without(profile: Profile, prefix: str, kept: Iterable[str]) -> Profile:
    """The profile without the operators of a prefix that are not in ``kept``."""
    stays = set(kept)
    dropped = {o.id for o in profile.operators if o.name.startswith(prefix) and o.id not in stays}
    edges = [edge for edge in profile.edges if not dropped.intersection(edge)]
    return replace(
        profile,
        operators=tuple(o for o in profile.operators if o.id not in dropped),
        edges=tuple(edges),
        edge_bytes={e: size for e, size in profile.edge_bytes.items() if e in set(edges)},
    )
