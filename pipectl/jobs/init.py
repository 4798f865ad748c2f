"""What `pipectl init` writes: resources within what a queue has, and the text of the job file."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from pipectl.batch import Queue
from pipectl.errors import UsageError
from pipectl.spec.references import fault_of, parse
from pipectl.spec.sources import source_of
from pipectl.units import format_bytes, format_clock

NAME = "starter"
LOSS_OF_MODEL = "model"
RANK_BYTES = 2 * 2**30
_RANKS = 2
_WALLTIME_S = 600
_OF_NODE = 0.9
"""Of a node's memory: the system takes a part."""
_OF_SHARE = 0.9
"""Of a rank's share of what a job asks for: the C library keeps some freed memory."""
_HELD_OUT = ("held_out_data", "held_out", "validation_data", "evaluation_data", "test_data")
"""Names of functions that return the data to evaluate on, as far as `init` knows them."""
_QUEUE_KEYS = {"slurm": "partition", "pbs": "queue"}
_EXAMPLE_CODE = """\
model:     {factory: "./model.py:build", kwargs: {width: 128, layers: 8}}
loss:      {factory: "torch.nn:CrossEntropyLoss"}          # called with (outputs, targets)
data:      {factory: "./model.py:training_data"}           # a torch dataset of (inputs, targets)
optimizer: {factory: "torch.optim:AdamW", kwargs: {lr: 1.0e-3}}
evaluation: {data: {factory: "./model.py:held_out_data"}, every: 50}"""
_OWN_CODE = """\
model:     {factory: $model, kwargs: {}}          # a class, or a function that returns the model
loss:      $loss
data:      {factory: $data}          # returns a torch dataset of (inputs, targets)
optimizer: {factory: "torch.optim:AdamW", kwargs: {lr: 1.0e-3}}
$evaluation"""
_MODEL_IS_LOSS = "model          # the model is called with (inputs, targets) and returns its loss"
_NO_SITE = """\
# Read only when the job goes to Slurm or PBS (`pipectl submit job.yaml --scheduler slurm`).
# slurm:   {partition: debug, account: my-project}
# pbs:     {queue: workq, account: my-project}"""


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
        return [words for wanted, limit, words in limits if limit and wanted > limit]

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

    def as_yaml(self) -> str:
        """As the section ``resources`` has it, in one line."""
        parts = {
            "nodes": self.nodes,
            "tasks_per_node": self.tasks_per_node,
            "cpus_per_task": self.cpus_per_task,
            "gpus_per_node": self.gpus_per_node or None,
            "memory_per_node": None if self.memory_bytes is None else _size(self.memory_bytes),
            "walltime": f'"{format_clock(self.walltime_s)}"',
        }
        return ", ".join(f"{key}: {value}" for key, value in parts.items() if value is not None)


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
        memory = min(max(tasks * RANK_BYTES, of_cores), usable)
    return StarterResources(nodes, tasks, 1, min(tasks, queue.gpus), memory, walltime_s)


def describe_queue(queue: Queue) -> str:
    """What there is, in one line of comment."""
    parts = [
        f"{queue.nodes} nodes" if queue.nodes else "",
        f"{queue.cores} cores" if queue.cores else "",
        "" if queue.memory_bytes is None else format_bytes(queue.memory_bytes),
        f"{queue.gpus} GPUs (gpus_per_node)" if queue.gpus else "",
        "" if queue.walltime_s is None else f"at most {format_clock(queue.walltime_s)}",
    ]
    known = ", ".join(filter(None, parts))
    return f"{queue.name} has, at least and for each node: {known}" if known else queue.name


def check_reference(text: str, option: str) -> None:
    """Raise UsageError if a reference to code is none, or its file does not exist."""
    fault = fault_of(text)
    if fault is None:
        file = parse(text, Path()).file
        if file is None or file.is_file():
            return
        fault = f"no such file: {file}"
    raise UsageError(f"{option}: {fault}", cure=f"for example {option} model.py:build")


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
    text = (files("pipectl.jobs") / "starter" / "job.yaml").read_text("utf-8")
    return Template(text).substitute(
        name=name if name == NAME else json.dumps(name),
        training_code=_EXAMPLE_CODE if code is None else _own_code(code, directory),
        batch_size="32" if code is None else "64",
        micro_batches="8" if code is None else "auto",
        memory_limit="" if memory_limit is None else f", memory_limit: {_size(memory_limit)}",
        offer="" if queue is None else f"\n# {describe_queue(queue)}",
        resources=resources.as_yaml(),
        site=(f"launch:    {{scheduler: {scheduler}}}\n" if named else "")
        + _site(scheduler, queue, account),
    )


def _own_code(code: Code, directory: Path) -> str:
    def quoted(reference: str) -> str:
        return json.dumps(_seen_from(directory, reference))

    loss = _MODEL_IS_LOSS
    if code.loss != LOSS_OF_MODEL:
        loss = f"{{factory: {quoted(code.loss)}}}          # called with (outputs, targets)"
    return Template(_OWN_CODE).substitute(
        model=quoted(code.model),
        loss=loss,
        data=quoted(code.data),
        evaluation=_evaluation(code.data, quoted),
    )


def _evaluation(data: str, quoted: Callable[[str], str]) -> str:
    """The section for held-out data beside the training data; a comment if no function is there."""
    file, where = source_of(parse(data, Path())), data.rpartition(":")[0]
    try:
        tree = ast.parse(b"" if file is None else file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # loading it says what is wrong
        tree = ast.Module([], [])
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    name = next((name for name in _HELD_OUT if name in functions), None)
    section = quoted(f"{where}:{name or _HELD_OUT[0]}")
    text = f"evaluation: {{data: {{factory: {section}}}, every: 50}}"
    return text if name else f"# {text}          # the loss on data that is not trained on"


def _seen_from(directory: Path, reference: str) -> str:
    """With its file, or the directory of its package, as seen from the job's directory."""
    code = parse(reference, Path())
    place = code.file or code.root
    if place is None or parse(code.portable, directory) == code:
        return code.portable
    path = os.path.relpath(place, directory.resolve())
    path = path if path.startswith("..") else f"./{path}"
    return f"{path if code.file else f'{path}/{code.module}'}:{code.attribute}"


def _site(scheduler: str, queue: Queue | None, account: str | None) -> str:
    if scheduler not in _QUEUE_KEYS or (queue is None and account is None):
        return _NO_SITE
    values = {_QUEUE_KEYS[scheduler]: queue.name if queue else None, "account": account}
    keys = ", ".join(f"{key}: {json.dumps(text)}" for key, text in values.items() if text)
    hint = "" if account else "          # account: my-project, if the site charges one"
    return f"{scheduler}:{' ' * (10 - len(scheduler))}{{{keys}}}{hint}"


def _size(size_bytes: int) -> str:
    """At most so much, in few digits."""
    if size_bytes >= 4 << 30:
        return f"{(size_bytes * 10 >> 30) / 10:g}GiB"
    return f"{size_bytes >> 20}MiB" if size_bytes >> 20 else f"{size_bytes}B"
