"""What one rank puts into a checkpoint: copied at once, written while training goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipectl.runs import LossScaleState, Shard
from pipectl.runtime.stepper import Stepper

TRAINING = "training"
"""Folder of the files that the user's model does not load."""
_MODEL, _STATE = "model.", "state/"


@dataclass(frozen=True)
class Snapshot:
    """Copies of a rank's tensors, in the memory of the host.

    Args:
        weights: by the names of the user's model.
        training: further states, and tensors of the optimizer.
        optimizer: JSON by parameter, which names these.
        updates: how often this rank's learning-rate schedule has moved on.
        loss_scale: of float16.
    """

    weights: Mapping[str, Tensor]
    training: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    updates: int = 0
    loss_scale: LossScaleState | None = None

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        found = (*self.weights.values(), *self.training.values())
        return sum(tensor.nbytes for tensor in found)

    def write(self, directory: Path, rank: int) -> tuple[list[Shard], list[Shard]]:
        """Write this rank's files.

        Returns:
            Those of weights and those of the training state: one or none of each.

        Raises:
            OSError: the disk is full, say.
        """
        names = [key.removeprefix(_STATE) for key in self.training if key.startswith(_STATE)]
        metadata = {"optimizer": json.dumps(self.optimizer)}
        file = f"rank-{rank:04d}.safetensors"
        weights = _write(directory, file, self.weights, self.weights)
        more = _write(
            directory, f"{TRAINING}/{file}", self.training, (*names, *self.optimizer), metadata
        )
        return weights, more


def take_snapshot(
    states: Mapping[str, Tensor],
    persistent: Container[str],
    stepper: Stepper,
    updated: Mapping[str, nn.Parameter],
    loss_scale: LossScaleState | None = None,
) -> Snapshot:
    """Copy what a rank is to save.

    Args:
        states: its parameters and buffers, by full name.
        persistent: which of them a state dict holds.
        updated: the parameters whose optimizer state this rank tells.

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
    tensors, kept = stepper.state(updated)
    return Snapshot(
        _copied(weights), _copied(training | tensors), kept, stepper.updates, loss_scale
    )


def state_key(name: str) -> str:
    """Under which a state that is no weight of the user's model is written."""
    return _STATE + name


def plain_name(name: str) -> str | None:
    """The name in the user's model of a parameter or buffer; None if it is not of the model."""
    return name.removeprefix(_MODEL) if name.startswith(_MODEL) else None


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        for name, tensor in tensors.items()
    }


def _write(
    directory: Path,
    file: str,
    tensors: Mapping[str, Tensor],
    names: Iterable[str],
    metadata: dict[str, str] | None = None,
) -> list[Shard]:
    found = tuple(sorted(names))
    if not found:
        return []
    path = directory / file
    path.parent.mkdir(exist_ok=True)
    save_file(dict(tensors), path, metadata)
    sync(path)
    return [Shard.of_file(directory, file, found)]


def sync(path: Path) -> None:
    """Have a file, or the entries of a directory, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
