"""What measuring has to know of the machine: its accelerator, and the processor's cache."""

from __future__ import annotations

from pathlib import Path

import torch

from pipectl.runtime.device import choose_device

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_ASSUMED_BYTES = 32 << 20


def accelerator_name(accelerators_per_node: int) -> str | None:
    """Name of the accelerator that is measured, such as ``NVIDIA H200``; None for the CPU.

    Args:
        accelerators_per_node: as the job spec asks.
    """
    device = choose_device(accelerators_per_node, 0).torch_device
    if device.type == "cpu":
        return None
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))


def last_level_bytes(caches: Path = _CACHES) -> int:
    """Size of the largest cache of this machine; 32 MiB if it does not say."""
    sizes = [0]
    for index in caches.glob("index*"):
        try:
            text = (index / "size").read_text(encoding="ascii").strip()
        except OSError:
            continue
        number, factor = (text[:-1], 1024) if text.endswith("K") else (text, 1)
        if number.isdigit():
            sizes.append(int(number) * factor)
    return max(sizes) or _ASSUMED_BYTES
