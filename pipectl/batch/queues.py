"""What the partitions of Slurm and the queues of PBS offer to jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipectl.batch import process
from pipectl.errors import SchedulerError
from pipectl.units import parse_duration

SINFO_FORMAT = "%P|%l|%D|%c|%m|%G|%a"
_TIMEOUT_S = 20.0
_SHORT_CLOCK = re.compile(r"\d+:\d{1,2}")
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)?:(\d{1,6})\b")
_HEAD = re.compile(r"(?:Queue: )?([A-Za-z0-9_.-]+)")
_FIELD = re.compile(r"\s+([A-Za-z_.]+) = (.*)")
_SIZE = re.compile(r"(\d{1,15})([kmgt]?)b?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNSET_BYTES = 64 * 2**20
"""Slurm says 1 MB of nodes whose memory nobody has told it."""


@dataclass(frozen=True)
class Queue:
    """A partition or queue; None and 0 where nothing is known.

    Args:
        default: whether jobs that name none go there.
        open: whether it takes jobs and runs them.
        walltime_s: the most that a job may ask for.
        nodes: in all.
        cores, memory_bytes, gpus: of a node; of the least, where they differ.
    """

    name: str
    default: bool = False
    open: bool = True
    walltime_s: int | None = None
    nodes: int = 0
    cores: int = 0
    memory_bytes: int | None = None
    gpus: int = 0


def queues(scheduler: str) -> tuple[Queue, ...]:
    """What a batch system has, the default first; nothing for ``local``.

    Raises:
        SchedulerError: it does not answer.
    """
    if scheduler == "slurm":
        found = parse_sinfo(_run("sinfo", "-h", "-o", SINFO_FORMAT))
    elif scheduler == "pbs":
        server, nodes = _run("qstat", "-B", "-f"), _run("pbsnodes", "-a")
        found = parse_pbs(_run("qstat", "-Q", "-f"), server, nodes)
    else:
        found = ()
    return tuple(sorted(found, key=lambda queue: not queue.default))


def parse_sinfo(stdout: str) -> tuple[Queue, ...]:
    """The partitions in what ``sinfo -h -o SINFO_FORMAT`` prints, a line for every kind of node."""
    found: dict[str, Queue] = {}
    for line in stdout.splitlines():
        fields = line.split("|")
        if len(fields) == 7:
            queue = _partition(*fields)
            before = found.get(queue.name)
            found[queue.name] = queue if before is None else _together(before, queue)
    return tuple(found.values())


def parse_pbs(queues: str, server: str, nodes: str) -> tuple[Queue, ...]:
    """The queues that jobs may be submitted to.

    Args:
        queues, server, nodes: what ``qstat -Q -f``, ``qstat -B -f`` and ``pbsnodes -a`` print.
    """
    default = next((fields.get("default_queue") for _, fields in _blocks(server)), None)
    hosts = [fields for _, fields in _blocks(nodes) if _is_up(fields)]
    return tuple(
        Queue(
            name,
            default=name == default,
            open=fields.get("enabled") == "True" and fields.get("started") == "True",
            walltime_s=_clock(fields.get("resources_max.walltime", "")),
            nodes=min(len(hosts), _number(fields, "resources_max.nodect") or len(hosts)),
            cores=min((_number(host, "resources_available.ncpus") for host in hosts), default=0),
            memory_bytes=min(filter(None, map(_memory, hosts)), default=None),
            gpus=min((_number(host, "resources_available.ngpus") for host in hosts), default=0),
        )
        for name, fields in _blocks(queues)
        if "queue_type" in fields
    )


def _run(*argv: str) -> str:
    """What a command prints, without the user's own ideas of how."""
    env = {**process.environment_without("SINFO_"), "LC_ALL": "C"}
    done = process.run(argv, cure="name what you want", env=env, timeout_s=_TIMEOUT_S)
    if done.returncode != 0:
        raise SchedulerError(f"{argv[0]}: {done.said}", cure="try again in a minute")
    return done.stdout


def _partition(
    name: str, limit: str, nodes: str, cores: str, memory: str, gres: str, state: str
) -> Queue:
    """One line; a ``+`` behind a number says that some nodes have more."""
    size = int(_digits(memory) or 0) * 2**20
    return Queue(
        name.removesuffix("*"),
        default=name.endswith("*"),
        open=state == "up",
        walltime_s=_clock(limit),
        nodes=int(_digits(nodes) or 0),
        cores=int(_digits(cores) or 0),
        memory_bytes=size if size >= _UNSET_BYTES else None,
        gpus=sum(map(int, _GPUS.findall(gres))),
    )


def _together(first: Queue, second: Queue) -> Queue:
    """Two kinds of nodes of one partition: what every one of them has."""
    sizes = [size for size in (first.memory_bytes, second.memory_bytes) if size is not None]
    return replace(
        first,
        nodes=first.nodes + second.nodes,
        cores=min(first.cores, second.cores),
        memory_bytes=min(sizes, default=None),
        gpus=min(first.gpus, second.gpus),
    )


def _blocks(stdout: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Names and fields of what PBS lists: a name at the margin, indented ``field = value``."""
    name, fields = "", {}  # type: tuple[str, dict[str, str]]
    for line in stdout.splitlines():
        if field := _FIELD.fullmatch(line):
            fields[field[1]] = field[2].strip()
        elif head := _HEAD.fullmatch(line.removeprefix("Server: ").strip()):
            if name:
                yield name, fields
            name, fields = head[1], {}
    if name:
        yield name, fields


def _is_up(fields: dict[str, str]) -> bool:
    states = re.split(r"[,\s]+", fields.get("state", ""))
    return not {"down", "offline", "state-unknown", "stale"} & set(states)


def _number(fields: dict[str, str], key: str) -> int:
    return int(_digits(fields.get(key, "")) or 0)


def _memory(fields: dict[str, str]) -> int | None:
    size = _SIZE.fullmatch(fields.get("resources_available.mem", "").lower())
    return None if size is None else int(size[1]) * 1024 ** _POWERS[size[2]]


def _digits(text: str) -> str:
    match = re.match(r"\d{1,15}", text)
    return match[0] if match else ""


def _clock(text: str) -> int | None:
    """Seconds of a limit such as ``2-00:00:00``, ``1:00:00`` or ``30:00``; None for none."""
    try:
        return parse_duration(f"0:{text}" if _SHORT_CLOCK.fullmatch(text) else text) or None
    except ValueError:
        return None
