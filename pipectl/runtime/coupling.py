"""Whether an optimizer updates each parameter by itself, as it must where ranks hold some each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.errors import CaptureError
from pipectl.plan import Plan
from pipectl.runtime.stepper import make_optimizer
from pipectl.spec import JobSpec

_MAX_SIZE = 3
"""Of each dimension of a sample."""
_MAX_ALIKE = 2
"""Samples with the same number of dimensions in the same group."""
_STEPS = 3
_TOLERANCE = 0.05
"""Relative; optimizers that take equal shapes together round otherwise."""


def may_divide(spec: JobSpec) -> bool:
    """Whether some plan of a job gives ranks different parameters to update."""
    alone = spec.pipeline.stages == 1 and not spec.pipeline.shard_optimizer
    return spec.resources.ranks > 1 and not alone


def divides(plan: Plan) -> bool:
    """Whether ranks of a plan update different parameters."""
    held = [len(plan.stages_of_rank(rank)) for rank in range(plan.ranks)]
    return plan.shard_optimizer or min(held) < len(plan.stages)


def refuse_coupled_updates(job: CapturedJob, device: torch.device) -> None:
    """Raise if the update of a parameter depends on which others the optimizer has.

    A few small parameters are updated together and each alone, by random gradients. An optimizer
    that does not take them proves nothing.

    Raises:
        CaptureError: some update differs.
    """
    names = _sample(job)
    together = _updates(job, names, device)
    for name in names:
        alone = _updates(job, {name: names[name]}, device)
        if name in together and name in alone:
            largest = float(alone[name].abs().max())
            if float((together[name] - alone[name]).abs().max()) > _TOLERANCE * largest:
                raise CaptureError(
                    f"optimizer: {job.spec.optimizer.factory} updates a parameter in another way "
                    "if it has others beside it (by a norm over all of them, or random numbers "
                    "drawn in turn), and each rank has only those of its stages",
                    cure="take norms of each parameter by itself, let training.clip_grad_norm clip "
                    "over all ranks, or set pipeline.stages: 1 without shard_optimizer",
                )


def _sample(job: CapturedJob) -> dict[str, tuple[int, ...]]:
    groups = job.parameter_groups()
    kinds: dict[tuple[int, int], int] = {}
    sample: dict[str, tuple[int, ...]] = {}
    for name, tensor in job.states.items():
        if not tensor.requires_grad or tensor.is_complex() or tensor.numel() == 0:
            continue
        kind = groups.get(name, -1), tensor.dim()
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= _MAX_ALIKE:
            sample[name] = tuple(min(size, _MAX_SIZE) for size in tensor.shape)
    return sample


def _updates(
    job: CapturedJob, shapes: Mapping[str, tuple[int, ...]], device: torch.device
) -> dict[str, Tensor]:
    """By how much some steps change each parameter; nothing if the optimizer fails."""
    generators = {
        name: torch.Generator().manual_seed(len(name) + sum(name.encode())) for name in shapes
    }

    def draw(name: str) -> Tensor:
        values = torch.randn(shapes[name], generator=generators[name], dtype=torch.float64)
        return values.to(device)

    parameters = {name: nn.Parameter(draw(name)) for name in shapes}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            optimizer = make_optimizer(job, parameters)
            for _ in range(_STEPS):
                for name, parameter in parameters.items():
                    scale = 10 ** torch.randn((), generator=generators[name]).item()
                    parameter.grad = scale * draw(name)
                optimizer.step()
        except Exception:  # it may ask for other shapes; its own parameters show it
            return {}
    return {name: parameter.detach() - before[name] for name, parameter in parameters.items()}
