"""What a first job asks of a cluster: within what there is, and enough to show a pipeline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pipectl.batch import Queue

RANK_BYTES = 2 * 2**30
_RANKS = 2
_WALLTIME_S = 600
_OF_NODE = 0.9
"""Of a node's memory: the system takes a part."""
_OF_SHARE = 0.9
"""Of a rank's share of what a job asks for: the C library keeps some freed memory."""


@dataclass(frozen=True)
class Ask:
    """Resources of a job; ``memory_bytes`` of each node, None for the batch system's default."""

    nodes: int = 1
    tasks_per_node: int = _RANKS
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    memory_bytes: int | None = None
    walltime_s: int = _WALLTIME_S


def choose(queues: Sequence[Queue], name: str | None) -> Queue | None:
    """The queue of this name, else the default one if it is open, else the first that is.

    None where there is no such queue.
    """
    if name is not None:
        return next((queue for queue in queues if queue.name == name), None)
    ready = [queue for queue in queues if queue.open]
    return next((queue for queue in ready if queue.default), ready[0] if ready else None)


def propose(queue: Queue | None, tasks: int | None = None) -> Ask:
    """Two ranks with a core each, and an accelerator where nodes have some, within a queue.

    Args:
        tasks: ranks of each node, if that is known.
    """
    if queue is None:
        return Ask(tasks_per_node=tasks or _RANKS)
    tasks = tasks or min(_RANKS, queue.cores or _RANKS, queue.gpus or _RANKS)
    nodes = min(-(-_RANKS // tasks), queue.nodes or 1)
    walltime_s = min(_WALLTIME_S, queue.walltime_s or _WALLTIME_S)
    memory = None
    if queue.memory_bytes is not None:
        usable = int(queue.memory_bytes * _OF_NODE)
        of_cores = usable * tasks // queue.cores if queue.cores else 0
        memory = min(max(tasks * RANK_BYTES, of_cores), usable)
    return Ask(nodes, tasks, 1, min(tasks, queue.gpus), memory, walltime_s)


def rank_limit(ask: Ask, node_bytes: int | None) -> int | None:
    """Bytes that one rank may hold: its share of what the job asks for, else of the node.

    Args:
        node_bytes: memory of a node; None if unknown.

    Returns:
        None if nobody knows, or if ranks compute in the memory of accelerators.
    """
    memory_bytes = ask.memory_bytes or node_bytes
    if memory_bytes is None or ask.gpus_per_node:
        return None
    return int(memory_bytes * _OF_SHARE) // ask.tasks_per_node


def memory_of_this_machine() -> int:
    """In bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def excess(ask: Ask, queue: Queue) -> list[str]:
    """What is more than a queue has, in words; empty where all fits."""
    cores = ask.tasks_per_node * ask.cpus_per_task
    pairs = (
        (ask.nodes, queue.nodes, f"{ask.nodes} nodes of {queue.nodes}"),
        (cores, queue.cores, f"{cores} cores a node of {queue.cores}"),
        (ask.gpus_per_node, queue.gpus, f"{ask.gpus_per_node} GPUs a node of {queue.gpus}"),
        (ask.memory_bytes or 0, queue.memory_bytes or 0, "more memory than a node has"),
        (ask.walltime_s, queue.walltime_s or 0, "a longer walltime than jobs there may have"),
    )
    known = [(wanted, limit, words) for wanted, limit, words in pairs if limit]
    return [words for wanted, limit, words in known if wanted > limit]
