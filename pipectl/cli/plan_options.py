"""The options of `pipectl plan`, and how their values are read."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.options import above_zero, read_by
from pipectl.errors import UsageError
from pipectl.jobs.wishes import Objective, Technique
from pipectl.units import did_you_mean, parse_bytes, parse_duration

_BITS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)bit\s*")
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_MOST_NODES = 100_000


def bandwidth(text: str) -> float:
    """Bytes per second in ``1GB/s``, ``100MiB/s`` or ``10Gbit/s``.

    Raises:
        ValueError: the text is no bandwidth.
    """
    amount = text.strip().removesuffix("/s")
    bits = _BITS.fullmatch(amount)
    try:
        found = float(bits[1]) * _PREFIXES[bits[2]] / 8 if bits else float(parse_bytes(amount))
    except ValueError:
        raise ValueError(f"{text!r} is not a bandwidth; write for example 1GB/s") from None
    if not 0 < found < inf:
        raise ValueError("must be above 0, and finite")
    return found


def counts(texts: list[str] | None) -> tuple[int, ...] | None:
    """Whole numbers above 0 with commas between them: ``1,2,4``; None where none is given.

    Raises:
        UsageError: a text is something else.
    """
    if not texts:
        return None
    text = ",".join(texts)
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--nodes: {text!r} is not a list of numbers", cure="write for example 1,2,4"
        ) from None
    if not all(0 < number <= _MOST_NODES for number in found):
        raise UsageError(f"--nodes: {text!r}: each must be from 1 to {_MOST_NODES:,}")
    return found


def techniques(texts: list[str] | None) -> tuple[Technique, ...]:
    """Names with commas between them, each once.

    Raises:
        UsageError: there is none of that name.
    """
    names = [name.strip() for text in texts or () for name in text.split(",")]
    for name in names:
        if name not in tuple(Technique):
            meant = did_you_mean(name, [technique.value for technique in Technique])
            raise UsageError(
                f"--allow: there is no technique {name!r}{meant}",
                cure=f"any of: {', '.join(Technique)}",
            )
    return tuple(dict.fromkeys(map(Technique, names)))


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < inf:
        raise ValueError("must be a number above 0")
    return number


ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", help="Instead of runs/NAME.profile.json; needs no job file."),
]
OutputFile = Annotated[
    Path | None, typer.Option("-o", "--output", help="Instead of runs/NAME.plan.json.")
]
SvgFile = Annotated[Path | None, typer.Option(help="Draw the predicted step here.")]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", help="Description of the machines, cluster.json.")
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples of an optimizer step.")]
MicroBatches = Annotated[int | None, typer.Option(min=1, help="Micro-batches of a step.")]
Devices = Annotated[int | None, typer.Option(min=1, help="Use this many devices.")]
Cpus = Annotated[
    int | None, typer.Option(min=0, help="CPUs beside the devices, for max-stage-load.")
]
MemoryLimit = Annotated[
    int | None,
    typer.Option(
        parser=read_by(above_zero(parse_bytes)), metavar="SIZE", help="Of every rank: 8GiB."
    ),
]
Bandwidth = Annotated[
    float | None, typer.Option(parser=read_by(bandwidth), metavar="RATE", help="Of links: 1GB/s.")
]
CommunicationScale = Annotated[
    float | None,
    typer.Option(parser=read_by(_positive), metavar="X", help="Messages take X times as long."),
]
ObjectiveOption = Annotated[Objective, typer.Option(help="What makes a plan good.")]
PlannerName = Annotated[
    str,
    typer.Option(
        "--planner", metavar="NAME", help="dapple, pipedream, …: plan as others do, to compare."
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(parser=read_by(parse_duration), metavar="TIME", help="For each plan: 10s."),
]
NodeCounts = Annotated[
    list[str] | None,
    typer.Option("--nodes", metavar="N,N,…", help="Compare these numbers of nodes."),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="NAME,…",
        help="Let the planner choose: replicas, split, recompute, offload, pipefb, interleave.",
    ),
]
NewMicroBatches = Annotated[
    bool,
    typer.Option(
        "--new-micro-batches",
        help="Choose anew how many micro-batches there are, where the job leaves it open.",
    ),
]
Explain = Annotated[bool, typer.Option("--explain", help="Say why, and what would help.")]
