"""`pipectl init`: write a job to start from, for this cluster."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
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
from pipectl.cli import options as opt
from pipectl.cli.console import note, say
from pipectl.cli.from_script import take_script, try_script
from pipectl.control_groups import memory_of_machine
from pipectl.errors import SchedulerError, SpecError, UsageError
from pipectl.files import make_directory_of, write_json, write_text
from pipectl.spec import SpecFile
from pipectl.spec.launch import Resources
from pipectl.spec.references import fault_of, parse
from pipectl.spec.schema import json_schema
from pipectl.units import did_you_mean, format_bytes, format_clock, is_name
from pipectl.versions import installed_version

LOSS = "torch.nn:CrossEntropyLoss"
LOSS_OF_MODEL = "model"
_STARTER, _JOB = "starter", "job"
"""Names of the example, and of a job whose model is in a file of another kind of name."""
_USUAL = frozenset({"", "..", "job", "jobs", "pipectl", "run", "runs"})
"""Names of directories that say nothing of a job."""
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
_NOT_OF_RECIPES = {
    "--script ARGUMENTS": "choose one: a recipe, or a job of your script",
    "--model --data --loss": "edit the job file that the recipe becomes",
    "--scheduler": "submit the job with --scheduler",
    "--partition": "submit the job with --partition",
}


def command(
    context: typer.Context,
    directory: Path = typer.Argument(Path(), metavar="DIRECTORY", help="Directory to write it to."),
    arguments: list[str] | None = typer.Argument(
        None, metavar="ARGUMENTS", help="Of the script of --script, after `--`.", show_default=False
    ),
    model: str | None = opt.value(_REFERENCE, "Your model, instead of a small example."),
    data: str | None = opt.value(_REFERENCE, "Your data; by default FILE:training_data."),
    loss: str = opt.value(
        _REFERENCE, "Your loss; `model` if the model itself returns it.", default=LOSS
    ),
    script: Path | None = opt.value(
        "FILE", "Your training script, unchanged; its arguments follow after `--`."
    ),
    recipe: str | None = opt.value("NAME", "Recipe to copy; `list` shows all."),
    scheduler: str | None = opt.value(
        "NAME",
        "Batch system; by default the installed one.",
        autocompletion=opt.names_of_schedulers,
    ),
    partition: str | None = opt.value(
        "NAME", "Slurm partition or PBS queue.", "--partition", "--queue"
    ),
    force: bool = opt.flag("Replace files that exist.", "--force"),
) -> None:
    if recipe is not None:
        for option, hint in _NOT_OF_RECIPES.items():
            opt.refuse(context, option, "has no effect with --recipe", hint=hint)
        _copy_recipe(recipe, directory, force=force)
        return
    if script is not None:
        hint = "override sections of the script's job in its job file"
        opt.refuse(context, "--model --data --loss", "has no effect with --script", hint=hint)
    elif model is None:
        opt.refuse(context, "--data --loss", "needs --model")
    _check_arguments(directory, arguments or [], script)
    code = None if model is None else _read_code(model, loss, data, directory)
    job, schema, example = (directory / n for n in ("job.yaml", _SCHEMA, "model.py"))
    is_example = code is None and script is None
    _check_new([job, schema, *([example] if is_example else [])], arguments, force=force)
    taken = None if script is None else take_script(script, arguments or [], directory)
    installed = find_scheduler()
    batch_system = scheduler or installed
    queue_key = scheduler_class(batch_system).queue_key
    if not queue_key:
        why, hint = f"is not used with {batch_system}", "add --scheduler slurm or --scheduler pbs"
        opt.refuse(context, "--partition", why, hint=hint)
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
    queue = _choose_queue(queues, partition)
    resources = _propose_resources(queue)
    node_bytes = memory_of_machine() if batch_system == LOCAL else queue.memory_bytes
    share = resources.memory_per_rank(node_bytes)
    text = _render_job(
        name=_name_of_job(model if script is None else f"{script}:", directory),
        code=code,
        script=taken and taken.values,
        is_example=is_example,
        resources=resources,
        scheduler=batch_system,
        named=batch_system != installed,
        queue=queue,
        site={queue_key: queue.name} if queue_key and queue.name else {},
        memory_limit=share and int(share * _OF_SHARE),
    )
    starter = {example: _starter_file("model.py.txt")} if is_example else {}
    _write_files({job: text, schema: json_schema(), **starter})
    if taken is not None:
        try_script(taken, job)
    elsewhere = "" if reachable or scheduler is not None else " --scheduler local"
    _say_next(job, f"pipectl submit {job} --wait{elsewhere}")


def _check_arguments(directory: Path, arguments: Sequence[str], script: Path | None) -> None:
    """Refuse arguments that belong to nothing, or that would name the directory."""
    if script is not None and str(directory).startswith("-"):
        raise UsageError(
            f"{directory}: is no directory to write the job to",
            hint=f"name it first: pipectl init DIRECTORY --script {script} -- {directory} ...",
        )
    if script is None and arguments:
        raise UsageError(
            f"{arguments[0]}: unexpected argument", hint="arguments of a script need --script FILE"
        )
    if script is not None and not script.is_file():
        raise UsageError(f"--script: no such file: {script}", hint="name your training script")


def _say_next(job: Path, command: str) -> None:
    """Print the next command, or what to correct before if the job has mistakes."""
    try:
        SpecFile.read(job).spec(check_names=True)
    except SpecError as error:
        note(error.message)
        command = f"correct this, then pipectl check {job}"
    say(f"next: {command}")


def _name_of_job(model: str | None, directory: Path) -> str:
    """The name of the job's directory, or of the module or the file that defines the model, if that
    of the directory says nothing: files of a job's plan and profile are called so.
    """
    if model is None:
        return _STARTER
    if directory.name not in _USUAL and is_name(directory.name):
        return directory.name
    path, _, _ = model.rpartition(":")
    name = Path(path).stem if path.endswith(".py") else path.rpartition(".")[2]
    return name if is_name(name) else _JOB


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


def _check_new(
    targets: Sequence[Path], arguments: Sequence[str] | None = None, *, force: bool
) -> None:
    """Raise UsageError if files exist that may not be replaced.

    Args:
        targets: a job file first.
        arguments: of the script of the job.
    """
    existing = [str(path) for path in targets if path.exists()]
    if existing and not force:
        hint = "choose another directory: pipectl init DIRECTORY; or replace with --force"
        if arguments:
            hint += "\nto run it with these arguments, and the steps and batches that it has: "
            hint += f"pipectl submit {shlex.join([str(targets[0]), '--', *arguments])}"
        raise UsageError(f"{', '.join(existing)}: already exists", hint=hint)


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
            hint=f"choose one of {', '.join(jobs)}",
        )
    text = jobs[name].read_text("utf-8")
    code = dict.fromkeys(re.findall(r"\./(models/\w+\.py):", text))
    copies = {directory / file: folder / file for file in (f"{name}.yaml", *code)}
    texts = {target: source.read_text("utf-8") for target, source in copies.items()}
    contents = {**texts, directory / _SCHEMA: json_schema()}
    _check_new([*contents], force=force)
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
            raise UsageError(f"--{key}: {fault}", hint=f"for example --{key} model.py:build")
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


def _choose_queue(queues: Sequence[Queue], name: str | None) -> Queue:
    """The partition or queue with the name, else the default one if this user can run jobs there,
    else the first where he can; without a name if no queue is known."""
    by_name = {queue.name: queue for queue in queues}
    ready = [queue for queue in queues if queue.is_usable]
    queue = next((queue for queue in ready if queue.default), ready[0] if ready else Queue(""))
    if name is None:
        return queue
    if queues and name not in by_name:
        raise UsageError(
            f"no partition or queue {name!r}{did_you_mean(name, by_name)}",
            hint=f"choose one of {', '.join(by_name)}",
        )
    return by_name.get(name, Queue(name))


def _propose_resources(queue: Queue) -> Resources:
    """Resources within the limits of the queue: two ranks with one core each, with an accelerator
    if the nodes have some that the installed torch can use."""
    torch = installed_version("torch") or ""
    gpus = 0 if torch.endswith("+cpu") else queue.gpus
    if gpus < queue.gpus:
        note(
            f"nodes of {queue.name} have GPUs, but torch {torch} computes on CPUs only: to use "
            "them, install a build of PyTorch for GPUs, or set resources.gpus_per_node"
        )
    tasks = min(_RANKS, queue.cores or _RANKS, gpus or _RANKS)
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
    return Resources().model_copy(update=proposal)


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
