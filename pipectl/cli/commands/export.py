"""`pipectl export`: the weights of a run as files for other programs."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import Any, Literal, TypedDict

import typer

from pipectl.cli import options as opt
from pipectl.cli.console import say, say_json, short_path, warn
from pipectl.errors import UsageError
from pipectl.runs import (
    BestCheckpoint,
    RunDirectory,
    best_checkpoint,
    best_evaluation,
    checkpoints,
    find_run,
    step_of,
)
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
    if best:
        opt.refuse(context, "--step", "has no meaning with --best")
    run = find_run(directory, name)
    found = _find_best(run) if best else None
    checkpoint = _find_checkpoint(run, step) if found is None else found.path
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
            "best": None if found is None else found.best.to_json(),
        }
        say_json(answer)
    else:
        why = "" if found is None else f" ({found.best})"
        say(f"{short_path(path)}: {_describe(weights, size_bytes)}, after step {saved_step}{why}")
        if loss is not None:
            say(f"{short_path(loss)}: {_describe(stored.loss, loss_bytes)}, of the loss")
    if found is not None and found.missed is not None:
        warn(f"the evaluation after step {found.missed.step} was better, but has no checkpoint")


def _refuse_existing(path: Path | None) -> None:
    if path is not None and path.exists():
        raise UsageError(f"{path}: already exists", cure="name another with -o, or remove it")


def _describe(tensors: Sized, size_bytes: int) -> str:
    return f"{plural(len(tensors), 'tensor')}, {format_bytes(size_bytes)}"


def _find_best(run: RunDirectory) -> BestCheckpoint:
    """The best checkpoint of a run; a refusal says what the run lacks."""
    found = best_checkpoint(run.checkpoints)
    if found is not None:
        return found
    _find_checkpoint(run, None)
    best = best_evaluation(run.checkpoints)
    if best is None:
        raise UsageError(
            f"{run.name}: does not know its best evaluation",
            cure="runs with evaluation.early_stopping or checkpoint.keep_best do; the metrics of "
            "evaluations are in metrics.jsonl, and --step exports any checkpoint",
        )
    raise UsageError(
        f"{run.name}: its best evaluation, after step {best.step}, has no checkpoint",
        cure="checkpoint.keep_best keeps it; --step exports another checkpoint",
    )


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
