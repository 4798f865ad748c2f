"""Whether later epochs of a script train on the data of the first one, as those of a job do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from pipectl.errors import CaptureError
from pipectl.objects import seed_everything
from pipectl.script.hooks import Loading
from pipectl.script.order import SharedGenerators, batch_size_of
from pipectl.script.parts import Parts
from pipectl.script.program import leaves_of
from pipectl.script.recorder import at
from pipectl.script.rounds import batches_of
from pipectl.torch_api import read_sample

_FEW = 4
"""Samples that are read again."""
_HINT = (
    "train on the same data in every epoch, and give other epochs a script of their own that "
    "begins with the weights of this job; what follows from the number of the epoch alone may be "
    "changed by set_epoch(epoch) of the dataset"
)


class FirstEpoch:
    """The data of the first epoch.

    Args:
        parts: of the script, at its first step.
    """

    def __init__(self, parts: Parts) -> None:
        self._sizes = _sizes_of(parts.loader)
        self._root: Any = None
        self._numbers = ""
        self._varies = True
        self._samples: Any = None
        if isinstance(parts.loader.dataset, IterableDataset):
            return
        with suppress(Exception), torch._C.DisableTorchFunction():  # of the script's code
            order = parts.dataset().order
            self._root, self._numbers, few = _origins(parts, order(0))
            self._varies = self._numbers != _origins(parts, order(1))[1]
            self._samples = _read(parts, self._root, few)
            if not _are_equal(self._samples, _read(parts, self._root, few)):
                self._samples = None

    def refuse_other(self, parts: Parts, loadings: Sequence[Loading]) -> None:
        """Refuse later iterations over other data.

        Args:
            parts: of the script, after its last step.
        """
        for loading in (each for each in loadings if each is not parts.loading):
            if words := self._other(replace(parts, loading=loading)):
                raise CaptureError(
                    f"{at(loading.place)}: another epoch {words}, and a job has the data of the "
                    "first one",
                    hint=_HINT,
                )

    def _other(self, parts: Parts) -> str:
        """What an epoch has otherwise than the first one, in words; empty if nothing is seen."""
        for what, size in _sizes_of(parts.loader).items():
            if size != self._sizes[what]:
                return f"has {size} {what}, and the first one {self._sizes[what]}"
        if self._root is None:
            return ""
        try:
            root, numbers, few = _origins(parts, parts.dataset().order(0))
        except Exception:  # of the script's code
            return ""
        is_same = root is self._root
        if is_same and numbers != self._numbers:
            return "" if self._varies else "has other samples of the same dataset"
        if self._samples is None or _are_equal(self._samples, _read(parts, root, few)):
            return ""
        return "has a dataset that has changed" if is_same else "has another dataset"


def _sizes_of(loader: DataLoader[Any]) -> dict[str, int | None]:
    """How many there are of what; None for what is not known."""
    data: Any = loader.dataset
    is_sized = isinstance(data, Sized) and not isinstance(data, IterableDataset)
    return {
        "samples": len(data) if is_sized else None,
        "samples in a batch": batch_size_of(loader),
        "batches": batches_of(loader),
    }


def _origins(parts: Parts, order: Sequence[int]) -> tuple[Any, str, list[int]]:
    """Return the dataset that those of a script are parts of, a digest that tells which of its
    samples an epoch has, and a few of these, in ascending order.
    """
    data: Any = parts.loader.dataset
    numbers = np.asarray(order, np.int64)
    while isinstance(data, Subset):
        numbers = np.asarray(data.indices, np.int64)[numbers]
        data = data.dataset
    numbers = np.sort(numbers)
    few = [int(numbers[i * (len(numbers) - 1) // (_FEW - 1)]) for i in range(_FEW)]
    return data, hashlib.sha256(numbers.data).hexdigest(), few


def _read(parts: Parts, data: Any, few: Sequence[int]) -> Any:
    """Read a few samples as what model and loss take; None if they cannot be read."""
    own = parts.dataset()
    with suppress(Exception), _alike():  # of the script's code
        for each in parts.told_epochs:
            each.tell(0)
        return own.collate_fn([read_sample(data, i) for i in few])
    return None


@contextmanager
def _alike() -> Iterator[None]:
    """Draw the same random numbers at all times."""
    before = SharedGenerators()
    seed_everything(0)
    try:
        yield
    finally:
        before.restore()


def _are_equal(mine: Any, other: Any) -> bool:
    """Whether samples are equal; true of those that could not be read."""
    if mine is None or other is None:
        return True
    pairs = [dict(leaves_of(each)) for each in (mine, other)]
    return pairs[0].keys() == pairs[1].keys() and all(
        torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(pairs[1][path]))
        for path, tensor in pairs[0].items()
    )
