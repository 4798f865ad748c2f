"""What `pipectl init` writes: resources within what a queue has, and the text of the job file."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pipectl.batch import Queue
from pipectl.errors import UsageError
from pipectl.spec.references import fault_of, parse
from pipectl.units import format_bytes, format_clock

LOSS_OF_MODEL = "model"
_RANKS = 2
_RANK_BYTES = 2 * 2**30
_WALLTIME_S = 600
_OF_NODE = 0.9
"""Of a node's memory: the system takes a part."""
_OF_SHARE = 0.9
"""Of a rank's share of what a job asks for: the C library keeps some freed memory."""
_HELD_OUT = ("held_out_data", "held_out", "validation_data", "evaluation_data", "test_data")
"""Names of functions that return the data to evaluate on, as far as `init` knows them."""
_QUEUE_KEYS = {"slurm": "partition", "pbs": "queue"}


@dataclass(frozen=True)
class StarterResources:
    """Resources of a job; ``memory_bytes`` of each node, None for the batch system's default."""

    nodes: int = 1
    tasks_per_node: int = _RANKS
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    memory_bytes: int | None = None
    walltime_s: int = _WALLTIME_S

    def excess(self, queue: Queue) -> list[str]:
        """What is more than a queue has, in words; empty if all fits."""
        cores = self.tasks_per_node * self.cpus_per_task
        gpus = self.gpus_per_node
        limits = (
            (self.nodes, queue.nodes, f"{self.nodes} nodes of {queue.nodes}"),
            (cores, queue.cores, f"{cores} cores per node of {queue.cores}"),
            (gpus, queue.gpus, f"{gpus} GPUs per node of {queue.gpus}"),
            (self.memory_bytes or 0, queue.memory_bytes, "more memory than a node has"),
            (self.walltime_s, queue.walltime_s, "a longer walltime than jobs there may have"),
        )
        return [words for value, limit, words in limits if limit and value > limit]

    def rank_limit(self, node_bytes: int | None) -> int | None:
        """Bytes that one rank may hold: its share of what the job asks for, else of the node.

        Args:
            node_bytes: memory of a node; None if unknown.

        Returns:
            None if nobody knows, or if ranks compute in the memory of accelerators.
        """
        memory_bytes = self.memory_bytes or node_bytes
        if memory_bytes is None or self.gpus_per_node:
            return None
        return int(memory_bytes * _OF_SHARE) // self.tasks_per_node


@dataclass(frozen=True)
class Code:
    """The user's own code; references as in a job, files as seen from here."""

    model: str
    loss: str
    data: str


def choose_queue(queues: Sequence[Queue], name: str | None) -> Queue | None:
    """The queue of this name, else the default one if it is open, else the first that is.

    None if there is no such queue.
    """
    if name is not None:
        return next((queue for queue in queues if queue.name == name), None)
    ready = [queue for queue in queues if queue.open]
    return next((queue for queue in ready if queue.default), ready[0] if ready else None)


def propose_resources(queue: Queue | None, tasks: int | None = None) -> StarterResources:
    """Two ranks with a core each, and an accelerator if nodes have some, within a queue.

    Args:
        tasks: ranks of each node, if that is known.
    """
    if queue is None:
        return StarterResources(tasks_per_node=tasks or _RANKS)
    tasks = tasks or min(_RANKS, queue.cores or _RANKS, queue.gpus or _RANKS)
    nodes = min(-(-_RANKS // tasks), queue.nodes or 1)
    walltime_s = min(_WALLTIME_S, queue.walltime_s or _WALLTIME_S)
    memory = None
    if queue.memory_bytes is not None:
        usable = int(queue.memory_bytes * _OF_NODE)
        of_cores = usable * tasks // queue.cores if queue.cores else 0
        memory = min(max(tasks * _RANK_BYTES, of_cores), usable)
    return StarterResources(nodes, tasks, 1, min(tasks, queue.gpus), memory, walltime_s)


def describe_queue(queue: Queue) -> str:
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


def check_reference(text: str, option: str) -> None:
    """Raise UsageError if a reference to code is none, or its file does not exist."""
    fault = fault_of(text)
    if fault is None:
        file = parse(text, Path()).file
        if file is None or file.is_file():
            return
        fault = f"no such file: {file}"
    raise UsageError(f"{option}: {fault}", cure=f"for example {option} model.py:build")


def recipes() -> dict[str, Path]:
    """The job files of all recipes, by name."""
    package = Path(str(files("pipectl")))  # a wheel holds them; in a checkout they stand beside it
    folder = package / "recipes" if (package / "recipes").is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_files(job: Path) -> list[Path]:
    """A recipe's job file, and the files of code that it names."""
    named = re.findall(r"\./(models/\w+\.py):", job.read_text("utf-8"))
    return [job, *(job.parent / name for name in dict.fromkeys(named))]


def example_model() -> str:
    """The text of the small model that a job without code of its own trains."""
    return (files("pipectl.jobs") / "starter" / "model.py.txt").read_text("utf-8")


def job_text(
    name: str,
    code: Code | None,
    resources: StarterResources,
    *,
    directory: Path,
    scheduler: str,
    named: bool,
    queue: Queue | None,
    account: str | None,
    memory_limit: int | None,
) -> str:
    """The text of the job file.

    Args:
        code: None for the example that is written beside it.
        directory: where the file will be.
        scheduler: ``local`` if none was found.
        named: whether the job says for which scheduler it is.
        queue: to which it goes; None for the batch system's default.
        memory_limit: bytes that one rank may hold; None sets no limit.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, trim_blocks=True, autoescape=False)
    environment.filters |= {
        "yaml": json.dumps,  # a text, whatever it holds
        "size": _size,
        "clock": format_clock,
        "describe": describe_queue,
    }
    site = {}
    if scheduler in _QUEUE_KEYS:
        site = {_QUEUE_KEYS[scheduler]: queue.name if queue else None, "account": account}
    template = (files("pipectl.jobs") / "starter" / "job.yaml.j2").read_text("utf-8")
    return environment.from_string(template).render(
        name=name,
        code=None if code is None else _seen_from(directory, code),
        resources=resources,
        scheduler=scheduler,
        named=named,
        queue=queue,
        account=account,
        site={key: value for key, value in site.items() if value},
        memory_limit=memory_limit,
    )


def _seen_from(directory: Path, code: Code) -> dict[str, object]:
    """References as seen from the job's directory, also that to the data to evaluate on.

    That is by default a function beside the training data; whether there is one is told, too.
    """

    def reference(text: str) -> str:
        one = parse(text, Path())
        place = one.file or one.root
        if place is None or parse(one.portable, directory) == one:
            return one.portable
        path = os.path.relpath(place, directory.resolve())
        path = path if path.startswith("..") else f"./{path}"
        return f"{path if one.file else f'{path}/{one.module}'}:{one.attribute}"

    file, where = parse(code.data, Path()).source, code.data.rpartition(":")[0]
    try:
        tree = ast.parse(b"" if file is None else file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # loading it says what is wrong
        tree = ast.Module([], [])
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    held_out = next((name for name in _HELD_OUT if name in functions), None)
    return {
        "model": reference(code.model),
        "loss": code.loss if code.loss == LOSS_OF_MODEL else reference(code.loss),
        "data": reference(code.data),
        "held_out": reference(f"{where}:{held_out or _HELD_OUT[0]}"),
        "has_held_out": held_out is not None,
    }


def _size(size_bytes: int) -> str:
    """At most so much, in few digits."""
    if size_bytes >= 4 << 30:
        return f"{(size_bytes * 10 >> 30) / 10:g}GiB"
    return f"{size_bytes >> 20}MiB" if size_bytes >> 20 else f"{size_bytes}B"
