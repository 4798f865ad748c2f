"""Standing in for a submodule while the model around it runs or is exported."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_ABSENT = object()


class Mask:
    """Lets calls of a module, its hooks included, go to a function with the same arguments."""

    def __init__(self, module: nn.Module, stand_in: Callable[..., Any]) -> None:
        self._module = module
        self._entries: dict[str, Any] = {name: OrderedDict() for name in _HOOKS}
        self._entries["forward"] = stand_in
        self._before: dict[str, Any] = {}

    @contextmanager
    def worn(self) -> Iterator[None]:
        """While the mask is on the module."""
        self._before = self._swap(self._entries)
        try:
            yield
        finally:
            self._swap(self._before)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Within :meth:`worn`: the module is itself for a while."""
        mask = self._swap(self._before)
        try:
            yield
        finally:
            self._swap(mask)

    def _swap(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        own = vars(self._module)
        before = {name: own.get(name, _ABSENT) for name in entries}
        for name, value in entries.items():
            if value is _ABSENT:
                del own[name]
            else:
                own[name] = value
        return before
