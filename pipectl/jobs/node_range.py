"""Plans for a range of nodes (``resources.nodes: 2-8``): one for each number that a start may get.

Results depend on the number of micro-batches, so all plans have the same, which fits on the fewest
nodes, too. They are made at submission, or in the job if only that can measure the model; numbers
of nodes that are left out then are planned when a start gets them. The plans of a run are in its
directory ``range``, beside the cluster of all nodes; a start copies its own to ``plan.json``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipectl.cluster import Cluster
from pipectl.errors import DataFileError, InfeasibleError
from pipectl.files import make_private_directory, write_text
from pipectl.jobs.job import with_count
from pipectl.jobs.output import complete_cluster, read_plan
from pipectl.jobs.planning import PlanInputs, plan_job, write_plan
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.request import Planner
from pipectl.profile import Profile
from pipectl.runs import RunDirectory, read_nodes, start_of_job
from pipectl.spec import JobSpec
from pipectl.units import Report, plural

MAX_PLANS = 16
"""Of a longer range, this many numbers of nodes are planned at once."""


def plan_range(
    spec: JobSpec,
    profile: Profile,
    cluster: Cluster,
    progress: Report | None = None,
    *,
    kept_micro_batches: int | None = None,
    must_keep: bool = False,
    also: Iterable[int] = (),
    planner: Planner = make_plan,
) -> dict[int, Plan]:
    """Plan a job for the numbers of nodes in its range, all with the same micro-batches.

    Numbers between the ends for which no plan fits are left out.

    Args:
        cluster: all nodes, complete.
        kept_micro_batches: their number in an earlier plan; None lets the planner choose it, as far
            as the job does.
        must_keep: whether no other number may take its place if no plan fits on the fewest nodes.
        also: further numbers of nodes.
        planner: see :func:`plan_job`.

    Raises:
        InfeasibleError: none fits on the fewest nodes, or on the most.
    """
    nodes = spec.resources.node_range
    assert nodes is not None
    lowest, highest = nodes.lowest, nodes.highest

    def plan(count: int, kept: int | None) -> Plan:
        own, part = with_count(spec, count), first_nodes(cluster, spec, count)
        return plan_job(own, profile, part, progress, kept, planner)

    def plan_lowest(kept: int | None) -> Plan:
        try:
            return plan(lowest, kept)
        except InfeasibleError as error:
            error.message = (
                f"resources.nodes: {nodes}: on {plural(lowest, 'node')}: {error.message}"
            )
            error.hint = f"raise the lowest number of nodes, or: {error.hint}"
            raise

    plans = {highest: plan(highest, kept_micro_batches)}
    kept = plans[highest].micro_batches
    try:
        plans[lowest] = plan_lowest(kept)
    except InfeasibleError:
        if must_keep or spec.pipeline.micro_batches is not None:
            raise
        plans[lowest] = plan_lowest(None)  # smaller micro-batches may fit
        kept = plans[lowest].micro_batches
        plans[highest] = plan(highest, kept)
    for count in sorted({*nodes.spread(MAX_PLANS), *also} - plans.keys()):
        with suppress(InfeasibleError):
            plans[count] = plan(count, kept)
    return dict(sorted(plans.items()))


def find_plans(
    spec: JobSpec, profile: Profile, cluster: Cluster, path_of: Callable[[int], Path]
) -> dict[int, Plan]:
    """The up-to-date plans of a job for its range of nodes; none if one is missing for the fewest
    or the most of them.

    Args:
        cluster: all nodes, complete.
        path_of: file of the plan for a number of nodes.
    """
    nodes, plans = spec.resources.node_range, dict[int, Plan]()
    assert nodes is not None
    for count in nodes.spread(MAX_PLANS):
        part = first_nodes(cluster, spec, count)
        plan = read_plan(path_of(count), with_count(spec, count), profile, part)
        if plan is not None:
            plans[count] = plan
    same = {plan.micro_batches for plan in plans.values()}
    is_whole = {nodes.lowest, nodes.highest} <= plans.keys() and len(same) == 1
    return plans if is_whole else {}


def first_nodes(cluster: Cluster, spec: JobSpec, nodes: int) -> Cluster:
    """A part of the cluster of all nodes of a job."""
    return cluster.with_ranks(nodes * spec.resources.tasks_per_node)


def plan_every_count(inputs: PlanInputs, planner: Planner) -> tuple[dict[int, Plan], PlanInputs]:
    """Plan for a range of nodes; the inputs then have the number of micro-batches of all plans.

    The plan for the highest number is found again with these inputs: its bound and the next best
    plans are then of the same number of micro-batches.
    """
    spec, request = inputs.spec, inputs.request
    assert spec is not None

    def plan(profile: Profile, cluster: Cluster, of_job: PlanRequest) -> Plan:
        asked = replace(inputs, profile=profile, request=replace(of_job, **inputs.changes)).fold()
        return planner(asked.profile, cluster, asked.request)

    kept = request.micro_batches if request.keeps_micro_batches else None
    plans = plan_range(spec, inputs.profile, inputs.cluster, kept_micro_batches=kept, planner=plan)
    count = plans[spec.resources.max_nodes].micro_batches
    keeps = request.keeps_micro_batches and count == request.micro_batches
    request = replace(request, micro_batches=count, keeps_micro_batches=keeps)
    return plans, replace(inputs, request=request)


def write_plans(run: RunDirectory, plans: Mapping[int, Plan], cluster: Cluster) -> None:
    """Write the plans of a run for its numbers of nodes, and last the cluster of all nodes."""
    shutil.rmtree(run.range, ignore_errors=True)
    if not plans:
        return
    make_private_directory(run.range)
    for count, plan in plans.items():
        plan.save(plan_file(run, count))
    cluster.save(run.range / "cluster.json")


def plan_file(run: RunDirectory, nodes: int) -> Path:
    """A run's plan for a number of nodes."""
    return run.range / f"plan-{nodes}.json"


def granted_nodes(run: RunDirectory) -> int:
    """The number of nodes that the job script has found at this start.

    Raises:
        DataFileError: it has written none.
    """
    start = start_of_job(run)
    if found := read_nodes(start):
        return found
    raise DataFileError(f"{start.nodes}: is no number of nodes", hint="pipectl resume RUN")


def adopt_plan(run: RunDirectory, spec: JobSpec, progress: Report | None = None) -> None:
    """Make the plan for the nodes of this start that of the run, and write how many nodes it takes.

    It is the present plan, one of the range, or a new one. If none fits the number of nodes, one
    for fewer is used.

    Raises:
        InfeasibleError: none fits at all.
    """
    nodes = spec.resources.node_range
    assert nodes is not None
    every = Cluster.load(run.range / "cluster.json")
    present = Plan.load(run.plan if run.plan.exists() else plan_file(run, nodes.highest))
    granted = nodes.nearest(granted_nodes(run))
    failures = list[InfeasibleError]()
    for count in range(granted, nodes.lowest - 1, -1):
        cluster = first_nodes(every, spec, count)
        try:
            plan = present
            if present.ranks != cluster.ranks:
                own, kept = with_count(spec, count), present.micro_batches
                profile, _ = complete_cluster(spec, Profile.load(run.profile), cluster)
                found = read_plan(plan_file(run, count), own, profile, cluster)
                if found is None or found.micro_batches != kept:
                    found = plan_job(own, profile, cluster, progress, kept)
                plan = found
        except InfeasibleError as error:
            failures.append(error)
            continue
        if plan is not present or not run.plan.exists():
            if starts := start_of_job(run).number - 1:
                run.put_aside(run.trace_before(starts))
            cluster.save(run.cluster)
            write_plan(run, plan, cluster)
        write_text(start_of_job(run).nodes, f"{count}\n")
        return
    raise failures[0]
