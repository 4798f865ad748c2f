"""Reading checkpoints: the newest complete one, and the parts of it that a rank needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipectl.capture.model_with_loss import name_in_loss
from pipectl.capture.tensor_file import TensorReader
from pipectl.errors import DataFileError, MismatchError
from pipectl.runs import checkpoints
from pipectl.runtime.checkpoint.snapshot import names_of_loss, origins_of, plain_name, state_key
from pipectl.runtime.manifest import Manifest, Shard
from pipectl.runtime.optimizer import StateOrigin, restore_state
from pipectl.runtime.waiting import broadcast, gather_all
from pipectl.units import plural

if TYPE_CHECKING:  # programs that are no rank read checkpoints, too
    from mpi4py import MPI

StateDict = dict[str, Tensor]
"""Weights by their names in the user's model."""
_HINT = "use another checkpoint of the run"


class Stored(Mapping[str, Tensor]):
    """A checkpoint; as a mapping, the weights by their names in the user's model.

    Each tensor is read from its file when it is accessed.

    Raises:
        DataFileError: the manifest is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = Manifest.load(directory)
        self._weights = {n: directory / s.file for s in self.manifest.weights for n in s.names}
        self._training = {n: directory / s.file for s in self.manifest.training for n in s.names}
        self._reader = TensorReader()
        self._optimizer = cache(
            lambda file: json.loads(self._reader.header(file).metadata["optimizer"])
        )
        self._origins = cache(lambda file: origins_of(self._reader.header(file).metadata))

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.tensor(*self._place(name))

    def layout(self, name: str) -> Tensor:
        """Shape and type of a weight, on the meta device."""
        file, stored = self._place(name)
        return self._reader.header(file).layouts[stored]

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        yield from self.manifest.aliases

    def __len__(self) -> int:
        return len(self._weights) + len(self.manifest.aliases)

    @property
    def loss(self) -> StoredLoss:
        """The parameters and buffers of the loss."""
        files = {self.directory / shard.file for shard in self._shards_of_loss()}
        return StoredLoss(sorted(files), self._reader)

    @property
    def shards_of_weights(self) -> tuple[Shard, ...]:
        """The files that have weights of model or loss; others have nothing to export."""
        return (*self.manifest.weights, *self._shards_of_loss())

    def _shards_of_loss(self) -> Iterator[Shard]:
        return (s for s in self.manifest.training if any(map(name_in_loss, s.names)))

    def check(self, micro_batch_size: int) -> None:
        """Check whether a run with this micro-batch size can resume from here.

        Raises:
            MismatchError: its results would depend on where it was stopped.
        """
        size = self.manifest.micro_batch_size
        if size != micro_batch_size:
            raise MismatchError(
                f"{self.directory}: was written with micro-batches of {plural(size, 'sample')}, "
                f"and the plan has {micro_batch_size}",
                hint="set pipeline.micro_batches so that their size stays the same",
            )

    def restore_states(self, states: Mapping[str, Tensor]) -> None:
        """Restore parameters and buffers.

        Args:
            states: by full name.

        Raises:
            MismatchError: the checkpoint is of another model.
        """
        with torch.no_grad():
            for name, tensor in states.items():
                stored = self._state(name)
                if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
                    raise self._other(f"has another shape or type of {name!r}")
                tensor.copy_(stored)

    def restore_optimizer(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Restore the optimizer state of its parameters.

        A parameter may have none: one that got no gradient, for example.
        """
        for name, parameter in parameters.items():
            file = self._training.get(name)
            if file is not None and name in self._optimizer(file):
                read = partial(self._reader.tensor, file)
                restore_state(optimizer, parameter, self._optimizer(file)[name], read)

    def origin(self, name: str) -> StateOrigin | None:
        """What has made the optimizer state of a parameter; None if that is not known."""
        file = self._training.get(name)
        return None if file is None else self._origins(file).get(name)

    def _state(self, name: str) -> Tensor:
        plain = plain_name(name)
        if plain is not None and plain in self._weights:
            return self[plain]
        file, key = self._training.get(name), state_key(name)
        if file is None or key not in self._reader.header(file).layouts:
            raise self._other(f"has no {name!r}")
        return self._reader.tensor(file, key)

    def _place(self, name: str) -> tuple[Path, str]:
        stored = self.manifest.aliases.get(name, name)
        return self._weights[stored], stored

    def _other(self, what: str) -> MismatchError:
        return MismatchError(
            f"{self.directory}: {what}",
            hint="the model has changed since; start a new run, with model.weights if you like",
        )


class StoredLoss(Mapping[str, Tensor]):
    """The parameters and buffers of a checkpoint's loss, by their names in it.

    Those that it shares with the model are among the weights of the model only.

    Args:
        files: of the training state.
    """

    def __init__(self, files: Iterable[Path], reader: TensorReader) -> None:
        self._reader = reader
        self._places = {
            str(name_in_loss(name)): (file, state_key(name))
            for file in files
            for name in names_of_loss(reader.header(file).metadata)
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.tensor(*self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def layout(self, name: str) -> Tensor:
        """Shape and type of a tensor, on the meta device."""
        file, stored = self._places[name]
        return self._reader.header(file).layouts[stored]


def load(directory: Path, *, weights_only: bool = False) -> Stored:
    """A checkpoint whose bytes are all checked.

    Args:
        weights_only: whether only the weights of model and loss will be read, and only the files
            with these are checked.

    Raises:
        DataFileError: a file is missing or damaged.
    """
    stored = Stored(directory)
    shards = stored.shards_of_weights if weights_only else stored.manifest.shards
    damaged = _damaged(directory, shards)
    if damaged is not None:
        raise DataFileError(f"{directory / damaged}: missing or damaged", hint=_HINT)
    return stored


def newest(communicator: MPI.Comm, directory: Path, warn: Callable[[str], None]) -> Stored | None:
    """The complete checkpoint with the most steps, or None if there is none; collective.

    Every rank checks some of the files.

    Args:
        warn: called for each damaged checkpoint (on rank 0).
    """
    for name in broadcast(communicator, [path.name for path in checkpoints(directory)]):
        stored, problem = None, ""
        try:
            stored = Stored(directory / name)
            mine = stored.manifest.shards[communicator.rank :: communicator.size]
            damaged = _damaged(directory / name, mine)
            problem = f"{directory / name / damaged}: missing or damaged" if damaged else ""
        except DataFileError as error:
            problem = error.message
        problems = [each for each in gather_all(communicator, problem) if each]
        if not problems:
            return stored
        if communicator.rank == 0:
            warn(f"{problems[0]}; the checkpoint before it is used, if there is one")
    return None


def _damaged(directory: Path, shards: Iterable[Shard]) -> str | None:
    return next((shard.file for shard in shards if not shard.is_whole(directory)), None)
