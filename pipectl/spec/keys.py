"""Keys that tell whether a profile or plan still belongs to a spec.

A key is a hash of the sections that the file depends on, and of the contents of their Python files
and of the user's modules that these import. Locations of files do not count.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipectl.directives import SCHEDULERS, SYNTAXES, options_of
from pipectl.hash_seed import VARIABLE, hash_seed_of
from pipectl.spec.code import read_source
from pipectl.spec.models import JobSpec

_NODE_OPTIONS = {
    "slurm": (
        "--constraint -C", "--contiguous", "--distribution -m", "--exclude -x", "--exclusive",
        "--extra-node-info -B", "--gpus -G", "--gpus-per-node", "--gpus-per-task", "--gres",
        "--network", "--nodefile -F", "--nodelist -w", "--reservation", "--switches",
    ),
    "pbs": ("-l",),
}  # fmt: skip
"""Options that choose the nodes of a job, and the places of ranks on them, by batch system."""
_HARDWARE_OPTIONS = {"slurm": ("--constraint -C", "--gpus -G", "--gres"), "pbs": ("-l",)}
"""Options that choose the kind of the nodes."""
_AMOUNTS = re.compile(
    r"(?:mem|pmem|vmem|pvmem|cput|pcput|file|nice|min_walltime|max_walltime)=[^:,+]*"
)
"""Resources of PBS that choose no nodes."""
_MPI_VARIABLES = re.compile(
    "(?:COLL|FI|HCOLL|HFI|HYDRA|IBV|I_MPI|LD|MPI4PY|MPICH|MPIR|MV2|MVP|NCCL|OMPI|OPAL|ORTE|PALS"
    "|PMI|PMIX|PMI2|PRTE|PSM|PSM2|PSM3|RCCL|RDMAV|SHARP|UCC|UCX)_.*|PATH"
)
"""Variables that choose or configure the MPI library and what it sends through."""


_COMPUTING_VARIABLES = re.compile(
    "(?:BLIS|CU(BLAS|DA|DNN)|DNNL|GOMP|HF|HIP|HSA|KMP|LD|MALLOC|MIOPEN|MKL|NVIDIA|OMP|ONEDNN|"
    "OPENBLAS|PYTORCH|ROC(BLAS|M)|TORCH(INDUCTOR)?|TRANSFORMERS|TRITON)_.*|PYTHONPATH"
)
"""Variables that choose or configure what computes."""
_SECRET_VARIABLES = re.compile(".*(?:KEY|PASSW|SECRET|TOKEN).*")


def profile_key(spec: JobSpec) -> str:
    """Hash of what a profile depends on: user code, batch, kind and load of nodes, torch."""
    return _digest(_profiled(spec))


def evaluation_key(spec: JobSpec) -> str | None:
    """Hash of held-out data and metrics; None without an evaluation."""
    if spec.evaluation is None:
        return None
    sections = spec.evaluation.model_dump(
        include={"data", "metrics"}, exclude={"data": {"workers"}}
    )
    places = {"evaluation", "script"} if spec.evaluation.data.is_of_script else {"evaluation"}
    named = [each for path, each in spec.factories() if path[0] in places]
    files = [None if each.file is None else _content(each.file) for each in named]
    modules = {name: _content(path) for name, path in spec.sources(named).items()}
    return _digest([sections, files, modules])


def script_key(spec: JobSpec) -> str | None:
    """Hash of what the first steps of a job's script by itself depend on; None without one."""
    if spec.script is None:
        return None
    named = [each for path, each in spec.factories() if path[0] == "script"]
    modules = spec.sources(named)
    contents = {name: _content(path) for name, path in modules.items()}
    files = [each.file for each in named if each.file is not None]
    variables = _variables_of(spec, {*files, *modules.values()})
    seeds = spec.training.seed, hash_seed_of(spec.environment.variables)
    section = spec.script.model_dump(exclude={"drawn_between_epochs"})
    return _digest([section, [_content(file) for file in files], contents, variables, seeds])


def plan_key(spec: JobSpec) -> str:
    """Hash of what a plan depends on: the profile, the pipeline, the ranks and the cluster."""
    pipeline = spec.pipeline.model_dump()
    cluster = None if spec.cluster is None else _content(Path(spec.cluster))
    order = None
    if spec.schedule_file is not None:
        order = _content(spec.schedule_file)
        pipeline["schedule"] = spec.schedule_file.name
    resources = spec.resources.model_dump(exclude={"walltime"})
    training: list[Any] = [spec.training.updates_together, spec.training.compile]
    if spec.training.reproducible:
        training.append("reproducible")
    if spec.training.correct_delay:
        training.append("correct_delay")
    if spec.data.drop_last:  # no batch is smaller than the others
        training.append("drop_last")
    if (evaluation := spec.evaluation) is not None:  # its memory
        size = evaluation.batch_size
        training.append(["evaluation", size, size and evaluation_key(spec)])
    return _digest([_profiled(spec), pipeline, resources, cluster, order, training])


def links_key(spec: JobSpec, scheduler: str, host: str = "") -> str:
    """Hash of what measured links depend on: the ranks and cores of nodes, which nodes these are,
    how ranks are started, and the software between them.

    A second hash, after a hyphen, is of what they may depend on: the lines of
    ``environment.setup``.

    Args:
        scheduler: name of the batch system; only what chooses its nodes counts.
        host: name of this host if jobs run on it.
    """
    resources = spec.resources.model_dump(exclude={"walltime", "memory_per_node"})
    resources["nodes"] = spec.resources.max_nodes
    launch = spec.launch.model_dump(include={"launcher", "mpi", "bind", "args"})
    environment = spec.environment
    software = [environment.modules, _container_of(spec)]
    variables = {
        name: value
        for name, value in environment.variables.items()
        if _MPI_VARIABLES.fullmatch(name)
    }
    nodes = _nodes_of(spec, scheduler, _NODE_OPTIONS.get(scheduler, ()))
    certain = _digest([scheduler, host, resources, launch, software, variables, nodes])
    return f"{certain}-{_digest(environment.setup)}"


def _nodes_of(spec: JobSpec, scheduler: str, options: Sequence[str]) -> Any:
    """What chooses the nodes of a job in a batch system.

    Args:
        options: that count.
    """
    if scheduler not in SYNTAXES:  # which of its options choose nodes, only a package knows
        return spec.launch.options if scheduler not in SCHEDULERS and spec.launch.options else None
    section = getattr(spec, scheduler)
    written = (
        (option, _AMOUNTS.sub("", text or ""), text)
        for name, value in section.options.items()
        for option, text in options_of(name, value)
    )
    chosen = sorted(
        (entry, rest)
        for option, rest, text in written
        if (entry := SYNTAXES[scheduler].find(option, text, options)) and bool(rest) == bool(text)
    )
    if scheduler == "slurm":
        return [section.partition, chosen]
    return [section.queue, _AMOUNTS.sub("", section.select or ""), chosen]


def _profiled(spec: JobSpec) -> Any:
    sections = spec.model_dump(
        include={"script", "model", "loss", "data", "optimizer"},
        exclude={"model": {"weights"}, "data": {"workers", "shuffle", "drop_last", "read"}},
    )
    if spec.script is None:
        del sections["script"]
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
    if spec.launch.options:  # they may choose another kind of node
        load["options"] = spec.launch.options
    arithmetic = {"precision", "float32_matmul_precision", "deterministic"}
    training = spec.training.model_dump(include={"batch_size", *arithmetic})
    training["clips"] = spec.training.clip_grad_norm is not None
    # Another kind of node, or another torch; and who loads samples, whose time counts.
    where = [_nodes_of(spec, name, options) for name, options in _HARDWARE_OPTIONS.items()]
    where += [spec.environment.modules, _container_of(spec), spec.data.workers > 0]
    micro_batches = spec.pipeline.model_dump()["micro_batches"]
    modules = spec.sources(reference for _, reference in named)
    files = [reference.file for _, reference in named if reference.file is not None]
    if variables := _variables_of(spec, {*files, *modules.values()}):
        load["variables"] = variables
    contents = {name: _content(path) for name, path in modules.items()}
    return [sections, training, load, micro_batches, contents, where]


def _container_of(spec: JobSpec) -> Any:
    """What chooses the software in the container; its runtime and its directories do not."""
    container = spec.environment.container
    return None if container is None else container.model_dump(include={"image", "args"})


def _variables_of(spec: JobSpec, sources: Iterable[Path]) -> dict[str, str]:
    """The variables of the job that what is measured may depend on: those that the user's files
    name, and those of libraries that compute.

    Args:
        sources: the user's files.
    """
    named = set[str]()
    for path in sources if spec.environment.variables else ():
        with suppress(OSError):
            named.update(re.findall(r"\w+", read_source(path).decode("utf-8", "replace")))
    return {
        name: value
        for name, value in spec.environment.variables.items()
        if (name in named or _COMPUTING_VARIABLES.fullmatch(name))
        and name != VARIABLE
        and not _SECRET_VARIABLES.fullmatch(name)
    }


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
