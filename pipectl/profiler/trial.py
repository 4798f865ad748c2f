"""What a job needs besides its training steps, tried while its model is measured.

Ranks find these faults too, but only after the job has waited for its nodes. With a profile that is
up to date nothing is tried: it does not depend on evaluation, callbacks and schedule.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor

from pipectl.capture import CapturedJob
from pipectl.capture.batch import Reader
from pipectl.capture.data import Loader
from pipectl.capture.shares import target_weight
from pipectl.capture.stage import uses_of_parameter
from pipectl.errors import CaptureError, WorkerError
from pipectl.objects import seed_everything
from pipectl.runtime.callbacks import import_callbacks
from pipectl.runtime.evaluation_metrics import Metrics
from pipectl.runtime.unflushed import refuse
from pipectl.runtime.update_trials import refuse_own_memory
from pipectl.schedule import SCHEDULES
from pipectl.torch_api import pytree

_PATIENCE_S = 10.0
"""For the evaluation of all held-out data, if a metric needs more than one micro-batch."""


def try_job(job: CapturedJob, size: int, device: torch.device) -> None:
    """Try held-out data, the evaluation graph, weights of losses, callbacks, a named schedule.

    Graphs are captured, so parameters must still be on the host.

    Args:
        size: of a micro-batch.
        device: where the job trains.

    Raises:
        CaptureError: naming the key, and what is wrong with it.
    """
    with as_refusal():
        job.check_counts()
        import_callbacks(job.spec)
        if (weigh := job.weight()) is not None:
            target_weight(weigh, job.spec.loss.weight, job.loader.example(size)[1])
        _try_schedule(job, size, device)
        if (loader := job.evaluation_loader) is not None:
            _try_evaluation(job, loader, _evaluation_size(job, size))


@contextmanager
def as_refusal() -> Iterator[None]:
    """Turn what would be an error of a training into one of an input."""
    try:
        yield
    except WorkerError as error:
        raise CaptureError(error.message, hint=error.hint) from error


def _try_schedule(job: CapturedJob, size: int, device: torch.device) -> None:
    name = job.spec.pipeline.schedule
    if name is None or name not in SCHEDULES or SCHEDULES[name].flushes:
        return
    graph = job.training_graph(size)
    uses = {state.name: uses_of_parameter(graph, place) for place, state in graph.states.items()}
    refuse(job.spec.training, name, {each: found for each, found in uses.items() if found})
    refuse_own_memory(job, device)


def _try_evaluation(job: CapturedJob, loader: Loader, size: int) -> None:
    """Capture the evaluation, and compare held-out data with what was captured."""
    for samples, length in loader.shapes(size):
        reader = Reader(job.evaluation_graph(samples, length), training=False, length=length)
        values = reader.read(loader.example(samples, length=length))
        reader.check(values, samples, values)


def try_metrics(job: CapturedJob, size: int, device: torch.device) -> None:
    """Try metrics on held-out micro-batches of every shape; see :func:`try_job`.

    Args:
        device: where the parameters are.
    """
    loader, metrics = job.evaluation_loader, job.metrics()
    if loader is None or not metrics or job.is_deferred:
        return
    size = _evaluation_size(job, size)
    examples = [loader.example(n, length=length) for n, length in loader.shapes(size)]
    with as_refusal():
        try:
            _try_metrics(job, metrics, examples, device)
        except WorkerError:  # perhaps a metric that has no result for so few samples
            everything = loader.micro_batches(loader.epoch(0), size)
            _try_metrics(job, metrics, everything, device, time.monotonic() + _PATIENCE_S)


def _evaluation_size(job: CapturedJob, size: int) -> int:
    assert job.spec.evaluation is not None
    return job.spec.evaluation.batch_size or size


def _try_metrics(
    job: CapturedJob,
    metrics: dict[str, Any],
    batches: Iterable[tuple[Any, Any]],
    device: torch.device,
    until: float = inf,
) -> None:
    """Evaluate batches; if time is short, leave it to the ranks, before their first step."""
    tried = Metrics(metrics)
    first: tuple[Any, ...] | None = None
    for batch in batches:
        if time.monotonic() > until:
            return
        loss, outputs = job.evaluate(batch, device)
        on_host = pytree.tree_map_only(Tensor, Tensor.cpu, outputs)
        first = first or (1, float(loss), on_host, batch[1])
        tried.add(1, float(loss), on_host, batch[1])
    tried.result()
    if first is not None:
        _refuse_lasting(metrics, *first)


def _refuse_lasting(metrics: dict[str, Any], *given: Any) -> None:
    """Refuse metrics in which an evaluation leaves something for the next one.

    Args:
        given: what they get for a micro-batch.

    Raises:
        CaptureError: naming the metric.
    """
    found = []
    for _ in range(2):
        seed_everything(0)
        again = Metrics(metrics)
        again.add(*given)
        try:
            found.append(again.result())
        except WorkerError:  # it has no result for so few samples
            return
    for name in metrics:
        one, other = (values[name] for values in found)
        if one != other and not (isnan(one) and isnan(other)):
            raise CaptureError(
                f"evaluation.metrics.{name}: gives {one:g}, then {other:g} for the same outputs, "
                "as it keeps something from one evaluation to the next",
                hint="keep it in the object, which is fresh for every evaluation, or clear it in "
                "reset()",
            )
