"""The part of one rank in a checkpoint: copied at once, written while training continues.

If memory does not suffice for the copy, the original is written, and training waits.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipectl.capture.model_with_loss import in_model, name_in_loss, own_name
from pipectl.capture.tensor_file import write_tensors
from pipectl.files import make_private_directory
from pipectl.runtime.manifest import Shard
from pipectl.runtime.optimizer import StateOrigin, Updater

_ALIGNMENT = 64
TRAINING = "training"
"""Folder of the files that the user's model does not load."""
_STATE = "state/"
_LOSS = "loss"
_ORIGINS = "origins"


@dataclass(frozen=True)
class Snapshot:
    """A rank's tensors.

    Args:
        weights: by their names in the user's model.
        training: other states, and tensors of the optimizer.
        optimizer: JSON by parameter, which refers to these tensors.
        loss: full names of those of ``training`` that a state dict of the loss holds.
        origins: of the optimizer's states, by parameter.
        is_copy: whether training may continue during the write.
    """

    weights: Mapping[str, Tensor]
    training: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    loss: Sequence[str] = ()
    origins: Mapping[str, StateOrigin] = field(default_factory=dict)
    is_copy: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *self.training.values()))

    def write(self, directory: Path, rank: int) -> tuple[list[Shard], list[Shard]]:
        """Write this rank's files.

        Returns:
            The files of weights, and those of the training state: at most one each.

        Raises:
            OSError: the disk is full, for example.
            TypeError: the file format does not support the type of a tensor.
        """
        file, notes = f"rank-{rank:04d}.safetensors", {"optimizer": json.dumps(self.optimizer)}
        notes[_LOSS] = json.dumps(self.loss)
        names = dict[StateOrigin, list[str]]()
        for name, origin in self.origins.items():
            names.setdefault(origin, []).append(name)
        notes[_ORIGINS] = json.dumps([[*origin, of] for origin, of in names.items()])
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
    """Write one file, unless it would be empty."""
    if not names:
        return []
    make_private_directory((directory / file).parent)
    size_bytes, sha256 = write_tensors(directory / file, tensors, tensors.__getitem__, notes)
    return [Shard(file, size_bytes, sha256, tuple(sorted(names)))]


def saved_names(
    persistent: Collection[str], tied: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Under which names tensors are saved, of all ranks.

    Args:
        persistent: full names that belong in a state dict.
        tied: the first name of each tensor by its further names, in the order of the model. The
            first may be that of a buffer that does not belong in a state dict.

    Returns:
        By the first name of a tensor, that under which it is saved; by further names in the user's
        model, the name in the model that has the tensor.
    """
    names, aliases = {name: name for name in persistent if name not in tied}, dict[str, str]()
    for further, first in tied.items():
        if further in persistent and (kept := names.setdefault(first, further)) != further:
            plain, own = plain_name(further), plain_name(kept)
            if plain is not None and own is not None:
                aliases[plain] = own
    return names, aliases


def take_snapshot(
    states: Mapping[str, Tensor],
    names: Mapping[str, str],
    updater: Updater,
    updated: Mapping[str, nn.Parameter],
    room_bytes: int | None = None,
) -> Snapshot:
    """Copy the state that a rank saves, if there is room for the copy.

    Args:
        states: its parameters and buffers, by full name.
        names: see :func:`saved_names`; others do not belong in a state dict.
        updated: the parameters whose optimizer state this rank saves.
        room_bytes: for the copy; None if there is enough.

    Raises:
        CaptureError: the optimizer's state cannot be saved.
    """
    weights, training, loss = dict[str, Tensor](), dict[str, Tensor](), list[str]()
    for name, tensor in states.items():
        kept = names.get(name)
        if kept != name:  # it is restored by its first name
            training[state_key(name)] = tensor
        if kept is None:
            continue
        plain = plain_name(kept)
        if plain is not None:
            weights[plain] = tensor
        else:
            training[state_key(kept)] = tensor
            if name_in_loss(kept) is not None:
                loss.append(kept)
    tensors, optimizer = updater.state(updated)
    training |= tensors
    origins = {name: updater.origin(name) for name in optimizer}
    snapshot = Snapshot(weights, training, optimizer, loss, origins)
    if room_bytes is not None and snapshot.size_bytes > room_bytes:
        return snapshot
    return replace(snapshot, weights=_copy(weights), training=_copy(training), is_copy=True)


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in pages of their own, which return to the system when the last copy is dropped; the
    process keeps other memory that it frees."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    pages = torch.frombuffer(mmap.mmap(-1, max(sum(sizes), 1)), dtype=torch.uint8)
    copies, start = dict[str, Tensor](), 0
    for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
        place = pages[start : start + tensor.nbytes]
        copies[name] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        start += size
    return copies


def state_key(name: str) -> str:
    """The key of a state that is not a weight of the user's model."""
    return _STATE + name


def names_of_loss(notes: Mapping[str, str]) -> list[str]:
    """The states of the loss in a file of training state, by the notes of its header."""
    return list(json.loads(notes.get(_LOSS, "[]")))


def origins_of(notes: Mapping[str, str]) -> dict[str, StateOrigin]:
    """What has made the optimizer's states in a file, by parameter; empty if that was not noted."""
    noted = json.loads(notes.get(_ORIGINS, "[]"))
    return {name: StateOrigin(*origin) for *origin, names in noted for name in names}


def plain_name(name: str) -> str | None:
    """The name of a parameter or buffer in the user's model; None if the model has none."""
    return own_name(name) if in_model(name) else None


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
