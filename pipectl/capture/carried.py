"""Buffers that carry values from one micro-batch to the next ones: forwards write and read them.

A loss that depends on such a buffer depends on the order of micro-batches, and on who computes
them: replicas write copies of their own until the end of a step. The running statistics of a norm
are written in training, but not read: nothing depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipectl.capture.opaque import Opaque
from pipectl.capture.operators import written_tensors
from pipectl.capture.tensors import storage_of, storages_in, tensors_in

_OVERWRITE = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_")
"""Operators that write their first argument and read nothing of it."""


class Dependence:
    """What each storage depends on in a run of a graph: buffers as they were before the run.

    Attributes:
        changed: the buffers that the run changes.
    """

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self._of: dict[int, frozenset[str]] = {}
        self._names: dict[int, str] = {}
        self._unchanged: dict[int, int] = {}
        """Storages of results that are a buffer as it was, each with the buffer's."""

    def enter(self, name: str, buffer: Tensor) -> None:
        """Begin with a buffer as it is before the run."""
        self._of[storage_of(buffer)] = frozenset({name})
        self._names[storage_of(buffer)] = name

    def of(self, value: Any) -> frozenset[str]:
        """Return the buffers that the tensors of a value depend on."""
        none = frozenset[str]()
        return none.union(*(self._of.get(storage, none) for storage in storages_in(value)))

    def note(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        written: Iterable[Tensor],
    ) -> None:
        """Follow a call of an operator.

        Args:
            written: the arguments that it has written in place.
        """
        tensors = tensors_in((args, kwargs))
        own = written_tensors(target, args, kwargs)
        statistics = written_tensors(target, args, kwargs, statistics=True)[len(own) :]
        overwritten = set(map(id, own)) if _overwrites(target) else set()
        kept = target.kept_buffers(args, result) if isinstance(target, Opaque) else []
        unread = {id(tensor) for tensor in (*statistics, *(buffer for buffer, _ in kept))}
        read = self.of([t for t in tensors if id(t) not in unread | overwritten])
        before = set(storages_in(tensors))
        self._of.update(dict.fromkeys(set(storages_in(result)) - before, read))
        is_copy = target is torch.ops.aten.clone.default and _is_whole(args[0])
        copied = [(args[0], result)] if is_copy else []
        for buffer, new in (*kept, *copied):
            if new is not None:
                source = storage_of(buffer)
                self._unchanged[storage_of(new)] = self._unchanged.get(source, source)
        for tensor in (*written, *statistics):
            storage = storage_of(tensor)
            self._unchanged.pop(storage, None)
            sources = {self._unchanged.get(storage_of(t)) for t in tensors if t is not tensor}
            if sources == {storage} and all(map(_is_whole, tensors)):
                continue
            whole = tensor.nbytes == tensor.untyped_storage().nbytes()
            earlier = self._of.get(storage, frozenset())
            self._of[storage] = read if whole and id(tensor) in overwritten else read | earlier
            if storage in self._names:
                self.changed.add(self._names[storage])


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory, in the order of that."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _overwrites(target: Any) -> bool:
    """Return whether an operator writes arguments without reading them."""
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    return name in _OVERWRITE or overload.endswith("out")
