"""The best evaluation of a run, and the checkpoint of it.

Every manifest has the best evaluation up to its step; the newest one that can be read counts. A
checkpoint whose own step that is was the best when it was written. Values only get better, so the
last such checkpoint is the best that is there, also if a better one could not be written.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pipectl.fields import FieldError, LenientFields, read_value
from pipectl.files import MAX_BYTES, read_limited
from pipectl.runs.directory import checkpoints, step_of
from pipectl.units import printable

MANIFEST = "manifest.json"
"""File of a checkpoint."""
_INFINITE, _KEY = ("inf", "-inf"), b'"best"'


def _to_value(value: Any) -> float:
    """Convert to a number, which may be negative; an infinite one is a text in JSON."""
    is_finite = type(value) in (int, float) and abs(value) <= sys.float_info.max
    if not is_finite and value not in _INFINITE:
        raise FieldError("must be a number")
    return float(value)


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run so far.

    Args:
        step: the last step before it.
        metric: by which it is the best.
        mode: whether a smaller (``min``) or a larger (``max``) value is better.
        value: of the metric.
    """

    step: int
    metric: str
    mode: Literal["min", "max"]
    value: Annotated[float, _to_value]

    def __str__(self) -> str:
        return f"after step {self.step}: {self.words}"

    @property
    def words(self) -> str:
        """Value and metric: ``loss 0.25, the smallest so far``."""
        way = "smallest" if self.mode == "min" else "largest"
        return f"{printable(self.metric)} {self.value:.4g}, the {way}"

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object; an infinite value is null."""
        return {**vars(self), "value": self.value if math.isfinite(self.value) else None}

    def is_like(self, other: Best | None) -> bool:
        """Whether both are the best by the same metric."""
        return other is not None and (self.metric, self.mode) == (other.metric, other.mode)


class BestCheckpoint(NamedTuple):
    """The best checkpoint that is there.

    Args:
        path: of the checkpoint.
        best: the evaluation after its step.
        missed: a better evaluation whose checkpoint is not there; None if there is none.
    """

    path: Path
    best: Best
    missed: Best | None


def best_evaluation(directory: Path) -> Best | None:
    """Return the best evaluation up to the newest checkpoint; None without one.

    Args:
        directory: of the checkpoints.
    """
    return _newest(checkpoints(directory))


def best_checkpoint(directory: Path, until: int | None = None) -> BestCheckpoint | None:
    """Return the best checkpoint; None if no evaluation was compared, or none of these is there.

    Damaged manifests are passed over.

    Args:
        directory: of the checkpoints.
        until: step of the last checkpoint that counts.
    """
    every = checkpoints(directory)
    paths = [path for path in every if until is None or (step_of(path) or 0) <= until]
    newest = _newest(paths)
    if newest is None:
        return None
    # That of the best step first: there may be hundreds of checkpoints.
    for path in sorted(paths, key=lambda path: step_of(path) != newest.step):
        manifest = _read(path)
        own = None if manifest is None else manifest.best
        if own is not None and own.step == step_of(path) and own.is_like(newest):
            return BestCheckpoint(path, own, None if own.step == newest.step else newest)
    return None


def _newest(paths: Sequence[Path]) -> Best | None:
    found = (_read(path) for path in paths)
    return next((manifest.best for manifest in found if manifest is not None), None)


@dataclass(frozen=True)
class _OfManifest(LenientFields):
    best: Best | None = None


def _read(checkpoint: Path) -> _OfManifest | None:
    """Read a manifest; None if there is none, or if it is damaged."""
    file = checkpoint / MANIFEST
    try:
        status = file.stat()
    except OSError:
        return None
    return _read_once(file, status.st_ino, status.st_mtime_ns)


@lru_cache(maxsize=1024)
def _read_once(file: Path, *_: int) -> _OfManifest | None:
    """Read a manifest that never changes: `status --watch` asks twice a second."""
    try:
        content = read_limited(file, MAX_BYTES)
        is_whole = content.rstrip().endswith(b"}")
        # Names may be many.
        document = json.loads(content) if _KEY in content or not is_whole else {}
        manifest: _OfManifest = read_value(_OfManifest, document)
    except (OSError, ValueError, RecursionError):  # a FieldError is a ValueError
        return None
    return manifest
