"""`pipectl init`: a job to start from, made for the cluster at hand."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.cli import init_options as given
from pipectl.cli.console import say
from pipectl.cli.refusal import refuse
from pipectl.errors import UsageError
from pipectl.files import make_directory_of, write_json, write_text
from pipectl.units import is_name

if TYPE_CHECKING:
    from pipectl.cli.init_spec import Code

_NAME = "use letters, digits, '.', '_' and '-'"
SCHEMA_FILE = "job.schema.json"


def command(
    directory: given.Directory = Path(),
    model: given.Model = None,
    data: given.Data = None,
    loss: given.Loss = given.LOSS,
    name: given.Name = "starter",
    scheduler: given.Scheduler = None,
    partition: given.Partition = None,
    account: given.Account = None,
    nodes: given.Nodes = None,
    tasks_per_node: given.Tasks = None,
    cpus_per_task: given.Cpus = None,
    gpus_per_node: given.Gpus = None,
    memory: given.Memory = None,
    walltime: given.Walltime = None,
    yes: given.Yes = False,
    force: given.Force = False,
) -> None:
    """Write a commented job for this cluster, ready to run."""
    from pipectl.cli import init_ask
    from pipectl.cli.init_spec import spec_text
    from pipectl.jobs.places import LOCAL, detected
    from pipectl.jobs.starting import memory_of_this_machine, rank_limit

    _check_name(name)
    code = _code(model, loss, data)
    targets = _targets(directory, force=force, example=code is None)
    where = scheduler.value if scheduler else detected()
    _check_site(where, partition, account)
    ask = init_ask.is_terminal() and not yes and where != LOCAL
    queue = init_ask.find_queue(where, partition, ask=ask)
    asked = {
        "nodes": nodes, "tasks_per_node": tasks_per_node, "cpus_per_task": cpus_per_task,
        "gpus_per_node": gpus_per_node, "memory_bytes": memory, "walltime_s": walltime,
    }  # fmt: skip
    resources = init_ask.find_resources(queue, asked, ask=ask)
    node_bytes = None if queue is None else queue.memory_bytes
    if where == LOCAL:
        node_bytes = memory_of_this_machine()
    _write(targets, spec_text(
        name, code, resources, directory=directory, scheduler=where, queue=queue, account=account,
        memory_limit=rank_limit(resources, node_bytes), named=where != detected(),
    ))  # fmt: skip
    say(f"next: pipectl submit {targets[0]} --wait")


def _check_name(name: str) -> None:
    if not is_name(name):
        raise UsageError(f"--name: {name!r} cannot name a job", cure=_NAME)


def _check_site(where: str, partition: str | None, account: str | None) -> None:
    from pipectl.jobs.places import LOCAL

    if where == LOCAL:
        sites = {"--partition": partition, "--account": account}
        refuse(sites, "the job is for this machine", cure="name a --scheduler, slurm or pbs")


def _code(model: str | None, loss: str, data: str | None) -> Code | None:
    """What the user names, by default data beside the model; None for the example."""
    from pipectl.cli.init_spec import LOSS_OF_MODEL, Code, check_reference

    if model is None:
        own = {"--data": data, "--loss": loss != given.LOSS}
        refuse(own, "goes with a model of yours", cure="name it: --model FILE:NAME")
        return None
    code = Code(model, loss, data or f"{model.rpartition(':')[0]}:training_data")
    for option, text in (("--model", code.model), ("--data", code.data), ("--loss", loss)):
        if (option, text) != ("--loss", LOSS_OF_MODEL):
            check_reference(text, option)
    return code


def _write(targets: Sequence[Path], job: str) -> None:
    from pipectl.spec import json_schema

    for target in targets:
        make_directory_of(target)
    example = (files("pipectl.cli") / "starter" / "model.py.txt").read_text("utf-8")
    texts = {"job.yaml": job, "model.py": example}
    for target in targets:
        if target.name in texts:
            write_text(target, texts[target.name])
        else:
            write_json(target, json_schema())
        say(f"written: {target}")


def _targets(directory: Path, *, force: bool, example: bool) -> list[Path]:
    """The files to write; refused where one exists."""
    names = ("job.yaml", SCHEMA_FILE, *(("model.py",) if example else ()))
    targets = [directory / name for name in names]
    existing = [str(path) for path in targets if path.exists()]
    if existing and not force:
        raise UsageError(
            f"{', '.join(existing)}: exists already",
            cure="choose another directory: pipectl init DIRECTORY; or replace with --force",
        )
    return targets
