"""The text of the job that `pipectl init` writes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from pipectl.batch.queues import Queue
from pipectl.errors import UsageError
from pipectl.jobs.starting import Ask
from pipectl.spec.references import fault_of, parse
from pipectl.units import format_bytes, format_clock

_EXAMPLE = """\
model:     {factory: "./model.py:build", kwargs: {width: 64, layers: 4}}
loss:      {factory: "torch.nn:CrossEntropyLoss"}          # called with (outputs, targets)
data:      {factory: "./model.py:training_data"}           # a torch dataset of (inputs, targets)
optimizer: {factory: "torch.optim:AdamW", kwargs: {lr: 1.0e-3}}
evaluation: {data: {factory: "./model.py:held_out_data"}, every: 50}"""

_OWN = """\
model:     {factory: $model, kwargs: {}}          # a class, or a function that returns the model
loss:      {factory: $loss}          # called with (outputs, targets)
data:      {factory: $data}          # returns a torch dataset of (inputs, targets)
optimizer: {factory: "torch.optim:AdamW", kwargs: {lr: 1.0e-3}}"""

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
    named: bool = False,
) -> str:
    """The job file.

    Args:
        code: None for the example that is written beside it.
        directory: where it will be.
        scheduler: ``local`` where none was found.
        queue: to which it goes; None for the batch system's default.
        named: whether the job says for which scheduler it is.
    """
    text = (files("pipectl.cli") / "starter" / "job.yaml").read_text("utf-8")
    return Template(text).substitute(
        name=json.dumps(name) if name != "starter" else name,
        training_code=_EXAMPLE if code is None else _own(code, directory),
        offer="" if queue is None else f"\n# {offer(queue)}",
        resources=_resources(ask),
        site=(f"launch:    {{scheduler: {scheduler}}}\n" if named else "")
        + _site(scheduler, queue, account),
    )


def reference_fault(text: str, option: str) -> None:
    """Raise UsageError where a reference to code is none, or its file does not exist."""
    fault = fault_of(text)
    if fault is None:
        file = parse(text, Path()).file
        if file is None or file.is_file():
            return
        fault = f"no such file: {file}"
    raise UsageError(f"{option}: {fault}", cure=f"for example {option} model.py:build")


def _own(code: Code, directory: Path) -> str:
    given = {"model": code.model, "loss": code.loss, "data": code.data}
    return Template(_OWN).substitute(
        {key: json.dumps(_beside(text, directory)) for key, text in given.items()}
    )


def _beside(reference: str, directory: Path) -> str:
    """With its file as seen from the job's directory."""
    file = parse(reference, Path()).file
    if file is None:
        return reference
    path = os.path.relpath(file, directory.resolve())
    return f"{path if path.startswith('..') else f'./{path}'}:{reference.rpartition(':')[2]}"


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
