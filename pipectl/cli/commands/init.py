"""`pipectl init`: a job to start from, made for the cluster at hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pipectl.batch import LOCAL, Queue, find_scheduler, get_scheduler
from pipectl.cli.console import note, say
from pipectl.cli.options import (
    SchedulerName,
    count,
    flag,
    option,
    parse_whole_number,
    read_size,
    read_walltime,
    reader,
    refuse,
)
from pipectl.errors import SchedulerError, UsageError
from pipectl.files import make_directory_of, write_json, write_text
from pipectl.jobs import init as starter
from pipectl.jobs.job_files import memory_of_this_machine
from pipectl.spec import json_schema
from pipectl.units import did_you_mean, format_clock, is_name

LOSS = "torch.nn:CrossEntropyLoss"
STARTER = "starter"
_REFERENCE = "FILE:NAME"


def command(
    directory: Annotated[Path, typer.Argument(help="Directory to write it to.")] = Path(),
    model: Annotated[
        str | None, option(_REFERENCE, "Your model, instead of a small example.")
    ] = None,
    data: Annotated[
        str | None, option(_REFERENCE, "Your data; by default FILE:training_data.")
    ] = None,
    loss: Annotated[
        str, option(_REFERENCE, "Your loss; `model` if the model itself returns it.")
    ] = LOSS,
    recipe: Annotated[str | None, option("NAME", "Recipe to copy; `list` shows all.")] = None,
    name: Annotated[str, option("NAME", "Name of the job.")] = STARTER,
    scheduler: Annotated[
        SchedulerName | None, flag("Batch system; by default the installed one.")
    ] = None,
    partition: Annotated[
        str | None, option("NAME", "Slurm partition or PBS queue.", "--partition", "--queue")
    ] = None,
    account: Annotated[str | None, option("NAME", "Account to charge.")] = None,
    nodes: Annotated[int | None, count("Number of nodes.")] = None,
    tasks_per_node: Annotated[int | None, count("Ranks on each node.")] = None,
    cpus_per_task: Annotated[int | None, count("Cores of each rank.")] = None,
    gpus_per_node: Annotated[int | None, count("Accelerators of each node.", min=0)] = None,
    memory: Annotated[
        int | None, option("SIZE", "Memory of each node: 16GiB.", parser=read_size)
    ] = None,
    walltime: Annotated[
        int | None,
        option("TIME", "Time limit: 1h30m; a number alone is minutes.", parser=read_walltime),
    ] = None,
    yes: Annotated[bool, flag("Do not ask; accept all proposals.", "--yes", "-y")] = False,
    force: Annotated[bool, flag("Replace files that exist.", "--force")] = False,
) -> None:
    if recipe is not None:
        others = {
            "--model": model, "--data": data, "--loss": loss != LOSS, "--name": name != STARTER,
            "--scheduler": scheduler, "--partition": partition, "--account": account,
            "--nodes": nodes, "--tasks-per-node": tasks_per_node, "--cpus-per-task": cpus_per_task,
            "--gpus-per-node": gpus_per_node, "--memory": memory, "--walltime": walltime,
        }  # fmt: skip
        refuse(others, "has no effect with --recipe", cure="change the job file afterwards")
        copy_recipe(recipe, directory, force=force)
        return
    if not is_name(name):
        raise UsageError(
            f"--name: {name!r} cannot name a job", cure="use letters, digits, '.', '_' and '-'"
        )
    code = _code(model, loss, data)
    job, schema, example = (directory / n for n in ("job.yaml", "job.schema.json", "model.py"))
    targets = [job, schema, *([example] if code is None else [])]
    check_new(targets, force=force)
    where = scheduler.value if scheduler else find_scheduler()
    if where == LOCAL:
        sites = {"--partition": partition, "--account": account}
        refuse(sites, "the job is for this machine", cure="name a --scheduler, slurm or pbs")
    ask = is_terminal() and not yes and where != LOCAL
    queue = _find_queue(where, partition, ask=ask)
    options = {
        "nodes": nodes, "tasks_per_node": tasks_per_node, "cpus_per_task": cpus_per_task,
        "gpus_per_node": gpus_per_node, "memory_bytes": memory, "walltime_s": walltime,
    }  # fmt: skip
    values = {key: value for key, value in options.items() if value is not None}
    resources = _find_resources(queue, values, ask=ask)
    node_bytes = None if queue is None else queue.memory_bytes
    if where == LOCAL:
        node_bytes = memory_of_this_machine()
    text = starter.job_text(
        name, code, resources, directory=directory, scheduler=where,
        named=where != find_scheduler(), queue=queue, account=account,
        memory_limit=resources.rank_limit(node_bytes),
    )  # fmt: skip
    for target in targets:
        make_directory_of(target)
    write_text(job, text)
    write_json(schema, json_schema())
    if code is None:
        write_text(example, starter.example_model())
    for target in targets:
        say(f"written: {target}")
    say(f"next: pipectl submit {job} --wait")


def check_new(targets: list[Path], *, force: bool) -> None:
    """Raise UsageError if files exist that may not be replaced."""
    existing = [str(path) for path in targets if path.exists()]
    if existing and not force:
        raise UsageError(
            f"{', '.join(existing)}: exists already",
            cure="choose another directory: pipectl init DIRECTORY; or replace with --force",
        )


def copy_recipe(name: str, directory: Path, *, force: bool) -> None:
    """Write a recipe's job, its code and the schema into a directory; `list` prints all names."""
    jobs = starter.recipes()
    if name == "list":
        say("\n".join(jobs))
        return
    if name not in jobs:
        raise UsageError(
            f"no recipe {name!r}{did_you_mean(name, list(jobs))}",
            cure=f"choose one of {', '.join(jobs)}",
        )
    job = jobs[name]
    copies = {directory / path.relative_to(job.parent): path for path in starter.recipe_files(job)}
    schema = directory / "job.schema.json"
    check_new([*copies, schema], force=force)
    for target, source in copies.items():
        make_directory_of(target)
        write_text(target, source.read_text("utf-8"))
    write_json(schema, json_schema())
    for target in (*copies, schema):
        say(f"written: {target}")
    say(f"next: pipectl check {directory / job.name}")


def _code(model: str | None, loss: str, data: str | None) -> starter.Code | None:
    """What the user names, by default data beside the model; None for the example."""
    if model is None:
        own = {"--data": data, "--loss": loss != LOSS}
        refuse(own, "needs --model")
        return None
    code = starter.Code(model, loss, data or f"{model.rpartition(':')[0]}:training_data")
    starter.check_reference(code.model, "--model")
    starter.check_reference(code.data, "--data")
    if loss != starter.LOSS_OF_MODEL:
        starter.check_reference(loss, "--loss")
    return code


def is_terminal() -> bool:
    """Whether there is a person to ask."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _find_queue(scheduler: str, name: str | None, *, ask: bool) -> Queue | None:
    """The partition or queue to use; None if there is nothing to say of it.

    Raises:
        UsageError: there are some, but none of this name.
    """
    try:
        queues = get_scheduler(scheduler).queues()
    except SchedulerError as error:
        note(f"limits of queues are not known: {error.message.splitlines()[0]}")
        return None if name is None else Queue(name)
    names = [queue.name for queue in queues]
    queue = starter.choose_queue(queues, name)
    if name is None and ask and len(queues) > 1:
        default = queue.name if queue else names[0]
        name = typer.prompt(f"Partition or queue ({', '.join(names)})", default=default)
        queue = starter.choose_queue(queues, name)
    if name is not None and queue is None and queues:
        raise UsageError(
            f"no partition or queue {name!r}{did_you_mean(name, names)}",
            cure=f"choose one of {', '.join(names)}",
        )
    return queue


def _find_resources(
    queue: Queue | None, values: dict[str, Any], *, ask: bool
) -> starter.StarterResources:
    """What options say, and for the rest answers, or what is proposed.

    Args:
        values: of options, by the fields of the resources.

    Raises:
        UsageError: more than the queue has.
    """
    resources = replace(starter.propose_resources(queue, values.get("tasks_per_node")), **values)
    if ask:
        if queue is not None:
            note(starter.describe_queue(queue))
        answers = {}
        for key, (question, read, show) in _QUESTIONS.items():
            without_gpus = key == "gpus_per_node" and queue is not None and not queue.gpus
            if key not in values and not without_gpus:
                default = show(getattr(resources, key))
                answers[key] = typer.prompt(question, default=default, value_proc=read)
        resources = replace(resources, **answers)
    excess = [] if queue is None else resources.excess(queue)
    if excess and queue is not None:
        raise UsageError(f"{queue.name}: {'; '.join(excess)}", cure="ask for less, or elsewhere")
    return resources


_QUESTIONS: dict[str, tuple[str, Callable[[str], Any], Callable[[Any], str]]] = {
    "nodes": ("Nodes", reader(parse_whole_number), str),
    "tasks_per_node": ("Ranks on each node", reader(parse_whole_number), str),
    "cpus_per_task": ("Cores of each rank", reader(parse_whole_number), str),
    "gpus_per_node": ("GPUs of each node", reader(parse_whole_number, zero=True), str),
    "memory_bytes": (
        "Memory of each node",
        lambda text: None if text == "default" else read_size(text),
        lambda size: "default" if size is None else f"{size >> 20}MiB",
    ),
    "walltime_s": ("Walltime", read_walltime, format_clock),
}
"""By field of the resources: the question, how to read its answer, and how to show a value."""
