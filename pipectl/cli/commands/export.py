"""`pipectl export`: the weights of a run as safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.console import say, say_json, short
from pipectl.cli.options import RUNS, Json, RunName, RunsDirectory, above_zero, read_by
from pipectl.units import format_bytes, parse_bytes


def command(
    name: RunName = "last",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file; by default model.safetensors."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Of the checkpoint; by default the last.")
    ] = None,
    shard_size: Annotated[
        int | None,
        typer.Option(
            "--shard-size",
            parser=read_by(above_zero(parse_bytes)),
            metavar="SIZE",
            help="Several files of at most 5GB, say, and an index.",
        ),
    ] = None,
    as_json: Json = False,
    directory: RunsDirectory = RUNS,
) -> None:
    """Write the weights of a run so that load_state_dict takes them."""
    from pipectl.jobs.export import export
    from pipectl.runs import find_run

    path = output or Path("model" if shard_size else "model.safetensors")
    found = export(find_run(directory, name), path, step, shard_size)
    if as_json:
        say_json({"path": str(found.path), "step": found.step, "bytes": found.size_bytes})
    else:
        size = format_bytes(found.size_bytes)
        say(f"{short(found.path)}: {found.tensors} tensors, {size}, after step {found.step}")
