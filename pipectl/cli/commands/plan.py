"""`pipectl plan`: cut the model into stages and show what to expect.

`gather` puts together what a planner needs, :class:`PlanInputs`. With a :class:`PlanSearch`,
`plan_step` finds the best plan, where its time goes, and what else would do.
"""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from rich.console import Group

from pipectl.cli import options as opt
from pipectl.cli.console import note, output, plain, say, say_json, short_path, warn
from pipectl.cli.progress import progress_bar
from pipectl.cli.views import plan as view
from pipectl.cluster import ASSUMED_BETWEEN, Cluster, Device, Node
from pipectl.compiled import compiling_s
from pipectl.errors import UsageError
from pipectl.files import make_directory_of, write_text
from pipectl.jobs.job_files import find_cluster, is_fresh, join_rows, plan_path, profile_path
from pipectl.jobs.planning import advise_other_micro_batches, kept_micro_batches, request_of
from pipectl.jobs.prepare import choose_scheduler
from pipectl.jobs.profiles import coupling_warning
from pipectl.plan import Plan
from pipectl.planner import PlanRequest
from pipectl.planner.baselines import OWN
from pipectl.planner.baselines.plans import policy_plans
from pipectl.planner.explain.busiest_link import LinkLoad, busiest_link
from pipectl.planner.explain.data_parallel import WithoutPipeline, without_pipeline
from pipectl.planner.explain.explain import Explanation, explain
from pipectl.planner.explain.scaling import scaling
from pipectl.planner.explain.step_parts import StepParts, step_parts
from pipectl.planner.explain.what_if import step_range, with_bandwidth, with_ranks
from pipectl.planner.graph.imported import folded, prepared
from pipectl.planner.search import MAX_ALTERNATIVES, Found, search_plans
from pipectl.profile import Profile
from pipectl.report.gantt import gantt_svg
from pipectl.report.recorded import corrected_profile
from pipectl.runs import find_run
from pipectl.simulate import Simulation, simulate
from pipectl.spec import SpecFile, load

_MAX_NODES = 100_000
_MICRO_BATCHES_PER_DEVICE = 4
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

JOB_FILE = typer.Argument(
    None, metavar="[JOB.yaml]", help="The job spec; not needed with --profile."
)
PROFILE_FILE = opt.value("FILE", "Profile to use; by default runs/NAME.profile.json.", "--profile")
CLUSTER_FILE = opt.value("FILE", "Cluster description to use (cluster.json).", "--cluster")
DEVICES = opt.count("Number of devices to use.")
NODE_COUNTS = opt.value("N,N,…", "Compare these numbers of nodes.", "--nodes")
EXPLAIN = opt.flag("Explain the step and say what would help.", "--explain")
SVG_FILE = opt.value("FILE", "Write a picture of the predicted step to this file.")


def command(
    job: Path | None = JOB_FILE,
    profile_file: Path | None = PROFILE_FILE,
    cluster: Path | None = CLUSTER_FILE,
    devices: int | None = DEVICES,
    scheduler: opt.SchedulerName | None = opt.SCHEDULER,
    nodes: list[str] | None = NODE_COUNTS,
    new_micro_batches: bool = opt.flag(
        "Do not keep the number of micro-batches of the previous plan.", "--new-micro-batches"
    ),
    from_run: str | None = opt.value(
        "RUN", "Correct the profile by what the recorded steps of a run took.", "--from-run"
    ),
    explain: bool = EXPLAIN,
    output_file: Path | None = opt.value(
        "FILE", "File to write; by default runs/NAME.plan.json.", "-o", "--output"
    ),
    svg: Path | None = SVG_FILE,
    as_json: bool = opt.JSON,
    overrides: list[str] | None = opt.OVERRIDES,
) -> None:
    about_jobs = {
        "--scheduler": scheduler,
        "--new-micro-batches": new_micro_batches,
        "--from-run": from_run,
    }
    if job is None:
        opt.refuse(about_jobs, "needs a JOB.yaml")
    of_one_plan = {"--devices": devices, "-o": output_file, "--svg": svg, "--explain": explain}
    counts = node_counts(nodes, of_one_plan)
    inputs = gather(
        job, profile_file, overrides or (), scheduler=scheduler, cluster=cluster, devices=devices,
        nodes=counts, new_micro_batches=new_micro_batches, from_run=from_run,
    )  # fmt: skip
    if from_run is not None and inputs.plan_file is not None and output_file is None:
        corrected = inputs.plan_file.with_name(f"{inputs.request.name}.profile.json")
        inputs.profile.save(corrected)
        note(f"profile: {short_path(corrected)}, {inputs.profile.source.rpartition('; ')[2]}")
    show(
        inputs, PlanSearch(), counts,
        explained=explain, output_file=output_file or inputs.plan_file, svg=svg, as_json=as_json,
    )  # fmt: skip


def node_counts(
    texts: list[str] | None, of_one_plan: Mapping[str, object]
) -> tuple[int, ...] | None:
    """Whole numbers above 0 with commas between them: ``1,2,4``; None if none is given.

    Args:
        of_one_plan: options that have no meaning when several are compared, by name.

    Raises:
        UsageError: a text is something else, or such an option is given, too.
    """
    if not texts:
        return None
    opt.refuse(of_one_plan, "cannot be used with --nodes, which makes several plans")
    text = ",".join(texts)
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--nodes: {text!r} is not a list of numbers", cure="write for example 1,2,4"
        ) from None
    if not all(0 < number <= _MAX_NODES for number in counts):
        raise UsageError(f"--nodes: {text!r}: each must be from 1 to {_MAX_NODES:,}")
    return counts


@dataclass(frozen=True)
class PlanInputs:
    """Everything a planner needs, and what people should know of it.

    Args:
        cluster_file: that the cluster is from; None for an assumed one.
        plan_file: where the job's own plan belongs; None if this is another one.
        warnings: about the profile and the choice.
        kept_micro_batches: those of the job's last plan, if the job leaves their number open.
    """

    profile: Profile
    cluster: Cluster
    request: PlanRequest
    cluster_file: Path | None = None
    plan_file: Path | None = None
    warnings: tuple[str, ...] = ()
    kept_micro_batches: int | None = None

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
        UsageError: the number of devices is missing, or there are fewer.
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
                "the number of devices is missing",
                cure="give --devices N, or describe the machines: --cluster FILE",
            )
        each = tuple(Node(f"device{index}", 1, 1, Device("device")) for index in range(count))
        source = f"{count} equal devices"
        cluster = Cluster("equal devices", source, each, ASSUMED_BETWEEN, ASSUMED_BETWEEN)
        rate = _shipped_number(profile, "bandwidth_bytes_per_s", "transfer_bytes_per_s_effective")
        cluster = cluster if rate is None else with_bandwidth(cluster, rate)
    cluster = _use_devices(cluster, devices, "describe more of them in the cluster file")
    text = _JOB_OF_PROFILE.format(ranks=cluster.ranks)
    spec = SpecFile.read(Path("job"), overrides, (), text).spec(check_files=False)
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
        count = request.micro_batches or int(shipped or _MICRO_BATCHES_PER_DEVICE * cluster.ranks)
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


class PlanSearch:
    """A planner, which ends with the best plan so far after a time limit or an interrupt.

    Args:
        planner: its name.
        budget_s: for each plan; None for as long as it takes.

    Attributes:
        interrupted: whether the user ended it, which holds for all further plans.
        cut_short: whether a planner was told that time is up.
    """

    def __init__(
        self,
        planner: str = OWN,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.planner, self.budget_s, self._clock = planner, budget_s, clock
        self.interrupted = self.cut_short = False
        self._started_s = clock()

    def expired(self) -> bool:
        """Whether time is up; planners ask now and then."""
        late = self.budget_s is not None and self.elapsed_s >= self.budget_s
        self.cut_short = self.cut_short or late or self.interrupted
        return late or self.interrupted

    def restart(self) -> None:
        """Begin the budget of the next plan."""
        self._started_s = self._clock()

    @property
    def elapsed_s(self) -> float:
        """Since the last restart."""
        return self._clock() - self._started_s

    def find(
        self, profile: Profile, cluster: Cluster, request: PlanRequest, planner: str | None = None
    ) -> Found:
        """The best plan, and the next best.

        Args:
            planner: name of another planner.
        """
        self.restart()
        if (planner := planner or self.planner) == OWN:
            return search_plans(profile, cluster, request, self.expired)
        plan, *others = policy_plans(planner, profile, cluster, request, self.expired)
        assert plan.search is not None, "planners say how they found a plan"
        searched = replace(plan.search, planning_s=self.elapsed_s)
        return Found(replace(plan, search=searched), tuple(others[:MAX_ALTERNATIVES]))

    def plan(
        self, profile: Profile, cluster: Cluster, request: PlanRequest, planner: str | None = None
    ) -> Plan:
        """The best plan; see :meth:`find`."""
        return self.find(profile, cluster, request, planner).plan

    @contextmanager
    def interruptible(self) -> Iterator[Callable[[str], None]]:
        """Within, Ctrl-C ends planning with what it has; the second one aborts.

        Gives a function ``tell(what)`` that says what goes on from then.
        """

        def stop(_number: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.interrupted = True
            note("stopping with the best plan so far; Ctrl-C again aborts", style="")

        before = signal.signal(signal.SIGINT, stop)
        try:
            with progress_bar("planning") as report:
                report(0, 0, "planning (Ctrl-C: the best so far)")
                yield lambda what: report(0, 0, what)
        finally:
            signal.signal(signal.SIGINT, before)


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
    inputs: PlanInputs, search: PlanSearch, tell: Callable[[str], None], *, explained: bool
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
        best = search.find(*subject)
        spent_s = compiling_s() - before_s
        stopped = ""
        if search.cut_short:
            stopped = "by Ctrl-C" if search.interrupted else f"after {search.budget_s} s"
        without = explanation = None
        if not search.interrupted:
            tell("comparing with other ways to train")
            without = without_pipeline(*subject, partial(search.plan, planner=OWN))
        if explained:
            tell("explaining")
            explanation = explain(
                best.plan, *subject, search.plan, best.alternatives, lambda: search.interrupted
            )
    simulation = simulate(best.plan, inputs.cluster)
    return StepAnswer(
        inputs,
        best.plan,
        simulation,
        step_parts(best.plan, inputs.cluster, simulation),
        busiest_link(best.plan, inputs.cluster),
        stopped,
        without,
        explanation,
        spent_s,
        step_range(best.plan, inputs.cluster),
    )


def show(
    inputs: PlanInputs, search: PlanSearch, counts: tuple[int, ...] | None,
    *, explained: bool, output_file: Path | None, svg: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Plan for the shortest step, write what is to be written, and print.

    Args:
        counts: numbers of nodes to compare; None makes one plan.
    """
    for warning in inputs.warnings:
        warn(warning)
    inputs = inputs.fold()
    if counts is not None:
        _compare_nodes(inputs, counts, search, as_json=as_json)
        return
    for file in filter(None, (output_file, svg)):
        make_directory_of(file)
    with search.interruptible() as tell:
        answer = plan_step(inputs, search, tell, explained=explained)
    if output_file is not None:
        answer.plan.save(output_file)
    if svg is not None:
        titles = f"{answer.plan.name}: {answer.plan.summary}", *view.prediction_lines(answer.plan)
        write_text(svg, gantt_svg(answer.simulation.timeline, *titles))
    if as_json:
        say_json(answer.to_json())
        return
    console = output()
    console.print(view.step_view(answer, console.width))
    if inputs.cluster_file is not None:
        say(f"cluster: {inputs.cluster_file} ({inputs.cluster.source})")
    if output_file is not None:
        say(f"plan: {output_file}")


def _compare_nodes(
    inputs: PlanInputs, nodes: tuple[int, ...], search: PlanSearch, *, as_json: bool
) -> None:
    """Plan the same step for every number of nodes, and print the table."""
    subject, request = (inputs.profile, inputs.cluster, inputs.request), inputs.request
    with search.interruptible() as tell:
        result = scaling(
            *subject, nodes, search.plan, lambda count: tell(f"planning for {count} nodes")
        )
    if as_json:
        say_json({**result.to_json(), "cut_short": search.cut_short})
        return
    console = output()
    title = f"{request.name}: {request.batch_size} samples per step; node-hours of 1000 steps"
    console.print(plain(title, "bold"))
    console.print(view.scaling_table(result, console.width))
    for line in view.scaling_lines(result):
        console.print(plain(line))
    assumptions = (*inputs.profile.assumptions, *inputs.cluster.assumptions)
    console.print(Group(*view.assumption_lines(assumptions)))
