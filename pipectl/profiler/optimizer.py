"""The cost of the optimizer: state, time and temporary values of a step, on sample parameters."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.capture.tensors import is_deferred
from pipectl.profile_parts import OptimizerCost, StepMemory
from pipectl.profiler.machine import clock_of, last_level_bytes, record_allocated
from pipectl.profiler.trial import as_refusal
from pipectl.runtime.device import Device
from pipectl.runtime.optimizer import (
    make_optimizer,
    make_updater,
    may_divide,
    refuse_half_parameters,
    tensors_in_state,
)
from pipectl.runtime.option_trials import refuse_options
from pipectl.runtime.trial_parameters import lent
from pipectl.runtime.update_trials import (
    refuse_coupled_updates,
    refuse_late_changes,
    refuse_outer_state,
)
from pipectl.torch_api import norms

_SAMPLE_BYTES = 64 << 20
_REPEATS = 5
_STEP_SHAPE = (1024, 512)


def optimizer_cost(job: CapturedJob, device: Device) -> OptimizerCost:
    """Measure state, time and temporary values of a step, per byte of parameters.

    Raises:
        CaptureError: the optimizer fails, or cannot be used by ranks with some of the parameters
            each.
    """
    place = device.torch_device
    refuse_outer_state(job, place)
    divides = may_divide(job.spec)
    refuse_options(job, place, divides=divides)
    if divides:
        refuse_coupled_updates(job, place)
    with as_refusal():
        refuse_late_changes(job, place)
    with lent(job, _sample(job, place)) as sample:
        return _cost(job, sample, device)


def _cost(job: CapturedJob, sample: Mapping[str, nn.Parameter], device: Device) -> OptimizerCost:
    clock, place = clock_of(device), device.torch_device
    size_bytes = sum(parameter.nbytes for parameter in sample.values()) or 1
    for parameter in sample.values():
        # Of zeros, Adam's step takes three times as long as of any other gradient.
        parameter.grad = torch.randn_like(parameter)
    gradients = [each.grad for each in sample.values() if each.grad is not None]
    optimizer = _first_step(job, sample)
    for parameter, gradient in zip(sample.values(), gradients, strict=True):
        parameter.grad = gradient
    caches = torch.empty(last_level_bytes(), dtype=torch.uint8)
    times = []
    for _ in range(_REPEATS):
        caches.fill_(0)  # between two updates, a step goes through the caches
        start = clock()
        # Before an update ranks see whether all gradients are finite, and clip them.
        for norm in norms(gradients):
            bool(norm.isfinite())
        if job.spec.training.clip_grad_norm is not None:
            for gradient in gradients:
                float(torch.linalg.vector_norm(gradient))
                gradient.mul_(1.0)
        optimizer.step()
        times.append(clock() - start)
    state_bytes = sum(tensor.nbytes for tensor in tensors_in_state(optimizer))
    step_s = statistics.median(times)
    return OptimizerCost(state_bytes / size_bytes, step_s / size_bytes, _step_memory(job, place))


def _first_step(job: CapturedJob, sample: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer and its schedule as ranks do, and step both: all refusals come here."""
    if job.spec.training.precision == "float16":
        refuse_half_parameters(sample)
    updater = make_updater(job, sample)
    assert updater.optimizer is not None
    with as_refusal():
        updater.step()
        updater.watch(1.0)
    return updater.optimizer


def _step_memory(job: CapturedJob, device: torch.device) -> StepMemory:
    """Measure temporary values of an optimizer step, after its state was created.

    Steps over one, two and three equal parameters show what each adds: if all are updated together,
    the third adds as much as the second; in a loop that still holds values of the parameter before,
    the second adds something and the third nothing.
    """
    trained = [name for name, tensor in job.states.items() if tensor.requires_grad]

    def peak_bytes(count: int) -> int:
        names = trained[:count]
        if not names:
            return 0
        values = {name: torch.zeros(_STEP_SHAPE, device=device) for name in names}
        with lent(job, values) as sample:
            optimizer = make_optimizer(job, sample)
            for parameter in sample.values():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            with record_allocated(device) as recording:
                optimizer.step()
        return recording.phases[-1].peak_bytes

    one, two, three = map(peak_bytes, (1, 2, 3))
    everything = max(0, three - two)
    parts = max(0, one - everything), max(0, two - one - everything), everything
    parameter_bytes = torch.zeros(_STEP_SHAPE, device="meta").nbytes
    return StepMemory(*(round(part / parameter_bytes, 3) for part in parts))


def _sample(job: CapturedJob, device: torch.device) -> dict[str, Tensor]:
    """Return copies of some parameters; random ones for those without memory."""
    sample: dict[str, Tensor] = {}
    total = 0
    for name, tensor in job.states.items():
        if tensor.requires_grad and total < _SAMPLE_BYTES:
            if is_deferred(tensor):
                copy = torch.randn(_sizes(tensor), dtype=tensor.dtype, device=device)
            else:
                copy = tensor.detach().clone()
            sample[name] = copy
            total += copy.nbytes
    return sample


def _sizes(tensor: Tensor) -> list[int]:
    """The sizes of a tensor, the largest ones halved until it is small enough.

    It keeps its dimensions: what an optimizer does with a matrix, and keeps for it, differs from
    what it does with a vector.
    """
    sizes = [*tensor.shape]
    while math.prod(sizes) * tensor.element_size() > _SAMPLE_BYTES:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[largest] = -(-sizes[largest] // 2)
    return sizes
