"""What the optimizer costs: state, time and temporary values of a step, on sample parameters."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedJob
from pipectl.capture.factories import call
from pipectl.capture.step import is_deferred
from pipectl.profile import OptimizerCost
from pipectl.profiler.cache import last_level_bytes
from pipectl.profiler.marks import clock_of
from pipectl.profiler.memory import measure_step
from pipectl.runtime.coupling import may_divide, refuse_coupled_updates
from pipectl.runtime.device import Device
from pipectl.runtime.stepper import make_optimizer

_SAMPLE_BYTES = 64 << 20
_REPEATS = 5


def optimizer_cost(job: CapturedJob, device: Device) -> OptimizerCost:
    """State, time and temporary values of a step, per byte of parameters.

    Raises:
        CaptureError: the optimizer fails, or ranks that hold some parameters each cannot use it.
    """
    clock, place = clock_of(device), device.torch_device
    if may_divide(job.spec):
        refuse_coupled_updates(job, place)
    sample = _sample(job, place)
    size_bytes = sum(parameter.nbytes for parameter in sample.values()) or 1
    for parameter in sample.values():
        # Of zeros, Adam's step takes three times as long as of any other gradient.
        parameter.grad = torch.randn_like(parameter)
    optimizer = make_optimizer(job, sample)
    call(optimizer.step, "optimizer")
    clips = job.spec.training.clip_grad_norm is not None
    caches = torch.empty(last_level_bytes(), dtype=torch.uint8)
    times = []
    for _ in range(_REPEATS):
        caches.fill_(0)  # between two updates, a step goes through the caches
        start = clock()
        _look_at_gradients(sample, clips=clips)
        optimizer.step()
        times.append(clock() - start)
    leaves = pytree.tree_leaves([dict(state) for state in optimizer.state.values()])
    state_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    step_s = statistics.median(times)
    return OptimizerCost(state_bytes / size_bytes, step_s / size_bytes, measure_step(job, place))


def _look_at_gradients(parameters: Mapping[str, nn.Parameter], *, clips: bool) -> None:
    """What ranks do with gradients before an update: see whether all are finite, and clip them."""
    gradients = [each.grad for each in parameters.values() if each.grad is not None]
    for norm in torch._foreach_norm(gradients):
        bool(norm.isfinite())
    for gradient in gradients if clips else ():
        float(torch.linalg.vector_norm(gradient))
        gradient.mul_(1.0)


def _sample(job: CapturedJob, device: torch.device) -> dict[str, nn.Parameter]:
    sample: dict[str, nn.Parameter] = {}
    total = 0
    for name, tensor in job.states.items():
        if tensor.requires_grad and total < _SAMPLE_BYTES:
            sample[name] = nn.Parameter(_copy(tensor, device))
            total += sample[name].nbytes
    return sample


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a parameter; a random vector, perhaps shorter, if it has no memory."""
    if not is_deferred(tensor):
        return tensor.detach().clone()
    count = min(tensor.numel(), _SAMPLE_BYTES // tensor.element_size())
    return torch.randn(count, dtype=tensor.dtype, device=device)
