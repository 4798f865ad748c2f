"""What jobs ask for, compared with the limits of partitions and queues, before they are submitted.

Batch systems may accept jobs that can never run: Slurm does unless ``EnforcePartLimits`` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipectl.errors import SchedulerError
from pipectl.units import format_clock, plural, shorten

_MAX_NAMES = 4
_FEWER_CORES = "resources.tasks_per_node or resources.cpus_per_task"


class NodeKind(NamedTuple):
    """Nodes that are alike; unknown values are None or 0.

    Args:
        nodes: number of nodes.
        cores, memory_bytes, gpus: of each node.
        gpu: type of its accelerators, as the batch system calls it; empty if it has no name.
    """

    nodes: int
    cores: int = 0
    memory_bytes: int | None = None
    gpus: int = 0
    gpu: str = ""


@dataclass(frozen=True)
class Queue:
    """A Slurm partition or PBS queue; unknown values are None or 0.

    Args:
        default: whether it is the default.
        open: whether it accepts and runs jobs.
        for_user: whether this user may use it, as far as known.
        walltime_s, min_nodes, max_nodes, max_cores: limits of a job.
        kinds: its nodes.
    """

    name: str
    default: bool = False
    open: bool = True
    for_user: bool = True
    walltime_s: int | None = None
    min_nodes: int = 0
    max_nodes: int | None = None
    max_cores: int | None = None
    kinds: tuple[NodeKind, ...] = ()

    @property
    def nodes(self) -> int:
        """Number of nodes that a job can have."""
        count = _count(self.kinds)
        return min(count, self.max_nodes or count)

    @property
    def has_nodes(self) -> bool:
        """Whether it has nodes, as far as known."""
        return not self.kinds or _count(self.kinds) > 0

    @property
    def is_usable(self) -> bool:
        """Whether this user can run jobs there at present, as far as known."""
        return self.open and self.for_user and self.has_nodes

    @property
    def cores(self) -> int:
        """Cores per node; the minimum if nodes differ."""
        return min((kind.cores for kind in self.kinds), default=0)

    @property
    def memory_bytes(self) -> int | None:
        """Memory per node; the minimum if nodes differ."""
        sizes = [kind.memory_bytes for kind in self.kinds if kind.memory_bytes is not None]
        return min(sizes, default=None)

    @property
    def gpus(self) -> int:
        """Accelerators per node; the minimum if nodes differ."""
        return min((kind.gpus for kind in self.kinds), default=0)


class Demand(NamedTuple):
    """What a job asks for; None where that is unknown.

    Args:
        cores, memory_bytes, gpus: on each of its nodes.
        single_process: whether it is a measurement of one process, which has one node.
    """

    nodes: int
    walltime_s: int | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    gpus: int | None = None
    single_process: bool = False


class Misfit(NamedTuple):
    """Why a job can never run in a partition or queue, and what to do.

    Args:
        is_rule: whether it is a rule of the site, not a lack of nodes.
    """

    fault: str
    hint: str
    is_rule: bool = False


def find_misfit(queue: Queue, demand: Demand) -> Misfit | None:
    """Return why a job can never run in a partition or queue; None if it can, as far as known."""
    name, nodes, walltime_s = queue.name, demand.nodes, demand.walltime_s
    if queue.walltime_s is not None and (walltime_s or 0) > queue.walltime_s:
        limit, time = format_clock(queue.walltime_s), format_clock(walltime_s or 0)
        fault = f"jobs in {name} may take {limit} at most, and this one asks for {time}"
        return Misfit(fault, "lower resources.walltime", is_rule=True)
    if nodes < queue.min_nodes:
        least = queue.min_nodes
        fault = f"jobs in {name} have at least {least} nodes, and this one asks for {nodes}"
        hint = "raise resources.nodes"
        if demand.single_process:
            hint = "let `pipectl submit` measure in the job itself"
        return Misfit(fault, hint, is_rule=True)
    if nodes > (queue.max_nodes or nodes):
        limit = plural(queue.max_nodes or 0, "node")
        fault = f"jobs in {name} may have {limit} at most, and this one asks for {nodes}"
        return Misfit(fault, "lower resources.nodes", is_rule=True)
    cores = nodes * (demand.cores or 0)
    if cores > (queue.max_cores or cores):
        limit = plural(queue.max_cores or 0, "core")
        fault = f"jobs in {name} may have {limit} at most, and this one asks for {cores}"
        return Misfit(fault, f"lower resources.nodes, {_FEWER_CORES}", is_rule=True)
    return _find_misfit_of_nodes(queue, demand)


def _find_misfit_of_nodes(queue: Queue, demand: Demand) -> Misfit | None:
    """Return what the nodes of a partition or queue lack; None if enough of them have it all."""
    kinds, count = queue.kinds, _count(queue.kinds)
    if not count:
        return None  # unknown
    if demand.nodes > count:
        has = plural(count, "node")
        fault = f"{queue.name} has {has}, and this job asks for {demand.nodes}"
        return Misfit(fault, "lower resources.nodes")
    mib = demand.memory_bytes and -(-demand.memory_bytes // 2**20)
    parts: tuple[tuple[str, int | None, Callable[[NodeKind], int | None], str], ...] = (
        (_FEWER_CORES, demand.cores, lambda kind: kind.cores or None, "core"),
        ("resources.memory_per_node", mib, _mib_of, "MiB"),
        ("resources.gpus_per_node", demand.gpus, lambda kind: kind.gpus, "GPU"),
    )
    needs = []
    for key, wanted, size_of, noun in parts:
        sizes, least = list(map(size_of, kinds)), wanted or 0
        pairs = zip(kinds, sizes, strict=True)
        fitting = tuple(kind for kind, size in pairs if size is None or size >= least)
        if fitting == kinds:
            continue
        needs.append(f"{least} MiB of memory" if noun == "MiB" else plural(least, noun))
        if not fitting:
            largest = max(size or 0 for size in sizes)
            fault = f"no node of {queue.name} has {' and '.join(needs)}: at most {largest}"
            return Misfit(fault, f"lower {key}")
        if (left := _count(fitting)) < demand.nodes:
            have = "node has" if left == 1 else "nodes have"
            fault = f"only {left} {have} {' and '.join(needs)} in {queue.name}, and this job "
            return Misfit(f"{fault}asks for {demand.nodes}", f"lower resources.nodes or {key}")
        kinds = fitting
    return None


def _count(kinds: Sequence[NodeKind]) -> int:
    return sum(kind.nodes for kind in kinds)


def _mib_of(kind: NodeKind) -> int | None:
    return kind.memory_bytes and kind.memory_bytes >> 20


def check_limits(
    queues: Sequence[Queue],
    names: Sequence[str],
    demand: Demand,
    *,
    key: str,
    exception: str = "",
    is_sure: bool = True,
) -> str:
    """Compare what a job asks for with the limits of the partitions or queues that it may run in.

    Args:
        queues: all that there are.
        names: those that the job names; empty for the default one.
        key: key of the job that names them.
        exception: what to do if a rule of the site does not hold for the job.
        is_sure: whether nothing else decides where and how long it may run, such as a QOS that
            lifts limits.

    Returns:
        A warning if the job may never run, or only once the site opens its partition; else empty.

    Raises:
        SchedulerError: it can never run.
    """
    named = [queue for queue in queues if queue.name in names]
    if len(named) < len(set(names)):
        return ""  # hidden, or the batch system refuses it
    meant = named or [queue for queue in queues if queue.default][:1]
    misfits = [misfit for queue in meant if (misfit := find_misfit(queue, demand)) is not None]
    if not meant or len(misfits) < len(meant):
        if not meant or any(queue.open for queue in meant):
            return ""
        which = " and ".join(queue.name for queue in meant)
        are, they_open = ("is", "it opens") if len(meant) == 1 else ("are", "one opens")
        return f"{which} {are} closed at present: the job waits until {they_open}"
    usable = [queue for queue in queues if queue.is_usable]
    fitting = [queue.name for queue in usable if find_misfit(queue, demand) is None]
    fault = "; ".join(misfit.fault for misfit in misfits)
    hint = " or ".join(dict.fromkeys(misfit.hint for misfit in misfits))
    if fitting:
        hint += f", or set {key} to one that allows it: {', '.join(shorten(fitting, _MAX_NAMES))}"
    # Sites may choose another partition for jobs that name none, by their QOS, say.
    if not names and not is_sure:
        return ""
    if not is_sure or (not names and fitting):
        return f"{fault}: it may wait for ever\n{hint}"
    if exception and any(misfit.is_rule for misfit in misfits):
        hint += f"\n{exception}"
    raise SchedulerError(f"the job can never run: {fault}", hint=hint)
