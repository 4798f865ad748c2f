"""The answers of `pipectl plan`: the best plan, where its time goes, and what else would do.

`gather` puts together what a planner needs, :class:`PlanInputs`; `plan_step` and `plan_nodes` give
it to one.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipectl.cluster import ASSUMED_BETWEEN, Cluster, Device, Node
from pipectl.compiled import compiling_s
from pipectl.errors import UsageError
from pipectl.jobs.job import choose_scheduler
from pipectl.jobs.job_files import find_cluster, is_fresh, join_rows, plan_path, profile_path
from pipectl.jobs.planning import advise_other_micro_batches, kept_micro_batches, request_of
from pipectl.jobs.profiles import coupling_warning
from pipectl.plan import Plan
from pipectl.planner import PlanRequest
from pipectl.planner.baselines import OWN
from pipectl.planner.baselines.plans import policy_plans
from pipectl.planner.explain.busiest_link import LinkLoad, busiest_link
from pipectl.planner.explain.data_parallel import WithoutPipeline, without_pipeline
from pipectl.planner.explain.explain import Explanation, explain
from pipectl.planner.explain.scaling import Scaling, scaling
from pipectl.planner.explain.step_parts import StepParts, step_parts
from pipectl.planner.explain.what_if import step_range, with_bandwidth, with_ranks
from pipectl.planner.graph.imported import folded, prepared
from pipectl.planner.search import MAX_ALTERNATIVES, Found, search_plans
from pipectl.profile import Profile
from pipectl.report.recorded import corrected_profile
from pipectl.runs import find_run
from pipectl.simulate import Simulation, simulate
from pipectl.spec import load, load_text

MICRO_BATCHES_PER_DEVICE = 4
"""Of a step, if nobody says how large the batch is."""
_BATCH = "training.batch_size"
_JOB_OF_PROFILE = """\
model: "m:build"
loss: model
data: "m:data"
training: {{steps: 1, batch_size: 1000000000}}
pipeline: {{recompute: none, offload: none}}
resources: {{nodes: {ranks}, gpus_per_node: 1}}
"""
"""What a profile without a job is planned as; the batch is yet to be chosen."""
_TOTALS = "total memory of nodes (memory_bytes) counts for --objective max-stage-load only"


@dataclass(frozen=True)
class PlanInputs:
    """Everything a planner needs, and what people should know of it.

    Args:
        cluster_file: that the cluster is from; None for an assumed one.
        plan_file: where the job's own plan belongs; None if this is another one.
        warnings: about the profile and the choice.
        kept_micro_batches: those of the job's last plan, if the job leaves their number open.
        planner: name of the one to ask.
    """

    profile: Profile
    cluster: Cluster
    request: PlanRequest
    cluster_file: Path | None = None
    plan_file: Path | None = None
    warnings: tuple[str, ...] = ()
    kept_micro_batches: int | None = None
    planner: str = OWN

    def fold(self) -> PlanInputs:
        """With operators put together as plans for the shortest step have them."""
        profile = folded(prepared(self.profile))
        if any(operator.memory_bytes for operator in profile.operators):
            profile = replace(profile, assumptions=(*profile.assumptions, _TOTALS))
        return replace(self, profile=profile)


def gather(
    job: Path | None,
    profile: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    scheduler: str | None = None,
    cluster: Path | None = None,
    devices: int | None = None,
    nodes: Sequence[int] | None = None,
    new_micro_batches: bool = False,
    from_run: str | None = None,
) -> PlanInputs:
    """What there is to plan.

    Args:
        job: None plans a profile alone.
        profile: by default the job's own.
        overrides: ``--set`` of the job; without one, of its pipeline and its batch size.
        cluster: description of the machines, of which so many ``devices`` are used.
        nodes: numbers of nodes to compare.
        new_micro_batches: whether their number may differ from that of the job's last plan.
        from_run: name of a run of the job, whose recorded steps correct its profile.

    Raises:
        UsageError: nothing says on how many devices to plan, or there are fewer.
        DataFileError: a file is missing or damaged.
        SpecError: the job is wrong.
        InvalidInputError: a cluster description is wrong or is not of this job.
    """
    if job is None:
        if profile is None:
            raise UsageError("nothing to plan", cure="give JOB.yaml, or a profile: --profile FILE")
        return _gather_profile(Profile.load(profile), overrides, cluster, devices, nodes)
    if cluster is not None:  # quoted: names of files may mean something else in YAML
        name = json.dumps(str(cluster.absolute()), ensure_ascii=False)
        overrides = (*overrides, f"cluster={name}")
    spec = load(job, overrides)
    path, warnings = profile or profile_path(spec), []
    if from_run is None:
        job_profile = Profile.load(path)
    else:
        job_profile = corrected_profile(find_run(Path(spec.output.directory), from_run))
    if not is_fresh(spec, job_profile):
        changes = (word for each in overrides for word in ("--set", each))
        again = shlex.join(["pipectl", "profile", str(job), *changes])
        warnings.append(
            f"{path} was measured for other settings (model, data, optimizer, batch or ranks per "
            f"node); measure again with: {again}"
        )
    micro_batches = None if new_micro_batches or nodes is not None else kept_micro_batches(spec)
    choice = find_cluster(spec, choose_scheduler(spec, scheduler))
    warnings += [choice.warning, coupling_warning(spec, job_profile)]
    job_profile, all_machines = join_rows(job_profile, choice.cluster)
    machines = _use_devices(all_machines, devices, "--nodes 1,2,4 plans for other sizes")
    return PlanInputs(
        profile=job_profile,
        cluster=machines,
        request=request_of(spec, job_profile, machines, micro_batches),
        cluster_file=choice.file,
        plan_file=plan_path(spec) if devices is None else None,
        warnings=tuple(filter(None, warnings)),
        kept_micro_batches=micro_batches,
    )


def _gather_profile(
    profile: Profile,
    overrides: Sequence[str],
    file: Path | None,
    devices: int | None,
    nodes: Sequence[int] | None,
) -> PlanInputs:
    """A profile alone, on a described cluster or on equal devices, each a node of its own."""
    keys = [each.partition("=")[0].strip() for each in overrides]
    for key, override in zip(keys, overrides, strict=True):
        if key != _BATCH and not key.startswith("pipeline."):
            raise UsageError(
                f"--set {override}: there is no job to change",
                cure=f"name a JOB.yaml; without one, {_BATCH} and pipeline.* can be set",
            )
    if file is not None:
        cluster = Cluster.load(file)
    else:  # as many devices as asked for, else as an imported profile ships
        shipped = _shipped_number(profile, "accelerators", "devices")
        count = int((devices if nodes is None else max(nodes)) or shipped or 0)
        if not count:
            raise UsageError(
                "nothing says on how many devices to plan",
                cure="give --devices N, or describe the machines: --cluster FILE",
            )
        each = tuple(Node(f"device{index}", 1, 1, Device("device")) for index in range(count))
        source = f"{count} equal devices"
        cluster = Cluster("equal devices", source, each, ASSUMED_BETWEEN, ASSUMED_BETWEEN)
        rate = _shipped_number(profile, "bandwidth_bytes_per_s", "transfer_bytes_per_s_effective")
        cluster = cluster if rate is None else with_bandwidth(cluster, rate)
    cluster = _use_devices(cluster, devices, "describe more of them in the cluster file")
    spec = load_text(_JOB_OF_PROFILE.format(ranks=cluster.ranks), overrides)
    limit_bytes = int(_shipped_number(profile, "memory_limit_bytes") or 0)
    request = request_of(spec, profile, cluster)
    request = replace(
        request,
        name=profile.name,
        memory_limit_bytes=request.memory_limit_bytes or limit_bytes or None,
        key=None,
        every_schedule=False,  # lab plan --allow schedules opens them
        from_job=False,
    )
    if _BATCH not in keys:
        shipped = _shipped_number(profile, "microbatches_in_batch")
        count = request.micro_batches or int(shipped or MICRO_BATCHES_PER_DEVICE * cluster.ranks)
        request = replace(request, batch_size=profile.micro_batch_size * count)
        if request.micro_batches is not None or shipped is None:
            assumed = (
                f"the batch is not given: taken as {request.batch_size} samples "
                f"(--set {_BATCH}=N sets it)"
            )
            profile = replace(profile, assumptions=(*profile.assumptions, assumed))
    return PlanInputs(profile, cluster, request, file)


def _shipped_number(profile: Profile, *keys: str) -> float | None:
    """What an imported profile says of the devices it is meant for."""
    values = (profile.cluster.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int | float) and value > 0), None)


def _use_devices(cluster: Cluster, devices: int | None, cure: str) -> Cluster:
    if devices is None:
        return cluster
    if devices > cluster.ranks:
        raise UsageError(
            f"--devices {devices}: the cluster {cluster.name!r} has {cluster.ranks} ranks",
            cure=cure,
        )
    return with_ranks(cluster, devices)


class Deadline:
    """Asked by the planner now and then whether it has to come to an end.

    Args:
        budget_s: for each plan; None for as long as it takes.

    Attributes:
        interrupted: whether the user ended it.
        cut_short: whether a planner was told that time is up.
    """

    def __init__(
        self, budget_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget_s = budget_s
        self.interrupted = self.cut_short = False
        self._clock = clock
        self._started_s = clock()

    def __call__(self) -> bool:
        """Whether time is up."""
        late = self.budget_s is not None and self._clock() - self._started_s >= self.budget_s
        self.cut_short = self.cut_short or late or self.interrupted
        return late or self.interrupted

    def restart(self) -> None:
        """Begin the budget of the next plan; an interrupt holds for all."""
        self._started_s = self._clock()

    def interrupt(self) -> None:
        """Have the planner end as soon as it can."""
        self.interrupted = True


@dataclass(frozen=True)
class StepAnswer:
    """The plan with the shortest step, where its time goes, and what else would do.

    Args:
        simulation: of the plan.
        range_s: of a step, see :func:`pipectl.planner.explain.what_if.step_range`.
        parts: how the busiest rank spends a step.
        link: that carries messages longest; None if there are none.
        stopped: what ended the search early; empty if nothing did.
        without: what a step takes without a pipeline; None if planning was interrupted.
        explanation: None unless asked for.
        compiling_s: of the search, what compiling the planner took.
    """

    inputs: PlanInputs
    plan: Plan
    simulation: Simulation
    parts: StepParts
    link: LinkLoad | None
    stopped: str
    without: WithoutPipeline | None
    explanation: Explanation | None
    compiling_s: float
    range_s: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan as its file holds it, and what was asked: the objective and its value."""
        from pipectl.runtime.supported import unsupported

        plan, search = self.plan, self.plan.search
        document = plan.to_json()
        for stage in document["stages"]:
            stage |= {"replicas": len(stage["ranks"]), "devices": stage["ranks"]}
        document |= {
            "objective": "step-time",
            "value_s": plan.predicted_step_s,
            "lower_bound_s": search and search.step_lower_bound_s,
            "gap": search and search.gap,
            "planning_s": search and search.planning_s,
            "predicted": document["prediction"],
            "range_s": self.range_s,
            "cannot_run": unsupported(plan),
            "without_pipeline": self.without and self.without.to_json(plan),
            "cut_short": bool(self.stopped),
            "compiling_s": self.compiling_s,
        }
        if self.explanation is not None:
            document["explanation"] = self.explanation.to_json()
        return document


def plan_step(
    inputs: PlanInputs, deadline: Deadline, tell: Callable[[str], None], *, explained: bool
) -> StepAnswer:
    """The plan with the shortest step.

    Args:
        tell: called with what goes on next.
        explained: whether to plan anew for other choices and machines, too.

    Raises:
        InfeasibleError: nothing fits; the message says how much is missing.
    """
    subject = inputs.profile, inputs.cluster, inputs.request
    with advise_other_micro_batches(inputs.kept_micro_batches):
        before_s = compiling_s()
        best = _search(inputs.planner, deadline, *subject)
        spent_s = compiling_s() - before_s
        stopped = ""
        if deadline.cut_short:
            stopped = "by Ctrl-C" if deadline.interrupted else f"after {deadline.budget_s} s"
        without = explanation = None
        if not deadline.interrupted:
            tell("comparing with other ways to train")
            without = without_pipeline(*subject, partial(_plan, OWN, deadline))
        if explained:
            tell("explaining")
            again = partial(_plan, inputs.planner, deadline)
            explanation = explain(
                best.plan, *subject, again, best.alternatives, lambda: deadline.interrupted
            )
    simulation = simulate(best.plan, inputs.cluster)
    parts = step_parts(best.plan, inputs.cluster, simulation)
    link = busiest_link(best.plan, inputs.cluster)
    range_s = step_range(best.plan, inputs.cluster)
    return StepAnswer(
        inputs, best.plan, simulation, parts, link, stopped, without, explanation, spent_s, range_s
    )


def plan_nodes(
    inputs: PlanInputs, nodes: Sequence[int], deadline: Deadline, tell: Callable[[str], None]
) -> Scaling:
    """The best plan of the same step on each number of nodes."""
    return scaling(
        inputs.profile,
        inputs.cluster,
        inputs.request,
        nodes,
        partial(_plan, inputs.planner, deadline),
        lambda count: tell(f"planning for {count} nodes"),
    )


def _plan(
    planner: str, deadline: Deadline, profile: Profile, cluster: Cluster, request: PlanRequest
) -> Plan:
    return _search(planner, deadline, profile, cluster, request).plan


def _search(
    planner: str, deadline: Deadline, profile: Profile, cluster: Cluster, request: PlanRequest
) -> Found:
    """The best plan of a planner until the deadline, and the next best."""
    deadline.restart()
    if planner == OWN:
        return search_plans(profile, cluster, request, deadline)
    started_s = time.perf_counter()
    plan, *others = policy_plans(planner, profile, cluster, request, deadline)
    assert plan.search is not None, "planners say how they found a plan"
    searched = replace(plan.search, planning_s=time.perf_counter() - started_s)
    return Found(replace(plan, search=searched), tuple(others[:MAX_ALTERNATIVES]))
