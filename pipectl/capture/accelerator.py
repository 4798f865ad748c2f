"""The accelerator that this process uses, of whichever kind torch knows."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def in_use() -> str | None:
    """Its type (``cuda``, ``xpu``, ...); None while nothing has run on one."""
    kind, module = _known()
    used = module is not None and getattr(module, "is_initialized", lambda: True)()
    return kind if used else None


def seed_generator(seed: int) -> None:
    """Seed what its random operators draw from, if it is in use."""
    if in_use() is None:
        return
    _, module = _known()
    generators = getattr(module, "default_generators", None)
    if generators:  # of the current one alone, and much faster
        generators[module.current_device()].manual_seed(seed)
    else:
        module.manual_seed(seed)


@cache
def _known() -> tuple[str, Any]:
    """The type of the machine's accelerators and torch's module for them; None without one."""
    found = torch.accelerator.current_accelerator()
    return ("cpu", None) if found is None else (found.type, torch.get_device_module(found))
