"""The options of `pipectl init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.options import SchedulerName, above_zero, read_by
from pipectl.units import parse_bytes, parse_walltime

LOSS = "torch.nn:CrossEntropyLoss"
Directory = Annotated[Path, typer.Argument(help="Where to write it.")]
Model = Annotated[
    str | None,
    typer.Option(metavar="FILE:NAME", help="Your model, instead of a small example."),
]
Data = Annotated[
    str | None, typer.Option(metavar="FILE:NAME", help="Its data; else FILE:training_data.")
]
Loss = Annotated[
    str,
    typer.Option(
        metavar="FILE:NAME", help="Its loss; `model` if the model itself returns the loss."
    ),
]
Name = Annotated[str, typer.Option(help="Name of the job.")]
Scheduler = Annotated[SchedulerName | None, typer.Option(help="Instead of the one that is found.")]
Partition = Annotated[
    str | None, typer.Option("--partition", "--queue", help="Of Slurm, or queue of PBS.")
]
Account = Annotated[str | None, typer.Option(help="Account the job is charged to.")]
Nodes = Annotated[int | None, typer.Option(min=1, help="How many.")]
Tasks = Annotated[int | None, typer.Option(min=1, help="Ranks on each node.")]
Cpus = Annotated[int | None, typer.Option(min=1, help="Cores of each rank.")]
Gpus = Annotated[int | None, typer.Option(min=0, help="Accelerators of each node.")]
Memory = Annotated[
    int | None,
    typer.Option(
        parser=read_by(above_zero(parse_bytes)), metavar="SIZE", help="Of each node: 16GiB."
    ),
]
Walltime = Annotated[
    int | None,
    typer.Option(
        parser=read_by(above_zero(parse_walltime)),
        metavar="TIME",
        help="For example 1h30m; a number alone is minutes.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
