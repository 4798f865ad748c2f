"""The weights of a run: the checkpoint that is asked for, and its export for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pipectl.errors import UsageError
from pipectl.runs import (
    BestCheckpoint,
    RunDirectory,
    best_checkpoint,
    best_evaluation,
    checkpoints,
    step_of,
)
from pipectl.units import did_you_mean

SHARD_BYTES = 5 * 10**9
Format = Literal["safetensors", "hf", "dcp"]
"""One file, a directory in the format of model hubs, or torch's own format."""


class Found(NamedTuple):
    """A checkpoint of a run.

    Args:
        best: why it is the best; None if it was asked for by its step.
    """

    path: Path
    best: BestCheckpoint | None = None

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return step_of(self.path) or 0


class Exported(NamedTuple):
    """What was written.

    Args:
        path: file or directory.
        checkpoint: whose weights they are.
        tensors, size_bytes: their number and size.
        loss: file of the loss's own parameters and buffers; None if it has none.
        loss_tensors, loss_bytes: the same of these.
    """

    path: Path
    checkpoint: Found
    tensors: int
    size_bytes: int
    loss: Path | None = None
    loss_tensors: int = 0
    loss_bytes: int = 0


def find_checkpoint(run: RunDirectory, step: int | None = None, *, best: bool = False) -> Found:
    """Find the checkpoint of a step, or of the best evaluation; by default the last.

    Raises:
        UsageError: there is none; it says what the run lacks.
    """
    if best:
        if step is not None:
            raise UsageError("a step has no meaning with the best checkpoint", hint="choose one")
        found = _find_best(run)
        return Found(found.path, found)
    by_step = {step_of(path): path for path in checkpoints(run.checkpoints)}
    if not by_step:
        raise UsageError(
            f"{run.name}: has no checkpoint yet",
            hint="wait for its first: every checkpoint.every steps, and at the end",
        )
    if step is None:
        return Found(next(iter(by_step.values())))
    if step not in by_step:
        steps = ", ".join(str(number) for number in sorted(filter(None, by_step)))
        raise UsageError(
            f"{run.name}: has no checkpoint of step {step}", hint=f"it has those of steps {steps}"
        )
    return Found(by_step[step])


def _find_best(run: RunDirectory) -> BestCheckpoint:
    found = best_checkpoint(run.checkpoints)
    if found is not None:
        return found
    find_checkpoint(run)
    best = best_evaluation(run.checkpoints)
    if best is None:
        raise UsageError(
            f"{run.name}: does not know its best evaluation",
            hint="runs with evaluation.early_stopping or checkpoint.keep_best do; the metrics of "
            "evaluations are in metrics.jsonl, and --step exports any checkpoint",
        )
    raise UsageError(
        f"{run.name}: its best evaluation, after step {best.step}, has no checkpoint",
        hint="checkpoint.keep_best keeps it; --step exports another checkpoint",
    )


def export(
    run: RunDirectory,
    path: Path | None = None,
    *,
    step: int | None = None,
    best: bool = False,
    file_format: Format | None = None,
    like: Path | None = None,
    shard_bytes: int | None = None,
) -> Exported:
    """Write the weights of a checkpoint for other programs.

    Args:
        path: what to write; by default ``model.safetensors``, or the directory ``model``.
        step, best: see :func:`find_checkpoint`.
        file_format: None for ``hf`` with ``like`` or ``shard_bytes``, else ``safetensors``.
        like: model whose names, types and other files the weights get.
        shard_bytes: size of the largest file of ``hf``; by default 5 GB.

    Raises:
        UsageError: there is no such checkpoint, or ``path`` exists.
        DataFileError: the checkpoint is damaged, or is of another model than ``like``.
    """
    from pipectl.runtime.checkpoint import load
    from pipectl.runtime.checkpoint.export import (
        FILE,
        Renamed,
        export_dcp,
        export_directory,
        export_file,
        loss_file,
    )

    kind = file_format or ("hf" if like or shard_bytes else "safetensors")
    if kind not in get_args(Format):
        raise UsageError(
            f"format {kind!r}: there is none{did_you_mean(kind, get_args(Format))}",
            hint=f"choose {', '.join(get_args(Format))}",
        )
    path = path or Path(FILE if kind == "safetensors" else "model")
    checkpoint = find_checkpoint(run, step, best=best)
    is_empty = kind != "safetensors" and path.is_dir() and not any(path.iterdir())
    _refuse_existing(None if is_empty else path)
    stored = load(checkpoint.path, weights_only=True)
    loss = loss_file(path, is_directory=kind != "safetensors") if stored.loss else None
    _refuse_existing(loss)
    weights = stored if like is None else Renamed(stored, like)
    if kind == "safetensors":
        size_bytes = export_file(weights, path)
    elif kind == "dcp":
        size_bytes = export_dcp(weights, path)
    else:
        size_bytes = export_directory(weights, path, shard_bytes or SHARD_BYTES, like)
    if loss is None:
        return Exported(path, checkpoint, len(weights), size_bytes)
    loss_bytes = export_file(stored.loss, loss)
    return Exported(path, checkpoint, len(weights), size_bytes, loss, len(stored.loss), loss_bytes)


def _refuse_existing(path: Path | None) -> None:
    if path is not None and path.exists():
        raise UsageError(f"{path}: already exists", hint="name another with -o, or remove it")
