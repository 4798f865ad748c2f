"""`pipectl init`: a job to start from, made for the cluster at hand."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipectl.cli.console import note, say
from pipectl.cli.options import SchedulerName, above_zero, read_by
from pipectl.cli.refusal import refuse
from pipectl.errors import SchedulerError, UsageError
from pipectl.units import did_you_mean, format_clock, is_name, parse_bytes, parse_walltime

if TYPE_CHECKING:
    from pipectl.batch import Queue
    from pipectl.jobs.init import Code, StarterResources

LOSS = "torch.nn:CrossEntropyLoss"
_SCHEMA_FILE = "job.schema.json"
_REFERENCE = "FILE:NAME"


def command(
    directory: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(),
    model: Annotated[
        str | None,
        typer.Option(metavar=_REFERENCE, help="Your model, instead of a small example."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar=_REFERENCE, help="Its data; else FILE:training_data.")
    ] = None,
    loss: Annotated[
        str,
        typer.Option(
            metavar=_REFERENCE, help="Its loss; `model` if the model itself returns the loss."
        ),
    ] = LOSS,
    name: Annotated[str, typer.Option(help="Name of the job.")] = "starter",
    scheduler: Annotated[
        SchedulerName | None, typer.Option(help="Instead of the one that is found.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", "--queue", help="Of Slurm, or queue of PBS.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="Account the job is charged to.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes.")] = None,
    tasks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks on each node.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="Cores of each rank.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=0, help="Accelerators of each node.")
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            parser=read_by(above_zero(parse_bytes)), metavar="SIZE", help="Of each node: 16GiB."
        ),
    ] = None,
    walltime: Annotated[
        int | None,
        typer.Option(
            parser=read_by(above_zero(parse_walltime)),
            metavar="TIME",
            help="For example 1h30m; a number alone is minutes.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write a commented job for this cluster, ready to run."""
    from pipectl.jobs.init import job_text
    from pipectl.jobs.places import LOCAL, detect_scheduler, memory_of_this_machine

    if not is_name(name):
        raise UsageError(
            f"--name: {name!r} cannot name a job", cure="use letters, digits, '.', '_' and '-'"
        )
    code = _code(model, loss, data)
    targets = _targets(directory, force=force, example=code is None)
    where = scheduler.value if scheduler else detect_scheduler()
    if where == LOCAL:
        sites = {"--partition": partition, "--account": account}
        refuse(sites, "the job is for this machine", cure="name a --scheduler, slurm or pbs")
    ask = is_terminal() and not yes and where != LOCAL
    queue = _find_queue(where, partition, ask=ask)
    options = {
        "nodes": nodes, "tasks_per_node": tasks_per_node, "cpus_per_task": cpus_per_task,
        "gpus_per_node": gpus_per_node, "memory_bytes": memory, "walltime_s": walltime,
    }  # fmt: skip
    resources = _find_resources(queue, options, ask=ask)
    node_bytes = None if queue is None else queue.memory_bytes
    if where == LOCAL:
        node_bytes = memory_of_this_machine()
    text = job_text(
        name, code, resources, directory=directory, scheduler=where,
        named=where != detect_scheduler(), queue=queue, account=account,
        memory_limit=resources.rank_limit(node_bytes),
    )  # fmt: skip
    _write(targets, text)
    say(f"next: pipectl submit {targets[0]} --wait")


def _code(model: str | None, loss: str, data: str | None) -> Code | None:
    """What the user names, by default data beside the model; None for the example."""
    from pipectl.jobs.init import LOSS_OF_MODEL, Code, check_reference

    if model is None:
        own = {"--data": data, "--loss": loss != LOSS}
        refuse(own, "goes with a model of yours", cure="name it: --model FILE:NAME")
        return None
    code = Code(model, loss, data or f"{model.rpartition(':')[0]}:training_data")
    check_reference(code.model, "--model")
    check_reference(code.data, "--data")
    if loss != LOSS_OF_MODEL:
        check_reference(loss, "--loss")
    return code


def _targets(directory: Path, *, force: bool, example: bool) -> list[Path]:
    """The files to write.

    Raises:
        UsageError: one exists.
    """
    names = ("job.yaml", _SCHEMA_FILE, *(("model.py",) if example else ()))
    targets = [directory / name for name in names]
    existing = [str(path) for path in targets if path.exists()]
    if existing and not force:
        raise UsageError(
            f"{', '.join(existing)}: exists already",
            cure="choose another directory: pipectl init DIRECTORY; or replace with --force",
        )
    return targets


def _write(targets: list[Path], job: str) -> None:
    from pipectl.files import make_directory_of, write_json, write_text
    from pipectl.jobs.init import example_model
    from pipectl.spec import json_schema

    for target in targets:
        make_directory_of(target)
    for target in targets:
        if target.name == _SCHEMA_FILE:
            write_json(target, json_schema())
        else:
            write_text(target, job if target.name == "job.yaml" else example_model())
        say(f"written: {target}")


def is_terminal() -> bool:
    """Whether there is a person to ask."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _find_queue(scheduler: str, name: str | None, *, ask: bool) -> Queue | None:
    """The partition or queue to use; None if there is nothing to say of it.

    Raises:
        UsageError: there are some, but none of this name.
    """
    from pipectl.batch import Queue, get
    from pipectl.jobs.init import choose_queue

    try:
        known = get(scheduler).queues()
    except SchedulerError as error:
        note(f"limits are not known: {error.message.splitlines()[0]}")
        return None if name is None else Queue(name)
    names = [queue.name for queue in known]
    queue = choose_queue(known, name)
    if name is None and ask and len(known) > 1:
        default = queue.name if queue else names[0]
        name = typer.prompt(f"Partition or queue ({', '.join(names)})", default=default)
        queue = choose_queue(known, name)
    if name is not None and queue is None and known:
        raise UsageError(
            f"no partition or queue {name!r}{did_you_mean(name, names)}",
            cure=f"choose one of {', '.join(names)}",
        )
    return queue


def _find_resources(
    queue: Queue | None, options: Mapping[str, Any], *, ask: bool
) -> StarterResources:
    """Options as they are given, and for the rest answers, or what is proposed.

    Args:
        options: values by the fields of the resources; None if an option is absent.

    Raises:
        UsageError: more than the queue has.
    """
    from pipectl.jobs.init import describe_queue, propose_resources

    resources = propose_resources(queue, options["tasks_per_node"])
    values = {key: value for key, value in options.items() if value is not None}
    resources = replace(resources, **values)
    if ask:
        if queue is not None:
            note(describe_queue(queue))
        without_gpus = queue is not None and not queue.gpus
        answers = {}
        for key, (question, read) in _QUESTIONS.items():
            if key in values or (key == "gpus_per_node" and without_gpus):
                continue
            default = _shown(key, getattr(resources, key))
            answers[key] = typer.prompt(question, default=default, value_proc=read)
        resources = replace(resources, **answers)
    over = [] if queue is None else resources.excess(queue)
    if over and queue is not None:
        raise UsageError(f"{queue.name}: {'; '.join(over)}", cure="ask for less, or elsewhere")
    return resources


def _count(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,6}", text.strip()):
        raise typer.BadParameter("must be a whole number of at least 1")
    return int(text)


def _count_or_none(text: str) -> int:
    return 0 if text.strip() == "0" else _count(text)


def _memory(text: str) -> int | None:
    return None if text == "default" else read_by(above_zero(parse_bytes))(text)


_QUESTIONS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "nodes": ("Nodes", _count),
    "tasks_per_node": ("Ranks on each node", _count),
    "cpus_per_task": ("Cores of each rank", _count),
    "gpus_per_node": ("GPUs of each node", _count_or_none),
    "memory_bytes": ("Memory of each node", _memory),
    "walltime_s": ("Walltime", read_by(above_zero(parse_walltime))),
}


def _shown(key: str, value: int | None) -> str:
    if key == "walltime_s":
        return format_clock(value or 0)
    if key == "memory_bytes":
        return "default" if value is None else f"{value >> 20}MiB"
    return str(value)
