"""`pipectl export`: the weights of a run as files for other programs."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import Literal, TypedDict

import typer

from pipectl.cli import options as opt
from pipectl.cli.console import say, say_json, short_path
from pipectl.errors import UsageError
from pipectl.runs import RunDirectory, checkpoints, find_run, step_of
from pipectl.units import format_bytes, plural

_SHARD_BYTES = 5 * 10**9
Format = Literal["safetensors", "hf", "dcp"]
"""One file, a directory in the format of model hubs, or torch's own format."""


class ExportJson(TypedDict):
    """Weights that were written.

    Args:
        path: file or directory.
        step: step of the checkpoint.
        bytes: size of what was written.
        loss: file of the loss's own parameters and buffers; null if it has none.
    """

    path: str
    step: int
    bytes: int
    loss: str | None


def command(
    context: typer.Context,
    name: str = opt.LAST_RUN,
    output: Path | None = opt.value(
        "PATH", "What to write; by default model.safetensors, or model.", "--output", "-o"
    ),
    step: int | None = opt.count("Step of the checkpoint; by default the last.", "--step"),
    file_format: Format | None = opt.flag(
        "safetensors: one file. hf: a directory for from_pretrained. dcp: a directory for "
        "torch.distributed.checkpoint.",
        "--format",
        default=None,
    ),
    like: Path | None = opt.value(
        "DIRECTORY", "Take names, types and other files from this model; hf.", "--like"
    ),
    shard_size: int | None = opt.value(
        "SIZE", "Largest file of hf; by default 5GB.", "--shard-size", parser=opt.read_size
    ),
    as_json: bool = opt.JSON,
    directory: Path = opt.DIRECTORY,
) -> None:
    from pipectl.runtime.checkpoint import load
    from pipectl.runtime.checkpoint.export import (
        FILE,
        Renamed,
        export_dcp,
        export_directory,
        export_file,
        loss_file,
    )

    kind = file_format or ("hf" if like or shard_size else "safetensors")
    if kind != "hf":
        opt.refuse(context, "--shard-size", f"has no meaning with --format {kind}")
    path = output or Path(FILE if kind == "safetensors" else "model")
    checkpoint = _find_checkpoint(find_run(directory, name), step)
    is_empty = kind != "safetensors" and path.is_dir() and not any(path.iterdir())
    _refuse_existing(None if is_empty else path)
    stored = load(checkpoint, weights_only=True)
    loss = loss_file(path, is_directory=kind != "safetensors") if stored.loss else None
    _refuse_existing(loss)
    weights = stored if like is None else Renamed(stored, like)
    if kind == "safetensors":
        size_bytes = export_file(weights, path)
    elif kind == "dcp":
        size_bytes = export_dcp(weights, path)
    else:
        size_bytes = export_directory(weights, path, shard_size or _SHARD_BYTES, like)
    loss_bytes = 0 if loss is None else export_file(stored.loss, loss)
    saved_step = step_of(checkpoint) or 0
    if as_json:
        answer: ExportJson = {
            "path": str(path),
            "step": saved_step,
            "bytes": size_bytes + loss_bytes,
            "loss": None if loss is None else str(loss),
        }
        say_json(answer)
        return
    say(f"{short_path(path)}: {_describe(weights, size_bytes)}, after step {saved_step}")
    if loss is not None:
        say(f"{short_path(loss)}: {_describe(stored.loss, loss_bytes)}, of the loss")


def _refuse_existing(path: Path | None) -> None:
    if path is not None and path.exists():
        raise UsageError(f"{path}: already exists", cure="name another with -o, or remove it")


def _describe(tensors: Sized, size_bytes: int) -> str:
    return f"{plural(len(tensors), 'tensor')}, {format_bytes(size_bytes)}"


def _find_checkpoint(run: RunDirectory, step: int | None) -> Path:
    """The checkpoint of a step; by default the last."""
    by_step = {step_of(path): path for path in checkpoints(run.checkpoints)}
    if not by_step:
        raise UsageError(
            f"{run.name}: has no checkpoint yet",
            cure="wait for its first: every checkpoint.every steps, and at the end",
        )
    if step is None:
        return next(iter(by_step.values()))
    if step not in by_step:
        steps = ", ".join(str(number) for number in sorted(filter(None, by_step)))
        raise UsageError(
            f"{run.name}: has no checkpoint of step {step}", cure=f"it has those of steps {steps}"
        )
    return by_step[step]
