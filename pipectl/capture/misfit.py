"""Whether model, loss and data of a job fit each other: they are run as they are, without a graph.

Only when something failed: what fails without a graph, too, is the job's, all else torch's or ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pipectl.capture.deferred import is_deferred
from pipectl.capture.explain import UnexplainedError, first_line, place_of
from pipectl.capture.python_state import undisturbed
from pipectl.capture.step import Step
from pipectl.errors import CaptureError, PipectlError
from pipectl.faults import fault_of, is_ours
from pipectl.spec import JobSpec

_SHOWN = 6
"""So many entries of a collection a message names."""
_MAPPING = (
    'return {"inputs": ..., "targets": ...}: "inputs" goes to the model (the entries of a mapping '
    'as keyword arguments), "targets" to the loss; any other mapping goes to both, whole'
)


def judge(unexplained: UnexplainedError, step: Step, batch: Any, spec: JobSpec) -> PipectlError:
    """Whose fault an unexplained failure is: of the job, of what torch exports, or of pipectl."""
    refusal = misfit(step, batch, spec)
    if refusal is not None:
        return refusal
    cause = unexplained.__cause__ or unexplained
    return unexplained if place_of(cause) and not is_ours(cause) else fault_of(cause)


def misfit(step: Step, batch: Any, spec: JobSpec) -> CaptureError | None:
    """Why model and loss of a job fail on a batch of its data; None if they do not."""
    if any(is_deferred(tensor) for tensor in (*step.parameters(), *step.buffers())):
        return None  # too large to be run
    inputs, targets = batch
    with torch.enable_grad(), undisturbed(step, step.buffers()):
        error = _failure(step, inputs, targets)
    if isinstance(error, CaptureError):
        return error
    if error is not None:
        returned, outputs = _outputs(error.__traceback__)
        raised = f"raised {type(error).__name__}: {first_line(error)}{place_of(error)}"
        if returned:
            call = f"called with outputs {describe(outputs)} and targets {describe(targets)}"
            name, cure = f"loss.factory: {spec.loss.factory}", _cure_of_loss(inputs, targets)
        else:
            named = isinstance(inputs, Mapping)
            call = f"called with {'keyword arguments' if named else 'inputs'} {describe(inputs)}"
            name, cure = f"model.factory: {spec.model.factory}", _cure_of_model(inputs)
        return CaptureError(f"{name}: {raised}; {call}", cure=cure)
    return None


def _failure(step: Step, inputs: Any, targets: Any) -> Exception | None:
    try:
        step(inputs, targets)
    except Exception as error:
        return error
    return None


def _outputs(trace: TracebackType | None) -> tuple[bool, Any]:
    """Whether the model had returned when the step failed, and what."""
    while trace is not None:
        if trace.tb_frame.f_code is Step.forward.__code__:
            known = trace.tb_frame.f_locals
            return "outputs" in known, known.get("outputs")
        trace = trace.tb_next
    return False, None


def _cure_of_loss(inputs: Any, targets: Any) -> str:
    if isinstance(targets, Mapping) and isinstance(inputs, Mapping) and targets == inputs:
        return f"let the loss take what it needs from the mapping, or let the data set {_MAPPING}"
    return (
        "a loss is called as loss(outputs, targets): give it further arguments under loss.kwargs; "
        "what differs by sample (weights, say) belongs into the targets, as a tuple or mapping"
    )


def _cure_of_model(inputs: Any) -> str:
    if isinstance(inputs, Mapping):
        return f"let the model's forward() take these names, or let the data set {_MAPPING}"
    return "let data.factory give the inputs that the model's forward() takes"


def describe(value: Any) -> str:
    """A batch, or a part of one, in a few words."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        shown = [f"{key}: {describe(item)}" for key, item in islice(value.items(), _SHOWN)]
    elif isinstance(value, tuple | list):
        shown = [describe(item) for item in islice(value, _SHOWN)]
    else:
        return f"a {type(value).__name__}"
    words = ", ".join([*shown, "..."] if len(value) > _SHOWN else shown)
    return f"{{{words}}}" if isinstance(value, Mapping) else f"({words})"


def check_dataset(dataset: Any, key: str, factory: str) -> None:
    """Refuse what is no data set but is often taken for one.

    Args:
        key: of the section of the spec that names the factory.

    Raises:
        CaptureError: saying what was returned and what was expected.
    """
    tensors = dataset if isinstance(dataset, tuple | list) else [dataset]
    if isinstance(dataset, DataLoader):
        cure = (
            "return the data set itself: batches are made by training.batch_size and "
            "pipeline.micro_batches, shuffled by data.shuffle, loaded by data.workers processes; "
            "a collate_fn is an attribute of the data set"
        )
    elif tensors and all(isinstance(item, Tensor) for item in tensors):
        cure = "return torch.utils.data.TensorDataset(inputs, targets)"
    elif not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        cure = "return an object with __len__ and __getitem__, or with __iter__"
    else:
        return
    kind = type(dataset).__name__
    what = f"{kind} of tensors" if isinstance(dataset, tuple | list) else kind
    raise CaptureError(f"{key}.factory: {factory} returned a {what}, not a data set", cure=cure)
