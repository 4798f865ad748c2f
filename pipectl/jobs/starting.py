"""What a first job asks of a cluster: within what there is, and enough to show a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipectl.batch.queues import Queue

RANK_BYTES = 2 * 2**30
_RANKS = 2
_WALLTIME_S = 600
_OF_NODE = 0.9
"""Of a node's memory: the system takes a part."""


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
    """Two ranks with a core each, within the limits of a queue.

    Args:
        tasks: of each node, where that is known.
    """
    if queue is None:
        return Ask()
    tasks = tasks or min(_RANKS, queue.cores or _RANKS)
    nodes = min(-(-_RANKS // tasks), queue.nodes or 1)
    walltime_s = min(_WALLTIME_S, queue.walltime_s or _WALLTIME_S)
    memory = None
    if queue.memory_bytes is not None:
        memory = min(tasks * RANK_BYTES, int(queue.memory_bytes * _OF_NODE))
    return Ask(nodes, tasks, memory_bytes=memory, walltime_s=walltime_s)


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
