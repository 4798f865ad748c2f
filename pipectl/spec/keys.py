"""Keys that tell whether a profile or plan still belongs to a spec.

A key is a hash of the sections that the file depends on, and of the contents of their Python files
and of the user's modules that these import. Locations of files do not count.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pipectl.directives import SYNTAXES, options_of
from pipectl.hash_seed import hash_seed_of
from pipectl.spec.code import read_source
from pipectl.spec.models import JobSpec
from pipectl.spec.references import user_sources

_NODE_OPTIONS = {
    "slurm": (
        "--constraint -C", "--exclude -x", "--nodefile -F", "--nodelist -w", "--reservation",
        "--switches",
    ),
    "pbs": ("-l",),
}  # fmt: skip
"""Options that choose the nodes of a job, by batch system."""


def profile_key(spec: JobSpec) -> str:
    """Hash of what a profile depends on: user code, batch, and the load of a node."""
    return _digest(_profiled(spec))


def plan_key(spec: JobSpec) -> str:
    """Hash of what a plan depends on: the profile, the pipeline, the ranks and the cluster."""
    pipeline = spec.pipeline.model_dump()
    cluster = None if spec.cluster is None else _content(Path(spec.cluster))
    order = None
    if spec.schedule_file is not None:
        order = _content(spec.schedule_file)
        pipeline["schedule"] = spec.schedule_file.name
    resources = spec.resources.model_dump(exclude={"walltime"})
    together = spec.training.updates_together
    return _digest([_profiled(spec), pipeline, resources, cluster, order, together])


def links_key(spec: JobSpec, machine: str) -> str:
    """Hash of what measured links depend on: the resources, how ranks are started, and on which
    nodes.

    Args:
        machine: names the scheduler, and the host if jobs run on it.
    """
    resources = spec.resources.model_dump(exclude={"walltime"})
    launch = spec.launch.model_dump(include={"launcher", "mpi", "bind", "args"})
    nodes = [spec.slurm.partition, spec.pbs.queue, spec.pbs.select]
    options = sorted(
        (entry, text or "")
        for system, syntax in SYNTAXES.items()
        for name, value in getattr(spec, system).options.items()
        for option, text in options_of(name, value)
        if (entry := syntax.find(option, text, _NODE_OPTIONS[system]))
    )
    return _digest([machine, resources, launch, spec.environment.model_dump(), nodes, options])


def _profiled(spec: JobSpec) -> Any:
    sections = spec.model_dump(
        include={"model", "loss", "data", "optimizer"},
        exclude={"model": {"weights"}, "data": {"workers", "shuffle", "drop_last"}},
    )
    named = [(path, reference) for path, reference in spec.factories() if path[0] in sections]
    for path, reference in named:  # by content: the module's name, or the file's hash
        content = None if reference.file is None else _content(reference.file)
        sections[path[0]][path[-1]] = [reference.attribute, reference.module, content]
    optimizer = sections["optimizer"]
    for options in (optimizer["kwargs"], *optimizer["groups"]):
        # It changes neither times nor memory, and users vary it often.
        if isinstance(options.get("lr"), int | float):
            del options["lr"]
    load = spec.resources.model_dump(include={"tasks_per_node", "cpus_per_task"})
    if spec.threads != spec.resources.cpus_per_task:
        load["threads"] = spec.threads
    if spec.resources.gpus_per_node:  # their number does not change times on one of them
        load["accelerators"] = True
    if seed := hash_seed_of(spec.environment.variables):  # a model may be built from a set
        load["hash_seed"] = seed
    training = spec.training.model_dump(include={"batch_size", "precision"})
    micro_batches = spec.pipeline.model_dump()["micro_batches"]
    modules = user_sources(reference for _, reference in named)
    contents = {name: _content(path) for name, path in modules.items()}
    return [sections, training, load, micro_batches, contents]


def _content(path: Path) -> str | None:
    """Hash of a file; None if it cannot be read, which loading or capture will report."""
    try:
        return hashlib.sha256(read_source(path)).hexdigest()
    except OSError:
        return None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(_ordered(value)).encode()).hexdigest()


def _ordered(value: Any) -> Any:
    """Mappings as sorted pairs, because keys of keyword arguments may have mixed types."""
    if isinstance(value, dict):
        pairs = [[repr(key), _ordered(item)] for key, item in value.items()]
        return sorted(pairs, key=lambda pair: str(pair[0]))
    return [_ordered(item) for item in value] if isinstance(value, list | tuple) else value
