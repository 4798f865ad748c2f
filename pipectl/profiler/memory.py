"""What one operator, and the optimizer, allocate while they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedJob
from pipectl.profile import OperatorMemory, StepMemory
from pipectl.profiler.allocated import peak_bytes_of, record_allocated
from pipectl.profiler.costs import Call
from pipectl.runtime.stepper import make_optimizer

_SAMPLE = (1024, 512)
_SAMPLE_BYTES = 1024 * 512 * 4


@dataclass(frozen=True)
class Allocations:
    """Live bytes of one call; see :class:`pipectl.profile.OperatorMemory`.

    Args:
        gradients: (index of a tensor argument that wants a gradient, bytes).
    """

    made_bytes: int
    forward_bytes: int
    backward_bytes: int
    gradients: tuple[tuple[int, int], ...]

    def named(
        self, storage: str, wanting: Sequence[str], buffers: tuple[tuple[str, int], ...]
    ) -> OperatorMemory:
        """The same as the profile tells it.

        Args:
            storage: name of the memory in which the operator's value lies.
            wanting: values and parameters behind the arguments that want a gradient.
        """
        found: dict[str, int] = {}
        for index, size in self.gradients:
            found[wanting[index]] = found.get(wanting[index], 0) + size
        return OperatorMemory(
            made_bytes=self.made_bytes,
            storage=storage,
            forward_bytes=self.forward_bytes,
            backward_bytes=self.backward_bytes,
            gradients=tuple(found.items()),
            buffers=buffers,
        )


def measure_allocations(call: Call, device: torch.device) -> Allocations:
    """Run the operator forward and backward once and follow what it allocates.

    What its backward releases of its own (saved values of the operators it consists of) makes
    room for what it allocates later, as in a stage. Arguments and gradients given are not counted.
    """
    args, kwargs, wanted = call.prepared()
    gradients: Sequence[Tensor | None] = ()
    with record_allocated(device) as recording:
        result = call.target(*args, **kwargs)
        recording.mark()
        roots = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
        seeds = [torch.ones_like(root) for root in roots]
        recording.mark()
        if wanted and roots:
            gradients = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    forward, seeded, backward = recording.phases
    given = pytree.tree_leaves((args, kwargs))
    return Allocations(
        made_bytes=sum(_new_storages(pytree.tree_leaves(result), given).values()),
        forward_bytes=forward.peak_bytes,
        backward_bytes=backward.peak_bytes - seeded.end_bytes,
        gradients=_sizes(gradients, seeds),
    )


def measure_step(job: CapturedJob, device: torch.device) -> StepMemory:
    """Temporary values of an optimizer step, once its state is there.

    Steps over one, two and three equal parameters tell what each adds: where all are updated
    together, the third adds as much as the second; in a loop that still holds values of the
    parameter before, the second adds something and the third nothing.
    """
    trained = [name for name, tensor in job.states.items() if tensor.requires_grad]
    one, two, three = (_step_bytes(job, trained[:count], device) for count in (1, 2, 3))
    everything = max(0, three - two)
    previous = max(0, two - one - everything)
    parts = max(0, one - everything), previous, everything
    return StepMemory(*(round(part / _SAMPLE_BYTES, 3) for part in parts))


def _step_bytes(job: CapturedJob, names: Sequence[str], device: torch.device) -> int:
    if not names:
        return 0
    sample = {name: nn.Parameter(torch.zeros(_SAMPLE, device=device)) for name in names}
    optimizer = make_optimizer(job, sample)
    for parameter in sample.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return peak_bytes_of(optimizer.step, device)


def _sizes(
    gradients: Sequence[Tensor | None], seeds: Sequence[Tensor]
) -> tuple[tuple[int, int], ...]:
    """The memory that each gradient brings, by index."""
    found = []
    known = list(seeds)
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            found.append((index, sum(_new_storages([gradient], known).values())))
            known.append(gradient)
    return tuple(found)


def _new_storages(leaves: Sequence[Any], known: Sequence[Any]) -> dict[int, int]:
    """Bytes of the storages among ``leaves`` that no tensor in ``known`` lies in."""
    old = {t.untyped_storage()._cdata for t in known if isinstance(t, Tensor)}
    storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in old}
