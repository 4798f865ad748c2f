"""Which gradients and buffers have elements that are infinite or NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pipectl import torch_api


def alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors grouped by device and type, as multi-tensor kernels need them."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(lists.values())


def norms_of(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of every tensor by its name; tensors are read once."""
    norms: dict[int, float] = {}
    for same in alike(tensors.values()):
        values = torch.stack(list(torch_api.norms(same))).double().tolist()
        norms.update(zip(map(id, same), values, strict=True))
    return {name: norms[id(tensor)] for name, tensor in tensors.items()}


def not_finite(tensors: Mapping[str, Tensor], norms: Mapping[str, float]) -> list[str]:
    """The tensors with an element that is not finite.

    A norm is finite only if all elements are; it may overflow even if they are finite.
    """
    suspects = [name for name in tensors if not math.isfinite(norms.get(name, 0.0))]
    return [name for name in suspects if not tensors[name].isfinite().all()]


class BufferCheck:
    """Finds buffers that become infinite or NaN.

    A buffer may begin so (a smallest value so far, for example); it counts once it was finite.

    Args:
        buffers: that forwards write, by full name.
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        kinds = (torch.is_floating_point, torch.is_complex)
        self._buffers = {n: b for n, b in buffers.items() if any(kind(b) for kind in kinds)}
        self._from_the_start = set(self._not_finite())

    def faults(self) -> list[str]:
        """The buffers that are not finite now and were before, in order."""
        found = self._not_finite()
        self._from_the_start.intersection_update(found)
        return [name for name in found if name not in self._from_the_start]

    def _not_finite(self) -> list[str]:
        buffers = {name: buffer.detach() for name, buffer in self._buffers.items()}
        return not_finite(buffers, norms_of(buffers))
