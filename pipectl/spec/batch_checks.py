"""Checks of the options that batch systems get, and of the GPUs that they ask for."""

from __future__ import annotations

from collections.abc import Iterator

from pipectl.directives import (
    GPUS,
    PBS_GPUS,
    QSUB,
    SBATCH,
    SELECT_COUNT,
    fault_of_option,
    options_of,
)
from pipectl.spec.document import Finding
from pipectl.spec.launch import Pbs, Resources, Slurm

_GRES = ("gres", "tres-per-task")
_KEYS_OF_CHUNK = {
    "ncpus": "resources.tasks_per_node and resources.cpus_per_task",
    "mpiprocs": "resources.tasks_per_node",
    "ompthreads": "resources.cpus_per_task",
    "mem": "resources.memory_per_node",
}
"""Resources of a chunk that pipectl writes, and the keys that they follow from."""
_GPU_OPTIONS = {
    "gres": "node", "gpus-per-node": "node", "gpus": "job", "G": "job", "gpus-per-task": "task",
    "tres-per-task": "task", "gpus-per-socket": "socket",
}  # fmt: skip
"""Options of sbatch that ask for GPUs, and the unit that each counts them for."""


def check_options(slurm: Slurm, pbs: Pbs) -> Iterator[Finding]:
    """Options that pipectl sets itself, or that are none."""
    for section, options, syntax in (("slurm", slurm.options, SBATCH), ("pbs", pbs.options, QSUB)):
        for name, value in options.items():
            if fault := fault_of_option(syntax, name, value):
                yield (section, "options", name), fault


def check_slurm_gpus(slurm: Slurm, resources: Resources) -> Iterator[Finding]:
    """Options of sbatch that ask for other GPUs than the resources."""
    units = {"node": resources.max_nodes, "task": resources.ranks, "job": 1}
    for name, unit in _GPU_OPTIONS.items():
        for _, value in options_of(name, slurm.options.get(name, False)):
            texts = [text for text in (value or "").split(",") if text]
            matches = [GPUS.fullmatch(text if name in _GRES else f"gpu:{text}") for text in texts]
            counts = [int(match[2] or 1) for match in matches if match]
            total = sum(counts) * units[unit] if unit in units else None
            number = "N" if total is None else str(total // resources.max_nodes or 1)
            hint, how = f"write resources: {{gpus_per_node: {number}}}", "instead"
            kinds = [match[1] for match in matches if match and match[1]]
            if name == "gpus-per-node":
                how = "as well"
            elif len(kinds) == len(counts) == 1:
                hint += f" and slurm.options: {{gpus-per-node: {kinds[0]}:{number}}}"
            text = ",".join(text for text, match in zip(texts, matches, strict=True) if match)
            fault = _fault_of_gpus(text, sum(counts), total, resources, f"{hint} {how}")
            if counts and fault:
                yield ("slurm", "options", name), fault


def check_select(pbs: Pbs, resources: Resources) -> Iterator[Finding]:
    """Chunks of PBS that are not the nodes of the job, or that would have a resource twice."""
    if pbs.select and (count := SELECT_COUNT.match(pbs.select)):
        if "+" in pbs.select:
            yield ("pbs", "select"), "has several kinds of chunks, but all nodes of a job are alike"
        elif int(count[1]) != resources.max_nodes:
            fault = f"asks for {count[1]} chunks, but each node is one, and resources.nodes is"
            yield ("pbs", "select"), f"{fault} {resources.max_nodes}"
        return
    names = {part.partition("=")[0].lower() for part in (pbs.select or "").split(":")}
    names -= {"mem"} if resources.memory_per_node is None else set()
    for name in sorted(names & _KEYS_OF_CHUNK.keys()):
        hint = f"set {_KEYS_OF_CHUNK[name]}, or write all of `-l select`, such as 2:ncpus=64"
        yield ("pbs", "select"), f"{name} is asked for by resources already; {hint}"


def check_pbs_gpus(pbs: Pbs, resources: Resources) -> Iterator[Finding]:
    """Options of qsub that ask for other GPUs than the resources."""
    for gpus in PBS_GPUS.finditer(pbs.select or ""):
        count, how = int(gpus[2]), "instead" if gpus[1] == "ngpus" else "as well"
        hint = f"write resources: {{gpus_per_node: {count}}} {how}"
        if fault := _fault_of_gpus(gpus[0], count, count * resources.max_nodes, resources, hint):
            yield ("pbs", "select"), fault
    for _, value in options_of("l", pbs.options.get("l", False)):
        for gpus in PBS_GPUS.finditer(value or ""):
            # Beside our `-l select`, PBS takes resources of nodes only within it.
            chunk = "" if gpus[1] == "ngpus" else f" and pbs.select: {gpus[0]}"
            hint, total = f"write resources: {{gpus_per_node: {gpus[2]}}}{chunk} instead", None
            if pbs.select is False:
                total = int(gpus[2])
                number = total // resources.max_nodes or 1
                hint = f"write resources: {{gpus_per_node: {number}}} as well"
            if fault := _fault_of_gpus(gpus[0], int(gpus[2]), total, resources, hint):
                yield ("pbs", "options", "l"), fault


def _fault_of_gpus(
    text: str, number: int, total: int | None, resources: Resources, hint: str
) -> str:
    """Why an option may not ask for GPUs; empty if it may.

    Without ``resources.gpus_per_node``, ranks would leave them idle and compute on CPUs; 0 says
    that this is intended. Any other number must be that of the option.

    Args:
        number: of GPUs that the option asks for.
        total: for the whole job; None if it is not known.
        hint: what to write if the job does not say how many GPUs it needs.
    """
    gpus, key = resources.gpus_per_node, "resources.gpus_per_node"
    if "gpus_per_node" not in resources.model_fields_set:
        fault = f"asks for GPUs, but ranks compute on CPUs unless {key} says how many"
        return f"{text!r} {fault}; {hint}" if number else ""
    if not gpus or total is None or total == gpus * resources.max_nodes:
        return ""
    count, rest = divmod(total, resources.max_nodes)
    fault = f"asks for {total / resources.max_nodes:g} GPUs per node, but {key} is {gpus}"
    other = f", or write resources: {{gpus_per_node: {count}}}" if count and not rest else ""
    return f"{text!r} {fault}; ask for {gpus} per node{other}"
