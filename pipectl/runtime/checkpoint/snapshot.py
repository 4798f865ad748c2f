"""What one rank puts into a checkpoint: copied at once, written while training goes on.

If there is no memory for the copy, it is written from where it is, and training waits.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipectl.capture.step import in_model, own_name
from pipectl.capture.tensor_file import write_tensors
from pipectl.files import make_private_directory
from pipectl.runtime.manifest import Shard
from pipectl.runtime.optimizer import Stepper

_ALIGNMENT = 64
TRAINING = "training"
"""Folder of the files that the user's model does not load."""
_STATE = "state/"


@dataclass(frozen=True)
class Snapshot:
    """A rank's tensors.

    Args:
        weights: by the names of the user's model.
        training: further states, and tensors of the optimizer.
        optimizer: JSON by parameter, which names these.
        is_copy: whether training may go on while it is written.
    """

    weights: Mapping[str, Tensor]
    training: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    is_copy: bool = False

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *self.training.values()))

    def write(self, directory: Path, rank: int) -> tuple[list[Shard], list[Shard]]:
        """Write this rank's files.

        Returns:
            Those of weights and those of the training state: one or none of each.

        Raises:
            OSError: the disk is full, say.
            TypeError: a tensor has a type that files do not know.
        """
        file, notes = f"rank-{rank:04d}.safetensors", {"optimizer": json.dumps(self.optimizer)}
        states = [key.removeprefix(_STATE) for key in self.training if key.startswith(_STATE)]
        weights = _write(directory, file, self.weights, [*self.weights])
        rest = f"{TRAINING}/{file}"
        return weights, _write(directory, rest, self.training, [*states, *self.optimizer], notes)


def _write(
    directory: Path,
    file: str,
    tensors: Mapping[str, Tensor],
    names: Sequence[str],
    notes: Mapping[str, str] | None = None,
) -> list[Shard]:
    """Write one file, unless it would tell of no name."""
    if not names:
        return []
    make_private_directory((directory / file).parent)
    size_bytes, sha256 = write_tensors(directory / file, tensors, tensors.__getitem__, notes)
    return [Shard(file, size_bytes, sha256, tuple(sorted(names)))]


def take_snapshot(
    states: Mapping[str, Tensor],
    persistent: Container[str],
    stepper: Stepper,
    updated: Mapping[str, nn.Parameter],
    room_bytes: int | None = None,
) -> Snapshot:
    """Copy what a rank is to save, if there is room for the copy.

    Args:
        states: its parameters and buffers, by full name.
        persistent: which of them a state dict holds.
        updated: the parameters whose optimizer state this rank tells.
        room_bytes: for the copy; None is enough.

    Raises:
        CaptureError: the optimizer's state cannot be saved.
    """
    weights, training = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in states.items():
        plain = plain_name(name)
        if plain is not None and name in persistent:
            weights[plain] = tensor
        else:
            training[state_key(name)] = tensor
    tensors, optimizer = stepper.state(updated)
    training |= tensors
    snapshot = Snapshot(weights, training, optimizer)
    if room_bytes is not None and snapshot.size_bytes > room_bytes:
        return snapshot
    return replace(snapshot, weights=_copy(weights), training=_copy(training), is_copy=True)


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that share pages of their own, which the system has back when the last one is dropped:
    the process keeps what it frees otherwise."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    pages = torch.frombuffer(mmap.mmap(-1, max(sum(sizes), 1)), dtype=torch.uint8)
    copies, start = dict[str, Tensor](), 0
    for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
        place = pages[start : start + tensor.nbytes]
        copies[name] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        start += size
    return copies


def state_key(name: str) -> str:
    """Under which a state that is no weight of the user's model is written."""
    return _STATE + name


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
