"""The weights of a run for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipectl.errors import UsageError
from pipectl.runs import RunDirectory, checkpoints, step_of


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        path: of the file, or the directory of several.
        size_bytes: of all tensors.
    """

    path: Path
    step: int
    tensors: int
    size_bytes: int


def export(
    run: RunDirectory, path: Path, step: int | None = None, most_bytes: int | None = None
) -> Exported:
    """Write the weights of a checkpoint where ``load_state_dict(strict=True)`` finds all it needs.

    Args:
        path: a file; a directory where ``most_bytes`` limits each file.
        step: of the checkpoint; None for the last.

    Raises:
        UsageError: there is no such checkpoint, or ``path`` exists or cannot be written.
        DataFileError: the checkpoint is damaged.
    """
    from pipectl.runtime.checkpoint import load
    from pipectl.runtime.checkpoint.export import export_file, export_shards

    found = _checkpoint(run, step)
    if path.exists() and not (most_bytes and path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{path}: exists already", cure="name another, or remove it")
    weights = load(found, weights_only=True)
    if most_bytes is None:
        size_bytes = export_file(weights, path)
    else:
        size_bytes = export_shards(weights, path, most_bytes)
    return Exported(path, step_of(found) or 0, len(weights), size_bytes)


def _checkpoint(run: RunDirectory, step: int | None) -> Path:
    saved = checkpoints(run.checkpoints)
    if not saved:
        raise UsageError(
            f"{run.name}: has no checkpoint yet",
            cure="wait for its first: every checkpoint.every steps, and at the end",
        )
    known = {step_of(path): path for path in saved}
    if step is not None and step not in known:
        steps = ", ".join(str(number) for number in sorted(filter(None, known)))
        raise UsageError(
            f"{run.name}: has no checkpoint of step {step}", cure=f"it has those of steps {steps}"
        )
    return saved[0] if step is None else known[step]
