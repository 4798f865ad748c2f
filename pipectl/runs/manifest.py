"""``manifest.json`` of a checkpoint: which files it has, what is in them, and their checksums."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipectl.access import open_regular
from pipectl.fields import Reader
from pipectl.files import read_json, write_json

VERSION = 1
_NAME = "manifest.json"
_NOT_FINITE = ("nan", "inf", "-inf")
"""Stored as text, for which JSON has no numbers."""
_CURE = "use another checkpoint of the run"


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint.

    Args:
        file: relative to the checkpoint.
        names: of the tensors in a file of weights; of the parameters and buffers whose state is in
            a file of training state.
    """

    file: str
    size_bytes: int
    sha256: str
    names: tuple[str, ...]

    def is_whole(self, directory: Path) -> bool:
        """Whether the file has the bytes it was written with."""
        path = directory / self.file
        try:
            return path.stat().st_size == self.size_bytes and checksum(path) == self.sha256
        except OSError:
            return False

    def to_json(self) -> dict[str, Any]:
        """As it stands in the manifest."""
        return {
            "file": self.file,
            "bytes": self.size_bytes,
            "sha256": self.sha256,
            "names": list(self.names),
        }

    @classmethod
    def from_reader(cls, reader: Reader) -> Shard:
        """The inverse of :meth:`to_json`.

        Raises:
            DataFileError: a field is missing or wrong, or the file is not in the checkpoint.
        """
        file = reader.text("file")
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise reader.error("file", f"{file!r} is not in the checkpoint")
        return cls(file, reader.integer("bytes"), reader.text("sha256"), reader.texts("names"))


class LossScaleState(NamedTuple):
    """Of float16: the scale, and how many steps it has been good for."""

    scale: float
    steps_since: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    Args:
        step: how many steps are done.
        micro_batch_size: of the run, on which its results depend.
        aliases: further names of tied weights, to the name they are stored under.
        weights: files with the parameters and buffers of the user's model, by their own names.
        training: files with the state of the optimizer, and what else a run needs to go on.
        updates: how many of the steps moved the learning-rate schedule on.
        losses: of the evaluations that a learning-rate schedule follows, in order.
    """

    step: int
    micro_batch_size: int
    aliases: Mapping[str, str]
    weights: tuple[Shard, ...] = ()
    training: tuple[Shard, ...] = ()
    updates: int = 0
    losses: tuple[float, ...] = ()
    loss_scale: LossScaleState | None = None

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All files."""
        return (*self.weights, *self.training)

    def save(self, directory: Path) -> None:
        """Write it into the directory of its files."""
        scale = self.loss_scale
        document = {
            "version": VERSION,
            "step": self.step,
            "micro_batch_size": self.micro_batch_size,
            "updates": self.updates,
            "losses": [loss if math.isfinite(loss) else str(loss) for loss in self.losses],
            "loss_scale": None if scale is None else scale._asdict(),
            "shards": [shard.to_json() for shard in self.weights],
            "training": [shard.to_json() for shard in self.training],
            "aliases": dict(self.aliases),
        }
        write_json(directory / _NAME, document)

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read the manifest in a checkpoint; its files are not looked at.

        Raises:
            DataFileError: missing, damaged, or of another version.
        """
        path = directory / _NAME
        reader = Reader(read_json(path, cure=_CURE), file=str(path), cure=_CURE)
        reader.check_version(VERSION)
        weights, training = (_shards(reader, key) for key in ("shards", "training"))
        return cls(
            step=reader.integer("step"),
            micro_batch_size=reader.integer("micro_batch_size", minimum=1),
            updates=reader.integer("updates"),
            losses=_losses(reader),
            weights=weights,
            training=training,
            aliases=_aliases(reader, weights),
            loss_scale=_loss_scale(reader),
        )


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, the one with the most steps first."""
    folders = [path for path in directory.glob("step-*") if step_of(path) is not None]
    return sorted(folders, key=lambda path: step_of(path) or 0, reverse=True)


def step_of(checkpoint: Path) -> int | None:
    """The step in the name of a checkpoint; None if it is no such name."""
    digits = checkpoint.name.removeprefix("step-")
    return int(digits) if digits.isascii() and digits.isdigit() else None


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with os.fdopen(open_regular(path), "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _shards(reader: Reader, key: str) -> tuple[Shard, ...]:
    return tuple(Shard.from_reader(item) for item in reader.items(key))


def _aliases(reader: Reader, weights: tuple[Shard, ...]) -> dict[str, str]:
    aliases = reader.mapping("aliases")
    known = {name for shard in weights for name in shard.names}
    if not all(str(name) in known for name in aliases.values()):
        raise reader.error("aliases", "must give each further name of a saved weight")
    return {str(alias): str(name) for alias, name in aliases.items()}


def _losses(reader: Reader) -> tuple[float, ...]:
    losses = reader.value("losses", [])
    if not isinstance(losses, list) or any(
        type(loss) not in (int, float) and loss not in _NOT_FINITE for loss in losses
    ):
        raise reader.error("losses", "must be a list of numbers")
    return tuple(map(float, losses))


def _loss_scale(reader: Reader) -> LossScaleState | None:
    if "loss_scale" not in reader:
        return None
    inner = reader.section("loss_scale")
    return LossScaleState(inner.number("scale"), inner.integer("steps_since"))
