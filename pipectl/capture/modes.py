"""Switches between training and evaluation, in which code of the user may run.

A graph holds a forward. What ``train()`` or ``eval()`` does to tensors happens on no rank, so that
an evaluation would compute with what follows from the first weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipectl.capture.model_with_loss import own_name
from pipectl.capture.operators import written_tensors
from pipectl.capture.python_state import entries_of, items_of, name_of_state
from pipectl.capture.refusals import Refusal, place_of
from pipectl.capture.tensors import storage_of, tensors_in
from pipectl.objects import CONTAINERS, restore_of
from pipectl.torch_api import TorchDispatchMode


def set_mode(wrapper: nn.Module, *, training: bool) -> None:
    """Call ``train()`` or ``eval()`` of a model and its loss, as a plain loop does.

    Raises:
        RefusedError: this writes a tensor that a module has, or gives a module a tensor. All
            tensors are as before.
    """
    items = [*items_of(wrapper)]
    tensors = {
        **dict(wrapper.named_parameters()),
        **dict(wrapper.named_buffers()),
        **{each.name.lstrip("."): each.value for each in items if isinstance(each.value, Tensor)},
    }
    watch = _Writes({storage_of(t): n for n, t in tensors.items() if t.layout is torch.strided})
    before = entries_of(items)
    restores = [restore_of(each.value) for each in items if type(each.value) in CONTAINERS]
    try:
        with watch:
            wrapper.training = training
            for module in wrapper.children():
                module.train(True) if training else module.eval()
    except _WrittenError as error:
        for restore in restores:
            restore()
        raise Refusal.MODE.error(place_of(error), name=own_name(str(error))) from None
    for name, entry in entries_of(items_of(wrapper)).items():
        if tensors_in(entry.value) and not entry.is_as(before.get(name)):
            for restore in restores:
                restore()
            raise Refusal.MODE.error("", name=own_name(name_of_state(name)))


class _WrittenError(Exception):
    """A tensor of this name would be written."""


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises in the place of an operator that writes one of some memories, given with names."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            if tensor.layout is torch.strided and storage_of(tensor) in self._names:
                raise _WrittenError(self._names[storage_of(tensor)])
        return func(*args, **kwargs)
