"""Copying what a checkpoint holds, as far as there is memory for it.

What changes at updates alone need not be copied: it is written from where it is, while the next
step computes its gradients, and only that step's update has to wait until this is done.

What one rank puts into a checkpoint: copied at once, written while training goes on.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipectl.capture.step import in_model, own_name
from pipectl.files import make_private_directory
from pipectl.runs import LossScaleState, Shard
from pipectl.runtime.checkpoint.tensor_file import TensorFile
from pipectl.runtime.stepper import Stepper

_ALIGNMENT = 64


class Held(NamedTuple):
    """Tensors that a checkpoint takes in.

    Args:
        tensors: copies in the memory of the host, but for those that are lent.
        lent: names of the tensors that are the training's own.
    """

    tensors: Mapping[str, Tensor]
    lent: frozenset[str]

    @property
    def copies(self) -> dict[str, Tensor]:
        """Those that are not lent."""
        return {name: t for name, t in self.tensors.items() if name not in self.lent}


def hold(tensors: Mapping[str, Tensor], steady: Container[str], room_bytes: int | None) -> Held:
    """Copy tensors, the small ones first.

    Args:
        steady: those that only updates change, and that are lent where there is no room.
        room_bytes: for copies; None is enough for all.
    """
    lent = frozenset[str]() if room_bytes is None else _lent(tensors, steady, room_bytes)
    copies = _copied({name: tensor for name, tensor in tensors.items() if name not in lent})
    return Held({name: copies.get(name, tensor) for name, tensor in tensors.items()}, lent)


def _lent(tensors: Mapping[str, Tensor], steady: Container[str], room_bytes: int) -> frozenset[str]:
    room = room_bytes - sum(t.nbytes for name, t in tensors.items() if name not in steady)
    found = set()
    for name in sorted(tensors, key=lambda name: (tensors[name].nbytes, name)):
        if name in steady:
            room -= tensors[name].nbytes
            if room < 0:
                found.add(name)
    return frozenset(found)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """They share pages of their own, which the system has back when the last copy is dropped: the
    process keeps what it frees otherwise."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    pages = torch.frombuffer(mmap.mmap(-1, max(sum(sizes), 1)), dtype=torch.uint8)
    found, start = dict[str, Tensor](), 0
    for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
        place = pages[start : start + tensor.nbytes]
        found[name] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        start += size
    return found


TRAINING = "training"
"""Folder of the files that the user's model does not load."""
_STATE = "state/"


@dataclass(frozen=True)
class Snapshot:
    """A rank's tensors: copies in the memory of the host, or lent until they are written.

    Args:
        weights: by the names of the user's model.
        training: further states, and tensors of the optimizer.
        optimizer: JSON by parameter, which names these.
        updates: how often this rank's optimizer has stepped.
        losses: of evaluations that its learning-rate schedule has seen.
        loss_scale: of float16.
        given_back: set once tensors that are lent may change.
    """

    weights: Held
    training: Held
    optimizer: Mapping[str, Any]
    updates: int = 0
    losses: Sequence[float] = ()
    loss_scale: LossScaleState | None = None
    given_back: Event = field(default_factory=Event)

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        found = (*self.weights.tensors.values(), *self.training.tensors.values())
        return sum(tensor.nbytes for tensor in found)

    def write(self, directory: Path, rank: int) -> tuple[list[Shard], list[Shard]]:
        """Write this rank's files: what is lent first, which is given back once it is written.

        Where that fails, it is the caller who gives it back.

        Returns:
            Those of weights and those of the training state: one or none of each.

        Raises:
            OSError: the disk is full, say.
            TypeError: a tensor has a type that files do not know.
        """
        file, more = f"rank-{rank:04d}.safetensors", {"optimizer": json.dumps(self.optimizer)}
        states = (key.removeprefix(_STATE) for key in self.training.tensors if _is_state(key))
        told = (*states, *self.optimizer)
        with ExitStack() as opened:
            own = _Part(opened, directory, file, self.weights, self.weights.tensors)
            rest = _Part(opened, directory, f"{TRAINING}/{file}", self.training, told, more)
            own.write_lent()
            rest.write_lent()
            self.given_back.set()
            return list(own.finish()), list(rest.finish())


class _Part:
    """One of the two files of a rank; none where it would tell of nothing.

    Args:
        opened: closes it in the end.
        names: that the manifest gives for it.
    """

    def __init__(
        self,
        opened: ExitStack,
        directory: Path,
        file: str,
        held: Held,
        names: Iterable[str],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._names = file, tuple(names)
        ordered = _ordered(held)
        here = [index for index, name in enumerate(ordered, 1) if name in held.lent]
        self._lent = max(here, default=0)
        self._tensors = iter(ordered.values())
        self._file: TensorFile | None = None
        if self._names:
            make_private_directory((directory / file).parent)
            self._file = TensorFile(directory / file, ordered, metadata)
            opened.callback(self._file.close)

    def write_lent(self) -> None:
        """All that is lent, and what must stand before it."""
        if self._file is not None:
            self._file.write(islice(self._tensors, self._lent))

    def finish(self) -> Iterator[Shard]:
        """The rest."""
        if self._file is not None:
            self._file.write(self._tensors)
            yield self._file.finish(self._name, self._names)


def _ordered(held: Held) -> dict[str, Tensor]:
    """Large types first, for readers; of each, what is lent."""

    def place(name: str) -> tuple[int, bool, str]:
        return -held.tensors[name].element_size(), name not in held.lent, name

    return {name: held.tensors[name] for name in sorted(held.tensors, key=place)}


def take_snapshot(
    states: Mapping[str, Tensor],
    persistent: Container[str],
    stepper: Stepper,
    updated: Mapping[str, nn.Parameter],
    loss_scale: LossScaleState | None = None,
    room_bytes: int | None = None,
) -> Snapshot:
    """Copy what a rank is to save, as far as there is room for it.

    Parameters and optimizer state that find no room are lent: they may not change before they are
    given back. Buffers are copied in any case, since forwards change them.

    Args:
        states: its parameters and buffers, by full name.
        persistent: which of them a state dict holds.
        updated: the parameters whose optimizer state this rank tells.
        room_bytes: for copies; None is enough for all.

    Raises:
        CaptureError: the optimizer's state cannot be saved.
    """
    weights, training, steady = dict[str, Tensor](), dict[str, Tensor](), set[str]()
    for name, tensor in states.items():
        plain = plain_name(name)
        key = state_key(name)
        if plain is not None and name in persistent:
            weights[plain] = tensor
            key = plain
        else:
            training[key] = tensor
        if isinstance(tensor, nn.Parameter):
            steady.add(key)
    tensors, kept = stepper.state(updated)
    own = hold(weights, steady, _less(room_bytes, training, steady))
    rest = hold(training | tensors, steady | tensors.keys(), _less(room_bytes, own.copies, ()))
    found = Snapshot(own, rest, kept, stepper.updates, tuple(stepper.losses), loss_scale)
    if not (own.lent or rest.lent):
        found.given_back.set()
    return found


def _less(
    room_bytes: int | None, tensors: Mapping[str, Tensor], steady: Container[str]
) -> int | None:
    """Room beside copies of those tensors that are no steady ones."""
    if room_bytes is None:
        return None
    return room_bytes - sum(t.nbytes for name, t in tensors.items() if name not in steady)


def state_key(name: str) -> str:
    """Under which a state that is no weight of the user's model is written."""
    return _STATE + name


def _is_state(key: str) -> bool:
    return key.startswith(_STATE)


def plain_name(name: str) -> str | None:
    """The name in the user's model of a parameter or buffer; None if it is not of the model."""
    return own_name(name) if in_model(name) else None


def sync(path: Path) -> None:
    """Have a file, or the entries of a directory, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
