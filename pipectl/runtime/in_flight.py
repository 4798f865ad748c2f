"""What a stage keeps of a micro-batch between its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipectl.capture import Slot
from pipectl.capture.slices import Samples
from pipectl.runtime.halves import Deferred
from pipectl.runtime.offload import Pool, unpack
from pipectl.runtime.versions import Version


@dataclass(frozen=True)
class Start:
    """What a forward starts from, and starts from again where it is computed twice.

    Args:
        size: samples.
        buffers: values before the forward of those it writes, by index of the state argument.
        version: of the weights; None where there is only one.
    """

    size: Samples
    seed: int
    inputs: Mapping[str, Any]
    arrived: Mapping[Slot, Any]
    buffers: Mapping[int, Tensor]
    version: Version | None = None

    def packed(self, pool: Pool) -> Start:
        """With its tensors in a pool."""
        return self._each(pool.pack)

    def unpacked(self) -> Start:
        """With tensors in place of those that are in a pool."""
        return self._each(unpack)

    def _each(self, change: Callable[[Any], Any]) -> Start:
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        arrived = {s: None if t is None else change(t) for s, t in self.arrived.items()}
        return replace(self, inputs=inputs, arrived=arrived)


@dataclass
class Live:
    """A micro-batch between its forward and its backward.

    It holds where the backward enters the graph, not the values there: only what the graph itself
    has saved stays in memory. The loss is small, and its seed is like it.
    """

    roots: dict[Slot, GradientEdge]
    losses: dict[Slot, Tensor]
    caught: dict[Slot, Tensor | None]
    deferred: Deferred
    version: Version | None

    def seeded(
        self, gradients: Mapping[Slot, Tensor | None], loss: Slot, scale: float, weight: float
    ) -> tuple[list[Any], list[Tensor]]:
        """Where the backward enters the graph, and with which gradients.

        Args:
            gradients: of the stage's results and of received values that later stages use too.
            loss: slot of the loss, which comes first.
            scale: of the loss, in float16.
            weight: the share of the micro-batch in the loss of its step.
        """
        arrived = [(self.roots.get(slot), gradient) for slot, gradient in gradients.items()]
        found = [(root, seed) for root, seed in arrived if root is not None and seed is not None]
        roots: list[Any] = [root for root, _ in found]
        seeds = [seed for _, seed in found]
        if loss in self.losses:
            roots.insert(0, self.losses[loss])
            seeds.insert(0, torch.full_like(self.losses[loss], scale) * weight)
        return roots, seeds
