"""`pipectl export`: the weights of a run as files for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import typer

from pipectl.cli import options as opt
from pipectl.cli.console import say, say_json, short_path, warn
from pipectl.jobs.export import Format, export
from pipectl.runs import find_run
from pipectl.units import format_bytes, plural


class ExportJson(TypedDict):
    """Weights that were written.

    Args:
        path: file or directory.
        step: step of the checkpoint.
        bytes: size of what was written.
        loss: file of the loss's own parameters and buffers; null if it has none.
        best: with ``--best``, the evaluation after that step: ``step``, ``metric``, ``mode`` and
            ``value``; else null.
    """

    path: str
    step: int
    bytes: int
    loss: str | None
    best: dict[str, Any] | None


def command(
    context: typer.Context,
    name: str = opt.LAST_RUN,
    output: Path | None = opt.value(
        "PATH", "What to write; by default model.safetensors, or model.", "--output", "-o"
    ),
    step: int | None = opt.count("Step of the checkpoint; by default the last.", "--step"),
    best: bool = opt.flag("The checkpoint of the best evaluation.", "--best"),
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
    kind = file_format or ("hf" if like or shard_size else "safetensors")
    if kind != "hf":
        opt.refuse(context, "--shard-size", f"has no meaning with --format {kind}")
    if best:
        opt.refuse(context, "--step", "has no meaning with --best")
    written = export(
        find_run(directory, name), output, step=step, best=best, file_format=kind, like=like,
        shard_bytes=shard_size,
    )  # fmt: skip
    checkpoint, found = written.checkpoint, written.checkpoint.best
    if as_json:
        answer: ExportJson = {
            "path": str(written.path),
            "step": checkpoint.step,
            "bytes": written.size_bytes + written.loss_bytes,
            "loss": None if written.loss is None else str(written.loss),
            "best": None if found is None else found.best.to_json(),
        }
        say_json(answer)
    else:
        why = "" if found is None else f" ({found.best.words})"
        what = _describe(written.tensors, written.size_bytes)
        say(f"{short_path(written.path)}: {what}, after step {checkpoint.step}{why}")
        if written.loss is not None:
            what = _describe(written.loss_tensors, written.loss_bytes)
            say(f"{short_path(written.loss)}: {what}, of the loss")
    if found is not None and found.missed is not None:
        warn(f"the evaluation after step {found.missed.step} was better, but has no checkpoint")


def _describe(tensors: int, size_bytes: int) -> str:
    return f"{plural(tensors, 'tensor')}, {format_bytes(size_bytes)}"
