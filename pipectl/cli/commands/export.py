"""`pipectl export`: the weights of a run as safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pipectl.cli.console import say, say_json, short_path
from pipectl.cli.options import RUNS, Json, RunName, RunsDirectory, count, option, read_size
from pipectl.errors import UsageError
from pipectl.runs import RunDirectory, checkpoints, find_run, step_of
from pipectl.units import format_bytes


def command(
    name: RunName = "last",
    output: Annotated[
        Path | None,
        option("FILE", "File to write; by default model.safetensors.", "--output", "-o"),
    ] = None,
    step: Annotated[
        int | None, count("Step of the checkpoint; by default the last.", "--step")
    ] = None,
    shard_size: Annotated[
        int | None,
        option("SIZE", "Write files of at most this size (5GB), and an index.", parser=read_size),
    ] = None,
    as_json: Json = False,
    directory: RunsDirectory = RUNS,
) -> None:
    from pipectl.runtime.checkpoint import load
    from pipectl.runtime.checkpoint.export import export_file, export_shards

    path = output or Path("model" if shard_size else "model.safetensors")
    checkpoint = _find_checkpoint(find_run(directory, name), step)
    if path.exists() and not (shard_size and path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{path}: exists already", cure="name another, or remove it")
    weights = load(checkpoint, weights_only=True)
    if shard_size is None:
        size_bytes = export_file(weights, path)
    else:
        size_bytes = export_shards(weights, path, shard_size)
    saved_step = step_of(checkpoint) or 0
    if as_json:
        say_json({"path": str(path), "step": saved_step, "bytes": size_bytes})
    else:
        size = format_bytes(size_bytes)
        say(f"{short_path(path)}: {len(weights)} tensors, {size}, after step {saved_step}")


def _find_checkpoint(run: RunDirectory, step: int | None) -> Path:
    """The checkpoint of a step; by default the last.

    Raises:
        UsageError: there is none.
    """
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
