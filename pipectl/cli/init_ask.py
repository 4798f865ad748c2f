"""What `pipectl init` wants to know: from options, else from the person, else as proposed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import typer

from pipectl.batch import Queue, get
from pipectl.cli.console import note
from pipectl.cli.init_spec import offer
from pipectl.cli.options import above_zero, read_by
from pipectl.errors import SchedulerError, UsageError
from pipectl.jobs.starting import Ask, choose, excess, propose
from pipectl.units import did_you_mean, format_clock, parse_bytes, parse_walltime


def is_terminal() -> bool:
    """Whether there is a person to ask."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def find_queue(scheduler: str, name: str | None, *, ask: bool) -> Queue | None:
    """The partition or queue to use; None where there is none to tell of.

    Raises:
        UsageError: there are some, but none of this name.
    """
    try:
        found = get(scheduler).queues()
    except SchedulerError as error:
        note(f"limits are not known: {error.message.splitlines()[0]}")
        return None if name is None else Queue(name)
    queue = choose(found, name)
    if name is None and ask and len(found) > 1:
        names = [other.name for other in found]
        default = queue.name if queue else names[0]
        name = typer.prompt(f"Partition or queue ({', '.join(names)})", default=default)
        queue = choose(found, name)
    if name is not None and queue is None and found:
        names = [other.name for other in found]
        raise UsageError(
            f"no partition or queue {name!r}{did_you_mean(name, names)}",
            cure=f"choose one of {', '.join(names)}",
        )
    return queue


def find_resources(queue: Queue | None, given: Mapping[str, Any], *, ask: bool) -> Ask:
    """Options as they are given, and for the rest answers, or what is proposed.

    Args:
        given: values by the fields of :class:`Ask`; None where there is no option.

    Raises:
        UsageError: more than the queue has.
    """
    proposed = propose(queue, given["tasks_per_node"])
    wanted = replace(proposed, **{key: value for key, value in given.items() if value is not None})
    if ask:
        if queue is not None:
            note(offer(queue))
        without_gpus = queue is not None and not queue.gpus
        questions = [key for key in _QUESTIONS if key != "gpus_per_node" or not without_gpus]
        answers = {key: _answer(key, wanted) for key in questions if given[key] is None}
        wanted = replace(wanted, **answers)
    over = [] if queue is None else excess(wanted, queue)
    if over and queue is not None:
        raise UsageError(f"{queue.name}: {'; '.join(over)}", cure="ask for less, or elsewhere")
    return wanted


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


def _answer(key: str, wanted: Ask) -> Any:
    question, read = _QUESTIONS[key]
    return typer.prompt(question, default=_shown(key, getattr(wanted, key)), value_proc=read)


def _shown(key: str, value: int | None) -> str:
    if key == "walltime_s":
        return format_clock(value or 0)
    if key == "memory_bytes":
        return "default" if value is None else f"{value >> 20}MiB"
    return str(value)
