"""What a captured model has that decides how exactly its training can be repeated elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from pipectl.capture.job import CapturedJob
from pipectl.capture.names import own_name
from pipectl.capture.randomness import is_random
from pipectl.capture.regions import region_of
from pipectl.capture.stage import uses_of_parameter
from pipectl.spec import JobSpec


@dataclass(frozen=True)
class Traits:
    """Properties of a training graph.

    Args:
        random: operators that draw random numbers.
        shared: trained parameters that several operators use, by their names in the user's model.
        half: whether some operators run in half precision by an autocast of the model's own.
    """

    random: tuple[str, ...]
    shared: tuple[str, ...]
    half: bool


def find_traits(spec: JobSpec, batch: int) -> Traits:
    """Capture a job's model for micro-batches of ``batch`` samples and look.

    Raises:
        CaptureError: the model cannot be captured.
    """
    job = CapturedJob(spec)
    graph = job.training_graph(batch)
    shared = [
        own_name(state.name)
        for placeholder, state in graph.states.items()
        if uses_of_parameter(graph, placeholder) and job.states[state.name].requires_grad
    ]
    random = [node.name for node in graph.operators if is_random(node, graph.root)]
    autocasts = (setting for node in graph.operators for setting in region_of(node).autocasts)
    return Traits(tuple(random), tuple(shared), any(setting.enabled for setting in autocasts))
