"""Which stage computes each operator of the evaluation graph, given the plan for training."""

from __future__ import annotations

from collections.abc import Mapping

from pipectl.capture.graph import CapturedGraph
from pipectl.errors import CaptureError


def evaluation_stages(
    graph: CapturedGraph, training: CapturedGraph, plan: Mapping[str, int]
) -> dict[str, int]:
    """Stages for the operators of the evaluation graph.

    An operator goes where its parameters and buffers are, and every operator as early as its
    inputs and its group allow: whatever is possible at all is possible that way. The loss waits for
    the outputs, which are wanted where it is.

    Raises:
        CaptureError: a parameter is only in a stage before the values it meets.
    """
    allowed = _allowed_stages(graph, _holders(training, plan))
    sources = {n.name: [s.name for s in graph.tensor_inputs(n)] for n in graph.operators}
    sources[graph.loss] += [name for name in graph.outputs if name in sources]
    stage_of = dict.fromkeys(sources, 0)
    lowest_of_group = dict.fromkeys(graph.groups.values(), 0)
    settled = False
    while not settled:  # a member of a group may have to wait for one that comes later
        settled = True
        for name, group in ((name, graph.groups.get(name, "")) for name in sources):
            earliest = max(stage_of.get(source, 0) for source in (*sources[name], name))
            stage = _first_allowed(name, allowed, max(earliest, lowest_of_group.get(group, 0)))
            settled = settled and stage == stage_of[name]
            stage_of[name] = stage
            if group:
                lowest_of_group[group] = stage
    return stage_of


def _first_allowed(name: str, allowed: Mapping[str, Mapping[str, set[int]]], earliest: int) -> int:
    """The first stage from ``earliest`` on that holds every state an operator reads."""
    held = allowed[name]
    if not held:
        return earliest
    common = [stage for stage in set.intersection(*held.values()) if stage >= earliest]
    if not common:
        raise CaptureError(
            f"model: in evaluation {name!r} needs {next(iter(held))!r} after its stage",
            cure="use fewer stages, or the same order of layers in evaluation as in training",
        )
    return min(common)


def _allowed_stages(
    graph: CapturedGraph, holders: Mapping[str, set[int]]
) -> dict[str, dict[str, set[int]]]:
    """For every operator: the stages that hold each of its states, by the state's full name."""
    found: dict[str, dict[str, set[int]]] = {}
    for node in graph.operators:
        read = (graph.states[s.name] for s in graph.tensor_inputs(node) if s.name in graph.states)
        found[node.name] = {s.name: holders[s.name] for s in read if s.name in holders}
    return found


def _holders(graph: CapturedGraph, stage_of: Mapping[str, int]) -> dict[str, set[int]]:
    """Stages that hold each parameter and buffer in training, by full name."""
    found: dict[str, set[int]] = {}
    for placeholder, state in graph.states.items():
        users = graph.users.get(placeholder, ())
        if users and state.kind != "constant":
            found[state.name] = {stage_of[user] for user in users}
    return found
