"""The allocation in which a command runs, such as that of `salloc` or `qsub -I`.

Its jobs are processes beside the shell, as on this machine, with the launcher of the system whose
allocation it is. They outlive the shell, but not the allocation.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pipectl.batch import get_scheduler, queued_systems
from pipectl.batch.limits import Misfit, Queue
from pipectl.batch.local import LocalScheduler
from pipectl.batch.request import JobRequest
from pipectl.batch.scheduler import QUEUES_TIMEOUT_S, Allocation, Scheduler
from pipectl.batch.script import render_script
from pipectl.control_groups import memory_of_machine
from pipectl.errors import InvalidInputError, SchedulerError
from pipectl.units import plural

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

_GRACE_S = 40.0
"""Slurm waits for 30 s by default before it kills the ranks of a step."""


def find_allocation() -> tuple[Scheduler, Allocation]:
    """Return the allocation in which this process runs, and its batch system.

    Raises:
        SchedulerError: it runs in none.
    """
    for name in queued_systems():
        system = get_scheduler(name, QUEUES_TIMEOUT_S)
        if (found := system.allocation()) is not None:
            return system, found
    raise SchedulerError(
        "here: this shell runs in no allocation of a batch system",
        hint="start one with `salloc` or `qsub -I`, and repeat the command in its shell;\n"
        "to submit a job: leave out --scheduler here; to train on this machine: --scheduler local",
    )


class HereScheduler(LocalScheduler):
    """Jobs in the allocation in which the command runs, without a queue."""

    name, title = "here", "this allocation"

    def __init__(self) -> None:
        super().__init__(_GRACE_S)

    def ping(self) -> None:
        find_allocation()

    def render(self, request: JobRequest) -> str:
        """The script of the allocation's own batch system, without what is for a queue."""
        system, allocation = find_allocation()
        self._refuse(request, allocation)
        checkpoint = request.checkpoint
        request = replace(
            request,
            checkpoint=checkpoint and checkpoint.model_copy(update={"max_requeues": 0}),
            resources=request.resources.model_copy(update={"walltime": _left_s(request)}),
        )
        resources = request.resources
        # Measuring is for a node, and the shell of salloc may be on another machine.
        cores = resources.tasks_per_node * resources.cpus_per_task
        cores = min([cores, *allocation.cores[: resources.max_nodes]])  # srun refuses more
        options = ("--nodes=1", "--ntasks=1", f"--cpus-per-task={cores}", "--cpu-bind=none")
        is_elsewhere = not allocation.is_on_node
        return render_script(
            "here.sh.j2",
            request,
            system.name,
            within=f"{system.name}.sh.j2",
            alone_on_node=("srun", *options, "--mpi=none") if is_elsewhere else (),
            nodes=allocation.nodes[: resources.max_nodes],
        )

    def _refuse(self, request: JobRequest, allocation: Allocation) -> None:
        """Refuse what needs a queue, and more nodes than the allocation has."""
        if request.array is not None:
            raise InvalidInputError(
                "sweep: cannot run in an allocation",
                hint="submit it without --scheduler here, or run its points one by one with --set",
            )
        if request.after:
            raise InvalidInputError(
                "--after: jobs in an allocation cannot wait for other runs",
                hint="run `pipectl submit --scheduler here --wait` for each in turn",
            )
        wanted, there = request.resources.max_nodes, len(allocation.nodes)
        if wanted > there:
            raise InvalidInputError(
                f"resources.nodes: {wanted} are asked for, and this allocation "
                f"({allocation.job_id}) has {there}",
                hint=f"--set resources.nodes={there}, or leave the key out to use all",
            )
        _refuse_cores(request, allocation)

    def misfit(self, queue: Queue, request: JobRequest) -> Misfit | None:  # noqa: ARG002
        _, allocation = find_allocation()
        wanted, there = request.resources.max_nodes, plural(len(allocation.nodes), "node")
        if wanted <= len(allocation.nodes):
            return None
        fault = f"this allocation ({allocation.job_id}) has {there}, and the job asks for {wanted}"
        return Misfit(fault, "lower resources.nodes")

    def walltime_of(self, request: JobRequest) -> int | None:
        return _left_s(request)

    def memory_of_rank(self, spec: JobSpec) -> int | None:
        system, allocation = find_allocation()
        sizes = [system.memory_of_node(allocation)]
        sizes += [memory_of_machine()] if allocation.is_on_node else []
        known = [size for size in sizes if size]
        return min(known) // spec.resources.tasks_per_node if known else None

    @property
    def system_of_nodes(self) -> str:
        return find_allocation()[0].name


def _refuse_cores(request: JobRequest, allocation: Allocation) -> None:
    """Refuse ranks for which srun asks for more cores than a node of the allocation has."""
    resources, is_shared = request.resources, {"--overcommit", "-O"} & {*request.launch.args}
    if request.launcher != "srun" or request.single_process or is_shared:
        return
    is_told = "cpus-per-task" not in request.slurm.options
    ranks, each = resources.tasks_per_node, resources.cpus_per_task if is_told else 1
    there = min(allocation.cores[: resources.max_nodes], default=ranks * each)
    if ranks * each > there:
        raise InvalidInputError(
            f"launch.launcher: srun starts no {ranks} ranks of {plural(each, 'core')} on a node "
            f"of which this allocation ({allocation.job_id}) has {plural(there, 'core')}",
            hint="lower resources.tasks_per_node or resources.cpus_per_task, or begin with "
            f"`salloc --ntasks-per-node={ranks} --cpus-per-task={each}`;\n"
            "for ranks that share cores: launch.args: [--overcommit]",
        )


def _left_s(request: JobRequest) -> int:
    """Return the seconds until the end of the allocation; the walltime of the job if its system
    does not tell."""
    system, allocation = find_allocation()
    try:
        status = system.query([allocation.job_id]).get(allocation.job_id)
    except SchedulerError:
        status = None
    if status is None or status.deadline is None:
        return request.resources.walltime
    return max(1, int(status.deadline - time.time()))
