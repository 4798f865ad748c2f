"""What is measured: a graph, on one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedGraph, CapturedJob
from pipectl.runtime.device import Device


@dataclass(frozen=True)
class Subject:
    """A graph and the micro-batch it is measured on.

    Args:
        batch: the tensors of the micro-batch by name, on the device.
        size: samples in it.
        precision: as in the spec.
    """

    graph: CapturedGraph
    batch: Mapping[str, Tensor]
    size: int
    device: Device
    precision: str

    @classmethod
    def of(cls, job: CapturedJob, size: int, device: Device) -> Subject:
        """The training graph of a job and the first samples of its data."""
        graph = job.training_graph(size)
        leaves = pytree.tree_leaves(job.loader.example(size))
        target = device.torch_device
        moved = [leaf.to(target) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        batch = dict(zip(graph.inputs, moved, strict=True))
        return cls(graph, batch, size, device, job.spec.training.precision)
