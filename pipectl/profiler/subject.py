"""What is measured: a graph, on one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pipectl.capture import CapturedGraph, CapturedJob
from pipectl.capture.batch import by_name
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
        target = device.torch_device
        named = by_name(graph, job.loader.example(size))
        batch = {name: leaf.to(target) for name, leaf in named.items() if isinstance(leaf, Tensor)}
        return cls(graph, batch, size, device, job.spec.training.precision)
