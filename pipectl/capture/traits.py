"""What a job's training graph has that decides how its trainings may be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipectl.capture.job import CapturedJob
from pipectl.capture.model_with_loss import own_name
from pipectl.capture.operators import is_random
from pipectl.capture.regions import region_of
from pipectl.capture.stage import uses_of_parameter
from pipectl.spec import JobSpec


@dataclass(frozen=True)
class Traits:
    """Properties of a training graph.

    Args:
        random: operators that draw random numbers.
        shared: trained parameters that several operators use, by their names in the user's model,
            with the number of these operators.
        half: whether some operators run in half precision by an autocast inside the model.
        script_samples: those that the job's script takes in a step; None without one.
    """

    random: tuple[str, ...]
    shared: Mapping[str, int]
    half: bool
    script_samples: int | None = None


def find_traits(spec: JobSpec, samples: int) -> Traits:
    """Capture a job's model for micro-batches of ``samples`` and return its traits.

    Raises:
        CaptureError: the model cannot be captured.
    """
    job = CapturedJob(spec)
    graph = job.training_graph(samples)
    shared = {
        own_name(state.name): len(uses)
        for placeholder, state in graph.states.items()
        if (uses := uses_of_parameter(graph, placeholder)) and job.states[state.name].requires_grad
    }
    random = [node.name for node in graph.operators if is_random(node, graph.root)]
    autocasts = (setting for node in graph.operators for setting in region_of(node).autocasts)
    half = any(setting.enabled for setting in autocasts)
    of_script = job.script.samples_per_step if job.script else None
    return Traits(tuple(random), shared, half, of_script)
