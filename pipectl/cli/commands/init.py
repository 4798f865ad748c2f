"""`pipectl init`: write a job to start from, for this cluster."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer

from pipectl.batch import (
    LOCAL,
    QUEUES_TIMEOUT_S,
    Queue,
    find_scheduler,
    get_scheduler,
    scheduler_class,
)
from pipectl.batch.limits import Demand, find_misfit
from pipectl.cli import options as opt
from pipectl.cli.console import note, say
from pipectl.errors import SchedulerError, SpecError, UsageError
from pipectl.files import make_directory_of, write_json, write_text
from pipectl.jobs.prepare import memory_of_this_machine
from pipectl.spec import SpecFile
from pipectl.spec.launch import Resources
from pipectl.spec.references import fault_of, parse
from pipectl.spec.schema import json_schema
from pipectl.units import did_you_mean, format_bytes, format_clock, is_name
from pipectl.versions import installed_version

LOSS = "torch.nn:CrossEntropyLoss"
LOSS_OF_MODEL = "model"
STARTER = "starter"
_REFERENCE = "FILE:NAME"
_SCHEMA = "job.schema.json"
_RANKS = 2
_RANK_BYTES = 2 * 2**30
_WALLTIME_S = 600
_OF_NODE = 0.9
"""Share of a node's memory that jobs request: the system needs the rest."""
_OF_SHARE = 0.9
"""Share of a rank's memory that a plan uses: the C library keeps some freed memory."""
_HELD_OUT = (
    r"held_out(_data|_set|_dataset)?",
    r"val(id|idation)?(_data|_set|_dataset)?",
    r"(eval|evaluation|dev|test)_(data|set|dataset)",
)
"""Names of functions that return evaluation data, as far as `init` knows them, the best first."""
_KEYS_OF_OPTIONS = {
    "--model": "model",
    "--data": "data",
    "--loss": "loss",
    "--name": "name",
    "--scheduler": "launch.scheduler",
    "--partition": "slurm.partition (or pbs.queue)",
    "--queue": "pbs.queue (or slurm.partition)",
    "--account": "slurm.account (or pbs.account)",
    "--nodes": "resources.nodes",
    "--tasks-per-node": "resources.tasks_per_node",
    "--cpus-per-task": "resources.cpus_per_task",
    "--gpus-per-node": "resources.gpus_per_node",
    "--memory": "resources.memory_per_node",
    "--walltime": "resources.walltime",
}
"""Keys of the job that say what the options say."""
_QUESTIONS: dict[str, tuple[str, Callable[[str], Any], Callable[[Any], str]]] = {
    "nodes": ("Nodes", opt.reader(opt.parse_whole_number), str),
    "tasks_per_node": ("Ranks on each node", opt.reader(opt.parse_whole_number), str),
    "cpus_per_task": ("Cores of each rank", opt.reader(opt.parse_whole_number), str),
    "gpus_per_node": ("GPUs of each node", opt.reader(opt.parse_whole_number, zero=True), str),
    "memory_per_node": (
        "Memory of each node",
        lambda text: None if text == "default" else opt.read_memory(text),
        lambda size: "default" if size is None else f"{size >> 20}MiB",
    ),
    "walltime": ("Walltime", opt.read_walltime, format_clock),
}
"""Question, parser of the answer, and format of a value, by key of the resources."""


def command(
    context: typer.Context,
    directory: Path = typer.Argument(Path(), metavar="DIRECTORY", help="Directory to write it to."),
    model: str | None = opt.value(_REFERENCE, "Your model, instead of a small example."),
    data: str | None = opt.value(_REFERENCE, "Your data; by default FILE:training_data."),
    loss: str = opt.value(
        _REFERENCE, "Your loss; `model` if the model itself returns it.", default=LOSS
    ),
    recipe: str | None = opt.value("NAME", "Recipe to copy; `list` shows all."),
    name: str = opt.value("NAME", "Name of the job.", default=STARTER),
    scheduler: str | None = opt.value(
        "NAME",
        "Batch system; by default the installed one.",
        autocompletion=opt.names_of_schedulers,
    ),
    partition: str | None = opt.value(
        "NAME", "Slurm partition or PBS queue.", "--partition", "--queue"
    ),
    account: str | None = opt.value("NAME", "Account to charge."),
    nodes: int | None = opt.count("Number of nodes."),
    tasks_per_node: int | None = opt.count("Ranks on each node."),
    cpus_per_task: int | None = opt.count("Cores of each rank."),
    gpus_per_node: int | None = opt.count("Accelerators of each node.", min=0),
    memory: int | None = opt.value("SIZE", "Memory of each node: 16GiB.", parser=opt.read_memory),
    walltime: int | None = opt.value(
        "TIME", "Time limit: 1h30m; a number alone is minutes.", parser=opt.read_walltime
    ),
    yes: bool = opt.flag("Do not ask; accept all proposals.", "--yes", "-y"),
    force: bool = opt.flag("Replace files that exist.", "--force"),
) -> None:
    if recipe is not None:
        for option, key in _KEYS_OF_OPTIONS.items():
            opt.refuse(
                context,
                option,
                "has no effect with --recipe",
                cure=f"write the recipe without it, then set {key} in its job file",
            )
        _copy_recipe(recipe, directory, force=force)
        return
    if not is_name(name):
        raise UsageError(
            f"--name: {name!r} cannot name a job", cure="use letters, digits, '.', '_' and '-'"
        )
    if model is None:
        opt.refuse(context, "--data --loss", "needs --model")
    code = None if model is None else _read_code(model, loss, data, directory)
    job, schema, example = (directory / n for n in ("job.yaml", _SCHEMA, "model.py"))
    targets = [job, schema, *([example] if code is None else [])]
    _check_new(targets, force=force)
    installed = find_scheduler()
    batch_system = scheduler or installed
    queue_key = scheduler_class(batch_system).queue_key
    if not queue_key:
        why, cure = f"is not used with {batch_system}", "add --scheduler slurm or --scheduler pbs"
        opt.refuse(context, "--partition --account", why, cure=cure)
    ask = is_terminal() and not yes and batch_system != LOCAL
    queues: Sequence[Queue] = ()
    reachable = True
    try:
        queues = get_scheduler(batch_system, QUEUES_TIMEOUT_S).queues()
    except SchedulerError as error:
        reachable = False
        note(
            f"the limits of queues are unknown: {error.message.splitlines()[0]}\n"
            "for a job on this machine, add --scheduler local"
        )
    queue = _choose_queue(queues, partition, ask=ask)
    options = {
        "nodes": nodes, "tasks_per_node": tasks_per_node, "cpus_per_task": cpus_per_task,
        "gpus_per_node": gpus_per_node, "memory_per_node": memory, "walltime": walltime,
    }  # fmt: skip
    values = {key: value for key, value in options.items() if value is not None}
    resources = _choose_resources(queue, values, ask=ask)
    node_bytes = memory_of_this_machine() if batch_system == LOCAL else queue.memory_bytes
    share = resources.memory_per_rank(node_bytes)
    site = {queue_key: queue.name, "account": account} if queue_key else {}
    text = _render_job(
        name=name,
        code=code,
        resources=resources,
        scheduler=batch_system,
        named=batch_system != installed,
        queue=queue,
        account=account,
        site={key: value for key, value in site.items() if value},
        memory_limit=share and int(share * _OF_SHARE),
    )
    starter = {} if code is not None else {example: _starter_file("model.py.txt")}
    _write_files({job: text, schema: json_schema(), **starter})
    elsewhere = "" if reachable or scheduler is not None else " --scheduler local"
    _say_next(job, f"pipectl submit {job} --wait{elsewhere}")


def _say_next(job: Path, command: str) -> None:
    """Print the next command, or what to correct before if the job has mistakes."""
    try:
        SpecFile.read(job).spec(check_names=True)
    except SpecError as error:
        note(error.message)
        command = f"correct this, then pipectl check {job}"
    say(f"next: {command}")


def is_terminal() -> bool:
    """Whether standard input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _write_files(contents: Mapping[Path, str | dict[str, Any]]) -> None:
    """Write texts and JSON objects; if a directory cannot be made, nothing is written."""
    for path in contents:
        make_directory_of(path, private=False)
    for path, content in contents.items():
        if isinstance(content, str):
            write_text(path, content)
        else:
            write_json(path, content)
        say(f"written: {path}")


def _check_new(targets: Iterable[Path], *, force: bool) -> None:
    """Raise UsageError if files exist that may not be replaced."""
    existing = [str(path) for path in targets if path.exists()]
    if existing and not force:
        raise UsageError(
            f"{', '.join(existing)}: already exists",
            cure="choose another directory: pipectl init DIRECTORY; or replace with --force",
        )


def _copy_recipe(name: str, directory: Path, *, force: bool) -> None:
    """Write a recipe's job, its code and the schema into a directory; `list` prints all names."""
    package = Path(str(files("pipectl")))  # a wheel holds them; in a checkout they stand beside it
    folder = package / "recipes" if (package / "recipes").is_dir() else package.parent / "configs"
    jobs = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if name == "list":
        for job, path in jobs.items():
            comment = " ".join(
                re.findall(r"^# ([A-Z].*)", path.read_text("utf-8"), re.MULTILINE)[:3]
            )
            say(f"{job:<16}" + re.split(r"[.:]( |$)| \(|, ", comment)[0])
        return
    if name not in jobs:
        raise UsageError(
            f"no recipe {name!r}{did_you_mean(name, list(jobs))}",
            cure=f"choose one of {', '.join(jobs)}",
        )
    text = jobs[name].read_text("utf-8")
    code = dict.fromkeys(re.findall(r"\./(models/\w+\.py):", text))
    copies = {directory / file: folder / file for file in (f"{name}.yaml", *code)}
    texts = {target: source.read_text("utf-8") for target, source in copies.items()}
    contents = {**texts, directory / _SCHEMA: json_schema()}
    _check_new(contents, force=force)
    _write_files(contents)
    say(f"next: pipectl check {directory / f'{name}.yaml'}")


def _read_code(model: str, loss: str, data: str | None, directory: Path) -> dict[str, object]:
    """References to the user's code from the job's directory, by key of the job.

    By default the training data are in the file of the model, and the evaluation data in the file
    of the training data; ``has_held_out`` says whether it has any.
    """
    data = data or f"{model.rpartition(':')[0]}:training_data"
    named = {"model": model, "data": data}
    if loss != LOSS_OF_MODEL:
        named["loss"] = loss
    for key, text in named.items():
        file = None if (fault := fault_of(text)) else parse(text, Path()).file
        if file is not None and not file.is_file():
            fault = f"no such file: {file}"
        if fault:
            raise UsageError(f"--{key}: {fault}", cure=f"for example --{key} model.py:build")
    source = parse(data, Path()).source
    try:
        tree = ast.parse(b"" if source is None else source.read_bytes())
    except (OSError, SyntaxError, ValueError):  # loading it says what is wrong
        tree = ast.Module([], [])
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    named_so = (name for each in _HELD_OUT for name in functions if re.fullmatch(each, name))
    held_out = next(named_so, None)
    named["held_out"] = f"{data.rpartition(':')[0]}:{held_out or 'held_out_data'}"
    seen = {key: _seen_from(directory, text) for key, text in named.items()}
    return {"loss": LOSS_OF_MODEL, **seen, "has_held_out": held_out is not None}


def _seen_from(directory: Path, text: str) -> str:
    """A reference as written in a job in this directory."""
    reference = parse(text, Path())
    place = reference.file or reference.root
    if place is None or parse(reference.portable, directory) == reference:
        return reference.portable
    path = os.path.relpath(place, directory.resolve())
    path = path if path.startswith("..") else f"./{path}"
    return f"{path if reference.file else f'{path}/{reference.module}'}:{reference.attribute}"


def _choose_queue(queues: Sequence[Queue], name: str | None, *, ask: bool) -> Queue:
    """The partition or queue with the name, else the default one if it is open, else the first open
    one; without a name if no queue is known."""
    by_name = {queue.name: queue for queue in queues}
    ready = [queue for queue in queues if queue.open]
    queue = next((queue for queue in ready if queue.default), ready[0] if ready else Queue(""))
    if name is None and ask and len(queues) > 1:
        default = queue.name or queues[0].name
        name = typer.prompt(f"Partition or queue ({', '.join(by_name)})", default=default)
    if name is None:
        return queue
    if queues and name not in by_name:
        raise UsageError(
            f"no partition or queue {name!r}{did_you_mean(name, by_name)}",
            cure=f"choose one of {', '.join(by_name)}",
        )
    return by_name.get(name, Queue(name))


def _choose_resources(queue: Queue, values: dict[str, Any], *, ask: bool) -> Resources:
    """Resources from options, answers and proposals, within the limits of the queue.

    Two ranks with one core each are proposed, with an accelerator if the nodes have some that the
    installed torch can use.

    Args:
        values: values of options, by key of the resources.
    """
    tasks = values.get("tasks_per_node")
    torch = installed_version("torch") or ""
    gpus = 0 if torch.endswith("+cpu") else queue.gpus
    if gpus < queue.gpus and "gpus_per_node" not in values:
        note(
            f"nodes of {queue.name} have GPUs, but torch {torch} computes on CPUs only: to use "
            "them, install a build of PyTorch for GPUs, or say --gpus-per-node N"
        )
    tasks = tasks or min(_RANKS, queue.cores or _RANKS, gpus or _RANKS)
    proposal: dict[str, Any] = {
        "nodes": max(min(-(-_RANKS // tasks), queue.nodes or 1), queue.min_nodes),
        "tasks_per_node": tasks,
        "gpus_per_node": min(tasks, gpus),
        "walltime": min(_WALLTIME_S, queue.walltime_s or _WALLTIME_S),
    }
    if queue.memory_bytes is not None:
        usable = int(queue.memory_bytes * _OF_NODE)
        of_cores = usable * tasks // queue.cores if queue.cores else 0
        proposal["memory_per_node"] = min(max(tasks * _RANK_BYTES, of_cores), usable)
    resources = Resources().model_copy(update={**proposal, **values})
    if ask:
        if queue.name:
            note(_describe_queue(queue))
        answers = {}
        for key, (question, read, show) in _QUESTIONS.items():
            without_gpus = key == "gpus_per_node" and queue.name and not queue.gpus
            if key not in values and not without_gpus:
                default = show(getattr(resources, key))
                answers[key] = typer.prompt(question, default=default, value_proc=read)
        resources = resources.model_copy(update=answers)
    cores = resources.tasks_per_node * resources.cpus_per_task
    demand = Demand(resources.nodes, resources.walltime, cores, resources.memory_per_node)
    if queue.gpus:  # else they may have another name
        demand = demand._replace(gpus=resources.gpus_per_node)
    if (misfit := find_misfit(queue, demand)) is not None:
        raise UsageError(misfit.fault, cure=f"{misfit.cure}, or choose another partition or queue")
    return resources


def _describe_queue(queue: Queue) -> str:
    """``debug: 4 nodes, each with at least 8 cores, 15.6 GiB; jobs of at most 00:30:00``."""
    each = [
        f"{queue.cores} cores" if queue.cores else "",
        "" if queue.memory_bytes is None else format_bytes(queue.memory_bytes),
        f"{queue.gpus} GPUs (gpus_per_node)" if queue.gpus else "",
    ]
    nodes = f"{queue.nodes} nodes" if queue.nodes else ""
    if per_node := ", ".join(filter(None, each)):
        nodes = f"{nodes or 'nodes'}, each with at least {per_node}"
    limit = "" if queue.walltime_s is None else f"jobs of at most {format_clock(queue.walltime_s)}"
    limits = "; ".join(filter(None, (nodes, limit)))
    return f"{queue.name}: {limits}" if limits else queue.name


def _starter_file(name: str) -> str:
    return (files("pipectl.cli") / "starter" / name).read_text("utf-8")


def _render_job(**values: object) -> str:
    """Render the job file from the template."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, trim_blocks=True, autoescape=False)
    environment.filters |= {
        "yaml": json.dumps,  # a text, whatever it holds
        "size": _size,
        "clock": format_clock,
        "describe": _describe_queue,
    }
    return environment.from_string(_starter_file("job.yaml.j2")).render(values)


def _size(size_bytes: int) -> str:
    """A size in few digits, rounded down."""
    if size_bytes >= 4 << 30:
        return f"{(size_bytes * 10 >> 30) / 10:g}GiB"
    return f"{size_bytes >> 20}MiB" if size_bytes >> 20 else f"{size_bytes}B"
