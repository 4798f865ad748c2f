"""What a captured model has that decides how exactly its training can be repeated elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipectl.capture.graph import CapturedGraph
from pipectl.capture.job import CapturedJob
from pipectl.capture.operators import arguments_by_name, is_random
from pipectl.capture.regions import region_of
from pipectl.capture.stage import uses_of_parameter
from pipectl.capture.step import own_name
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


def coupled_operators(graph: CapturedGraph) -> list[int]:
    """Places of the operators through which samples of a micro-batch depend on one another.

    Batch norm does that, and whatever gives a value of all samples (their mean, say) that an
    operator uses together with values of single samples, or relates samples to samples, as
    ``x @ x.T`` does. The mean at the end of a loss is none. A graph for one batch size does not
    show which dimensions count samples: there, batch norm alone is known.
    """
    places = []
    of_all: set[fx.Node] = set()
    for place, node in enumerate(graph.operators):
        sources = [s for s in graph.tensor_inputs(node) if s.name not in graph.states]
        here = _sample_dimensions(graph, node)
        before = max((_sample_dimensions(graph, source) for source in sources), default=0)
        mixed = bool(of_all.intersection(sources))
        if _is_batch_norm(node) or here > before > 0 or (here and mixed):
            places.append(place)
        elif not here and (before or mixed):
            of_all.add(node)
    return places


def _sample_dimensions(graph: CapturedGraph, node: fx.Node) -> int:
    """How many dimensions of a value count samples."""

    def counts(size: Any) -> bool:
        return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols & graph.symbols)

    values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    return max((sum(map(counts, value.shape)) for value in values), default=0)


def _is_batch_norm(node: fx.Node) -> bool:
    """One that takes its statistics from the micro-batch."""
    schema = getattr(node.target, "_schema", None)
    if "batch_norm" not in str(node.target) or schema is None:
        return False
    given = arguments_by_name(schema, node.args, node.kwargs)
    return bool(given.get("training", given.get("train", True)))
