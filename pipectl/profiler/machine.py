"""The accelerator that operators are measured on."""

from __future__ import annotations

import torch

from pipectl.runtime.device import choose_device


def accelerator_name(accelerators_per_node: int) -> str | None:
    """Its name, such as ``NVIDIA H200``; None where the CPU is measured.

    Args:
        accelerators_per_node: as the job spec asks.
    """
    device = choose_device(accelerators_per_node, 0).torch_device
    if device.type == "cpu":
        return None
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))
