"""Forwards that ``torch.utils.checkpoint`` runs again in a backward leave buffers as they are.

Plain PyTorch counts a micro-batch twice there: the running statistics of a BatchNorm within a
checkpointed part move twice, the second time in the order of the backwards, which is the
schedule's. A graph has such a part once, and so do modules that run as they are.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

_prepared: WeakSet[nn.Module] = WeakSet()


def write_buffers_once(model: nn.Module) -> None:
    """Let each module of a model write its buffers in forwards alone, not in backwards."""
    for module in model.modules():
        if any(buffer is not None for buffer in module._buffers.values()):
            if module not in _prepared:
                _Once(module)
            _prepared.add(module)


class _Once:
    """Gives one module copies of its buffers for a call within a backward."""

    def __init__(self, module: nn.Module) -> None:
        self._own: dict[str, Tensor] = {}
        module.register_forward_pre_hook(self._begin)
        # Also where torch ends such a call early, by an exception.
        module.register_forward_hook(self._end, always_call=True)

    def _begin(self, module: nn.Module, _: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # what torch's own checkpoint asks, too
            buffers = module._buffers.items()
            self._own = {name: each for name, each in buffers if each is not None}
            module._buffers.update({n: each.detach().clone() for n, each in self._own.items()})

    def _end(self, module: nn.Module, *_: Any) -> None:
        module._buffers.update(self._own)
        self._own = {}
