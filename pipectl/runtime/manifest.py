"""``manifest.json`` of a checkpoint: which files it has, what is in them, and their checksums."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pipectl.errors import DataFileError
from pipectl.fields import Count, DataFile, FieldError, Rule
from pipectl.files import open_regular
from pipectl.runs import Best
from pipectl.runs.best import MANIFEST


def _is_inside(file: str) -> bool:
    return not Path(file).is_absolute() and ".." not in Path(file).parts


def _to_numbers(value: Any) -> tuple[float, ...]:
    """Numbers from JSON; infinities and NaN are strings there."""
    words = ("nan", "inf", "-inf")
    is_valid = isinstance(value, list) and all(
        item in words or (type(item) in (int, float) and abs(item) <= sys.float_info.max)
        for item in value
    )
    if not is_valid:
        raise FieldError("must be a list of numbers")
    return tuple(map(float, value))


_BLOCK_BYTES = 1 << 20
_INSIDE = Rule(_is_inside, "in the checkpoint")


def _to_number_or_text(value: float) -> float | str:
    """Convert to what JSON can represent, which :func:`_to_numbers` reads again."""
    return value if math.isfinite(value) else str(value)


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint.

    Args:
        file: path relative to the checkpoint.
        size_bytes: size of the file.
        sha256: its checksum.
        names: of the tensors in a file of weights; of the parameters and buffers whose state is in
            a file of training state.
    """

    file: Annotated[str, _INSIDE]
    size_bytes: int = field(metadata={"key": "bytes"})
    sha256: str
    names: tuple[str, ...]

    def is_whole(self, directory: Path) -> bool:
        """Whether the file is unchanged since it was written."""
        path = directory / self.file
        try:
            return path.stat().st_size == self.size_bytes and sha256_of(path) == self.sha256
        except OSError:
            return False


class LossScaleState(NamedTuple):
    """The loss scale of float16, and the number of steps without overflow since it changed."""

    scale: float
    steps_since: int


@dataclass(frozen=True)
class Manifest(DataFile):
    """A checkpoint.

    Args:
        step: steps done; samples and random numbers follow from it.
        micro_batch_size: of the run; its results depend on it.
        aliases: other names of tied weights, with the name under which they are stored.
        weights: files with the parameters and buffers of the user's model, by their own names.
        training: files with the optimizer state and all else that a run needs to resume.
        updates: number of steps that advanced the learning-rate schedule.
        losses: of the evaluations that a learning-rate schedule follows, in order, without one that
            was made only because the training ended.
        metric_values: of the metric that early stopping or ``checkpoint.keep_best`` follows, of the
            same evaluations.
        best: the best of all evaluations: its ``step``, ``metric``, ``mode`` and ``value``.
        loss_scale: of float16, and the number of steps without overflow since it changed.
        unevaluated: whether the evaluation after this step, if one is due, is still to be made.
    """

    hint: ClassVar[str] = "use another checkpoint of the run"
    step: int
    micro_batch_size: Count
    aliases: Mapping[str, str]
    weights: tuple[Shard, ...] = field(default=(), metadata={"key": "shards", "explicit": True})
    training: tuple[Shard, ...] = field(default=(), metadata={"explicit": True})
    updates: int = 0
    losses: Annotated[tuple[float, ...], _to_numbers] = ()
    metric_values: Annotated[tuple[float, ...], _to_numbers] = ()
    best: Best | None = None
    loss_scale: LossScaleState | None = None
    unevaluated: bool = False

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All files."""
        return (*self.weights, *self.training)

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object."""
        values = {
            name: [_to_number_or_text(value) for value in getattr(self, name)]
            for name in ("losses", "metric_values")
        }
        best = {}
        if self.best is not None:
            value = _to_number_or_text(self.best.value)
            best = {"best": {**vars(self.best), "value": value}}
        return {**super().to_json(), **values, **best}

    def save(self, path: Path) -> None:
        """Write it into a checkpoint, the directory of its files.

        Raises:
            DataFileError: it could not be read again.
        """
        self._check(MANIFEST)
        super().save(path / MANIFEST)

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read the manifest in a checkpoint; its files are not looked at.

        Raises:
            DataFileError: missing, damaged, or of another version.
        """
        return super().load(path / MANIFEST)

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, file: str = MANIFEST) -> Manifest:
        """The inverse of :meth:`to_json`; see :meth:`load`."""
        manifest = super().from_json(document, file=file)
        for key in ("shards", "training"):
            if key not in document:
                raise DataFileError(f"{file}: {key}: missing", hint=cls.hint)
        manifest._check(file)
        return manifest

    def _check(self, file: str) -> None:
        names = {name for shard in self.weights for name in shard.names}
        if not names.issuperset(self.aliases.values()):
            message = "must give each further name of a saved weight"
            raise DataFileError(f"{file}: aliases: {message}", hint=self.hint)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with os.fdopen(open_regular(path), "rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
        return digest.hexdigest()
