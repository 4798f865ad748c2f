"""Jobs of several components: nodes of different kinds, and one MPI job over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipectl.batch.protocol import JobRequest
from pipectl.errors import SchedulerError
from pipectl.runs import RUN_VARIABLE

HYDRA_STARTS = ("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP")
"""Beginnings of the variables with which a job starts the proxies of MPICH in a way of its own."""

# A step reaches the nodes of one component. What starts processes on a node is told its name, so
# the component is looked up.
_AGENT = f"""\
cat >"${RUN_VARIABLE}/agent" <<'AGENT'
#!/bin/bash
while [[ ${{1-}} == -* ]]; do shift; done
host=$1
shift
read -r component _ < <(grep -F " $host " "${RUN_VARIABLE}/components")
exec srun --het-group="$component" --nodes=1 --ntasks=1 --nodelist="$host" --mpi=none \\
    --export=ALL /bin/bash -c "trap '' USR1 USR2; $*"
AGENT
chmod u+x "${RUN_VARIABLE}/agent"
export HYDRA_LAUNCHER=ssh HYDRA_LAUNCHER_EXEC="${RUN_VARIABLE}/agent\""""


def components(request: JobRequest) -> list[JobRequest]:
    """A request for each kind of nodes, the first one first.

    Each has an account of its own in Slurm's eyes; a job is charged to one.
    """
    common = {key: getattr(request.slurm, key) for key in ("account", "qos", "exclusive", "omit")}
    others = [
        replace(
            request,
            nodes=kind.nodes,
            tasks_per_node=kind.tasks_per_node,
            memory_per_node_bytes=kind.memory_per_node_bytes,
            slurm=replace(kind.slurm, **common),
            more=(),
        )
        for kind in request.more
    ]
    return [replace(request, more=()), *others]


def options_of_components(request: JobRequest) -> tuple[str, ...]:
    """Of mpiexec, by which it knows the nodes of all components of a job that has several.

    Raises:
        SchedulerError: this mpiexec cannot be told.
    """
    if not request.more:
        return ()
    if request.mpi == "openmpi":
        raise SchedulerError(
            "resources.more: mpiexec of Open MPI does not reach nodes of several kinds on Slurm",
            cure="launch: {launcher: srun, mpi: pmix}",
        )
    return ("-f", "hosts")


def hosts_of_components(request: JobRequest) -> Iterator[str]:
    """Shell lines that list the nodes, with their ranks, for mpiexec, and let it reach them.

    None for a job of one component.
    """
    if not request.more:
        return
    yield "unset SLURMD_NODENAME # mpiexec would take it to all nodes"
    yield f'rm -f "${RUN_VARIABLE}"/{{hosts,components}}'
    for number, part in enumerate(components(request)):
        yield f'for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_{number}"); do'
        yield f'    echo "$node:{part.tasks_per_node}" >>"${RUN_VARIABLE}/hosts"'
        yield f'    echo "{number} $node " >>"${RUN_VARIABLE}/components"'
        yield "done"
    if not request.has_variable(*HYDRA_STARTS):
        yield _AGENT
