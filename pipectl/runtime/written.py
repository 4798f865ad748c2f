"""Buffers that forwards write, such as the running statistics of BatchNorm.

Usually a forward starts from what the one before it has written. In a reproducible training, every
micro-batch starts from the values before the step instead, as if each had a replica of its own, and
the results become one value at the end of the step:

- floating-point and complex numbers become the mean over the micro-batches, summed in the order of
  :mod:`pipectl.schedule.sum_tree`;
- an integer that no micro-batch has lowered is a count, which grows by what all have added to it;
  any other gets the value of the last micro-batch;
- a boolean changes if any micro-batch has changed it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from pipectl.schedule.sum_tree import Node, insert, total
from pipectl.torch_api import pytree


def copy_written(arguments: Sequence[Tensor], written: Collection[int]) -> list[Tensor]:
    """State arguments of a call, buffers that it writes copied; see :func:`keep_written`.

    Autograd may keep a buffer for a backward that comes after the next forward has written it, and
    a recomputed forward starts from the buffer's earlier value.

    Args:
        written: indices of those buffers.
    """
    states = list(arguments)
    for index in written:
        states[index] = states[index].clone()
    return states


def keep_written(
    arguments: Sequence[Tensor], written: Collection[int], states: Sequence[Tensor]
) -> None:
    """Copy the values that a call wrote to the copies among its states into the buffers."""
    for index in written:
        arguments[index].data = states[index].detach()


class _Mean:
    """Of numbers that are not integers. Complex ones count as two."""

    def __init__(self) -> None:
        self.sums: dict[Node, Tensor] = {}
        self.count = 0
        self.low = self.high = torch.empty(0)

    def add(self, micro_batch: int, after: Tensor, _: Tensor) -> None:
        real = torch.view_as_real(after) if after.is_complex() else after
        insert(self.sums, micro_batch, real.to(torch.float64, copy=True), Tensor.add_)
        self.low = torch.minimum(self.low, real) if self.count else real
        self.high = torch.maximum(self.high, real) if self.count else real
        self.count += 1

    def value(self, others: Sequence[_Mean], before: Tensor) -> Tensor:
        every = [self, *others]
        sums = {node: part for each in every for node, part in each.sums.items()}
        mean = total(sums, torch.add) / sum(each.count for each in every)
        low, high = self.low, self.high
        for other in others:
            low, high = torch.minimum(low, other.low), torch.maximum(high, other.high)
        # A mean of equal numbers may differ from them by rounding.
        mean = torch.where(low == high, low, mean.to(low.dtype))
        return torch.view_as_complex(mean) if before.is_complex() else mean


class _Count:
    """Of integers."""

    def __init__(self) -> None:
        self.growth = torch.zeros((), dtype=torch.int64)
        self.falls = False
        self.last: tuple[int, Tensor] = -1, torch.empty(0)

    def add(self, micro_batch: int, after: Tensor, before: Tensor) -> None:
        growth = after.to(torch.int64) - before
        self.growth = self.growth.to(growth.device) + growth
        self.falls = self.falls or bool((growth < 0).any())
        self.last = max(self.last, (micro_batch, after), key=lambda each: each[0])

    def value(self, others: Sequence[_Count], before: Tensor) -> Tensor:
        every = [self, *others]
        if any(each.falls for each in every):
            return max((each.last for each in every), key=lambda each: each[0])[1]
        growth = torch.stack([each.growth for each in every]).sum(0)
        return (before.to(growth.device) + growth).to(before.dtype)


class _Flag:
    """Of booleans."""

    def __init__(self) -> None:
        self.changed = torch.zeros((), dtype=torch.bool)

    def add(self, _: int, after: Tensor, before: Tensor) -> None:
        self.changed = self.changed.to(after.device) | (after ^ before)

    def value(self, others: Sequence[_Flag], before: Tensor) -> Tensor:
        changed = torch.stack([self.changed, *(each.changed for each in others)]).any(0)
        return before.to(changed.device) ^ changed


Part = _Mean | _Count | _Flag
Parts = dict[str, Part]


class StepWrites:
    """What the micro-batches of a step write to the buffers of one stage.

    Args:
        buffers: that forwards write, by full name.
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._buffers = dict(buffers)
        self._parts: Parts = {}

    def begin(self) -> list[Tensor]:
        """Return the values before a forward."""
        return [buffer.detach().clone() for buffer in self._buffers.values()]

    def end(self, micro_batch: int, before: Sequence[Tensor]) -> None:
        """Note what a forward has written, and give the buffers back their values before it.

        They get other memory, because autograd may have kept what the forward has written.
        """
        for (name, buffer), value in zip(self._buffers.items(), before, strict=True):
            if name not in self._parts:
                self._parts[name] = _part_of(buffer)
            self._parts[name].add(micro_batch, buffer.detach(), value)
            buffer.data = value

    def settle(self, gather: Callable[[Parts], Sequence[Parts]] | None = None) -> None:
        """Set the buffers to their values after the step.

        Args:
            gather: returns the parts of all replicas; collective among them.
        """
        found: Sequence[Parts] = [self._parts]
        if gather is not None:
            found = gather({name: _on_host(part) for name, part in self._parts.items()})
        for name, buffer in self._buffers.items():
            parts: list[Part] = [each[name] for each in found if name in each]
            if parts:
                first, *others = parts
                buffer.data.copy_(first.value(others, buffer.detach()))  # type: ignore[arg-type]
        self._parts = {}

    def forget(self) -> None:
        """Drop what was noted."""
        self._parts = {}


def _on_host(part: Part) -> Part:
    vars(part).update(pytree.tree_map_only(Tensor, Tensor.cpu, vars(part)))
    return part


def _part_of(buffer: Tensor) -> Part:
    if buffer.dtype == torch.bool:
        return _Flag()
    return _Mean() if buffer.is_floating_point() or buffer.is_complex() else _Count()
