"""Imported profiles, in the form that the planner needs.

PipeDream's profiler records the input pipeline (``Input0``) and the unpacking of tuples
(``__getitem__(0)``) as nodes. Its planner, and DAPPLE's, which reads the same files, drop them
before they partition; a comparison with these planners has to do the same.

Some profiles list backward operators as separate nodes. Such an operator takes the place of its
forward operator: edges from other backward operators are reversed, and carry gradients::

    f0 ──► f1          f0 ──► f1           values of f0, gradients of b0's
           │     is                        f0 and b0 in one stage, f1 and b1 in one
    b0 ◄── b1          b0 ──► b1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pipectl.planner.graph.blocks import contract, group_labels
from pipectl.profile import Profile
from pipectl.profile_parts import Operator
from pipectl.sorting import topological_order

BACKWARD = "backward"
"""The phase of backward operators."""
PIPEDREAM_FILES = ("pipedream-", "dapple-")
"""Prefixes of the names of profiles that PipeDream's rule applies to."""


def pruned_if_pipedream(profile: Profile) -> Profile:
    """The profile, pruned by PipeDream's rule if its name has such a prefix."""
    return pipedream_pruned(profile) if profile.name.startswith(PIPEDREAM_FILES) else profile


def pipedream_pruned(profile: Profile) -> Profile:
    """Drop sources named ``Input…``, then sinks named ``__getitem__…``."""
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


def folded(profile: Profile, stages: Sequence[Sequence[str]] = ()) -> Profile:
    """The profile with the edges of backward operators turned to the direction of the pipeline.

    Values that backward operators send become gradients; they save nothing for a backward. Values
    of forward operators that a backward operator reads travel with the forward, or, if the reader
    comes earlier in the pipeline, with the backward.

    Args:
        profile: returned unchanged if it has no backward operators.
        stages: operator ids of stages already chosen, in pipeline order. They decide the direction
            of values even if the graph alone does not.
    """
    if all(operator.phase != BACKWARD for operator in profile.operators):
        return profile
    place = _places(profile, stages)
    edges: set[tuple[int, int]] = set()
    gradients = [operator.gradient_bytes for operator in profile.operators]
    for source, target in profile.edge_indices:
        turned, is_gradient = _turned(profile.operators, place, source, target)
        if turned is not None:
            edges.add(turned)
        if turned is not None and is_gradient:
            size_bytes = profile.operators[source].output_bytes
            gradients[turned[0]] = max(gradients[turned[0]], size_bytes)
    return _rebuilt(profile, sorted(edges), gradients)


def _turned(
    operators: Sequence[Operator], place: Sequence[tuple[int, int]], source: int, target: int
) -> tuple[tuple[int, int] | None, bool]:
    """An edge in the direction of the pipeline, and whether its value travels with the backward.

    None if both ends are in one place, and the edge does not constrain the forward.
    """
    sends, reads = (operators[index].phase == BACKWARD for index in (source, target))
    if place[source] == place[target] and sends:
        return ((target, source) if reads else None), True
    if place[source] <= place[target]:
        return (source, target), sends
    return (target, source), True


def _places(profile: Profile, stages: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """(stage, block) of every operator; messages of the forward go to larger ones."""
    operators = profile.operators
    arcs = stage_edges(operators, profile.edge_indices)
    graph = contract(operators, arcs, group_labels(operators))
    stage_of: Mapping[str, int] = {node: s for s, nodes in enumerate(stages) for node in nodes}
    return [
        (stage_of.get(o.id, 0), block) for o, block in zip(operators, graph.block_of, strict=True)
    ]


def _rebuilt(
    profile: Profile, edges: Sequence[tuple[int, int]], gradients: Sequence[int]
) -> Profile:
    """The profile with other edges and gradients, its operators in an order of these edges."""
    order = topological_order(range(len(profile.operators)), edges)
    operators = [
        _folded(operator, gradient_bytes)
        for operator, gradient_bytes in zip(profile.operators, gradients, strict=True)
    ]
    return replace(
        profile,
        operators=tuple(operators[index] for index in order),
        edges=tuple((operators[u].id, operators[v].id) for u, v in edges),
        edge_bytes={},
    )


def _folded(operator: Operator, gradient_bytes: int) -> Operator:
    if operator.phase != BACKWARD:
        return replace(operator, phase=None, gradient_bytes=gradient_bytes)
    return replace(operator, phase=None, output_bytes=0, gradient_bytes=gradient_bytes, saved=())


def stage_edges(
    operators: Sequence[Operator], edges: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The edges that constrain the order of stages."""
    backward = [operator.phase == BACKWARD for operator in operators]
    forward = {o.group for o in operators if o.phase != BACKWARD} - {None}
    alone = [back and o.group not in forward for back, o in zip(backward, operators, strict=True)]
    return [edge for edge in edges if not backward[edge[0]] and not backward[edge[1]]] + [
        (target, source)
        for source, target in edges
        if backward[source] and backward[target] and (alone[source] or alone[target])
    ]
