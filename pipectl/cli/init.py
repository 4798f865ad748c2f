"""`pipectl init`: a job to start from, made for the cluster at hand."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.console import say
from pipectl.cli.options import SchedulerName
from pipectl.errors import UsageError
from pipectl.files import make_directory, write_text

_Count = Annotated[int | None, typer.Option(min=1)]


def command(
    directory: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(),
    model: Annotated[
        str | None,
        typer.Option(metavar="FILE:NAME", help="Your model, instead of a small example."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE:NAME", help="Its data; else FILE:training_data.")
    ] = None,
    loss: Annotated[str, typer.Option(metavar="FILE:NAME", help="Its loss.")] = (
        "torch.nn:CrossEntropyLoss"
    ),
    name: Annotated[str, typer.Option(help="Name of the job.")] = "starter",
    scheduler: Annotated[
        SchedulerName | None, typer.Option(help="Instead of the one that is found.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", "--queue", help="Of Slurm, or queue of PBS.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="Account the job is charged to.")] = None,
    nodes: _Count = None,
    tasks_per_node: _Count = None,
    cpus_per_task: _Count = None,
    gpus_per_node: _Count = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of each node.")] = None,
    walltime: Annotated[str | None, typer.Option(metavar="TIME")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write a commented job for this cluster, ready to run."""
    from pipectl.cli import init_ask
    from pipectl.cli.init_spec import Code, reference_fault, spec_text
    from pipectl.jobs.places import LOCAL, detected
    from pipectl.units import is_name

    if not is_name(name):
        raise UsageError(f"--name: {name!r} cannot name a job", cure="letters, digits, '.', '_'")
    code = None
    if model is not None:
        code = Code(model, loss, data or f"{model.rpartition(':')[0]}:training_data")
        for option, text in (("--model", code.model), ("--data", code.data), ("--loss", loss)):
            reference_fault(text, option)
    targets = _targets(directory, force=force, example=code is None)
    where = scheduler.value if scheduler else detected()
    ask = init_ask.is_terminal() and not yes and where != LOCAL
    queue = init_ask.find_queue(where, partition, ask=ask)
    given = {
        "nodes": nodes, "tasks_per_node": tasks_per_node, "cpus_per_task": cpus_per_task,
        "gpus_per_node": gpus_per_node, "memory_bytes": memory and init_ask.size(memory),
        "walltime_s": walltime and init_ask.duration(walltime),
    }  # fmt: skip
    resources = init_ask.find_resources(queue, given, ask=ask)
    text = spec_text(
        name, code, resources, directory=directory, scheduler=where, queue=queue, account=account,
        named=where != detected(),
    )  # fmt: skip
    make_directory(directory)
    for target in targets:
        example = (files("pipectl.cli") / "starter" / "model.py.txt").read_text("utf-8")
        write_text(target, text if target.name == "job.yaml" else example)
        say(f"written: {target}")
    say(f"next: pipectl submit {targets[0]} --wait")


def _targets(directory: Path, *, force: bool, example: bool) -> list[Path]:
    """The files to write; refused where one exists."""
    targets = [directory / name for name in ("job.yaml", "model.py")[: 2 if example else 1]]
    existing = [str(path) for path in targets if path.exists()]
    if existing and not force:
        raise UsageError(
            f"{', '.join(existing)}: exists already",
            cure="choose another directory: pipectl init DIRECTORY; or replace with --force",
        )
    return targets
