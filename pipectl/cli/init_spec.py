"""The text of the job that `pipectl init` writes."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from pipectl.batch import Queue
from pipectl.errors import UsageError
from pipectl.jobs.starting import Ask
from pipectl.spec.references import fault_of, parse
from pipectl.spec.sources import source_of
from pipectl.units import format_bytes, format_clock

_EXAMPLE = """\
model:     {factory: "./model.py:build", kwargs: {width: 128, layers: 8}}
loss:      {factory: "torch.nn:CrossEntropyLoss"}          # called with (outputs, targets)
data:      {factory: "./model.py:training_data"}           # a torch dataset of (inputs, targets)
optimizer: {factory: "torch.optim:AdamW", kwargs: {lr: 1.0e-3}}
evaluation: {data: {factory: "./model.py:held_out_data"}, every: 50}"""

_OWN = """\
model:     {factory: $model, kwargs: {}}          # a class, or a function that returns the model
loss:      $loss
data:      {factory: $data}          # returns a torch dataset of (inputs, targets)
optimizer: {factory: "torch.optim:AdamW", kwargs: {lr: 1.0e-3}}
$evaluation"""
LOSS_OF_MODEL = "model"
_LOSS_OF_MODEL = "model          # the model is called with (inputs, targets) and returns its loss"
_HELD_OUT = ("held_out_data", "held_out", "validation_data", "evaluation_data", "test_data")
"""Names of functions that return the data to evaluate on, as far as `init` knows them."""

_EXAMPLE_SIZE = {"batch_size": "32", "micro_batches": "8"}
_OWN_SIZE = {"batch_size": "64", "micro_batches": "auto"}

_SITES = """\
# Read only when the job goes to Slurm or PBS (`pipectl submit job.yaml --scheduler slurm`).
# slurm:   {partition: debug, account: my-project}
# pbs:     {queue: workq, account: my-project}"""
_KEYS = {"slurm": "partition", "pbs": "queue"}


@dataclass(frozen=True)
class Code:
    """The user's own code; references as in a job, files as seen from here."""

    model: str
    loss: str
    data: str


def spec_text(
    name: str,
    code: Code | None,
    ask: Ask,
    *,
    directory: Path,
    scheduler: str,
    queue: Queue | None = None,
    account: str | None = None,
    memory_limit: int | None = None,
    named: bool = False,
) -> str:
    """The job file.

    Args:
        code: None for the example that is written beside it.
        directory: where it will be.
        scheduler: ``local`` where none was found.
        queue: to which it goes; None for the batch system's default.
        memory_limit: bytes that one rank may hold; None sets no limit.
        named: whether the job says for which scheduler it is.
    """
    text = (files("pipectl.cli") / "starter" / "job.yaml").read_text("utf-8")
    return Template(text).substitute(
        name=json.dumps(name) if name != "starter" else name,
        training_code=_EXAMPLE if code is None else _own(code, directory),
        **(_EXAMPLE_SIZE if code is None else _OWN_SIZE),
        memory_limit="" if memory_limit is None else f", memory_limit: {_size(memory_limit)}",
        offer="" if queue is None else f"\n# {offer(queue)}",
        resources=_resources(ask),
        site=(f"launch:    {{scheduler: {scheduler}}}\n" if named else "")
        + _site(scheduler, queue, account),
    )


def check_reference(text: str, option: str) -> None:
    """Raise UsageError if a reference to code is none, or its file does not exist."""
    fault = fault_of(text)
    if fault is None:
        file = parse(text, Path()).file
        if file is None or file.is_file():
            return
        fault = f"no such file: {file}"
    raise UsageError(f"{option}: {fault}", cure=f"for example {option} model.py:build")


def _own(code: Code, directory: Path) -> str:
    def quoted(reference: str) -> str:
        return json.dumps(_beside(reference, directory))

    if code.loss == LOSS_OF_MODEL:
        loss = _LOSS_OF_MODEL
    else:
        loss = f"{{factory: {quoted(code.loss)}}}          # called with (outputs, targets)"
    return Template(_OWN).substitute(
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


def _beside(reference: str, directory: Path) -> str:
    """With its file, or the directory of its package, as seen from the job's directory."""
    code = parse(reference, Path())
    place = code.file or code.root
    if place is None or parse(code.portable, directory) == code:
        return code.portable
    path = os.path.relpath(place, directory.resolve())
    path = path if path.startswith("..") else f"./{path}"
    return f"{path if code.file else f'{path}/{code.module}'}:{code.attribute}"


def _resources(ask: Ask) -> str:
    parts = {
        "nodes": ask.nodes,
        "tasks_per_node": ask.tasks_per_node,
        "cpus_per_task": ask.cpus_per_task,
        "gpus_per_node": ask.gpus_per_node or None,
        "memory_per_node": None if ask.memory_bytes is None else _size(ask.memory_bytes),
        "walltime": f'"{format_clock(ask.walltime_s)}"',
    }
    return ", ".join(f"{key}: {value}" for key, value in parts.items() if value is not None)


def _size(size_bytes: int) -> str:
    """At most so much, in few digits."""
    if size_bytes >= 4 << 30:
        return f"{(size_bytes * 10 >> 30) / 10:g}GiB"
    return f"{size_bytes >> 20}MiB" if size_bytes >> 20 else f"{size_bytes}B"


def offer(queue: Queue) -> str:
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


def _site(scheduler: str, queue: Queue | None, account: str | None) -> str:
    if scheduler not in _KEYS or (queue is None and account is None):
        return _SITES
    values = {_KEYS[scheduler]: queue.name if queue else None, "account": account}
    given = ", ".join(f"{key}: {json.dumps(text)}" for key, text in values.items() if text)
    hint = "" if account else "          # account: my-project, if the site charges one"
    return f"{scheduler}:{' ' * (10 - len(scheduler))}{{{given}}}{hint}"
