"""`pipectl lab simulate`: draw a step, of a plan, or of a schedule on equal stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isclose
from pathlib import Path

import typer

from pipectl.cli import options as opt
from pipectl.cli.console import output, plain, say, say_json
from pipectl.cli.views.plan import assumption_lines, gantt_lines
from pipectl.cluster import Cluster, Device, Node, assumed_cluster
from pipectl.errors import UsageError
from pipectl.files import make_directory_of, write_text
from pipectl.graph import TransferKind
from pipectl.link import Link
from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.report.gantt import gantt_svg, legend
from pipectl.schedule import NAMES, default_ranks, default_warm_up, stage_peaks_in_flight
from pipectl.schedule.listed import Listed
from pipectl.schedule.registry import make_listed, read_listed
from pipectl.simulate import simulate
from pipectl.spec import SCHEDULE_SUFFIX
from pipectl.units import format_time

_MAX_SHOWN = 16
"""Stages whose micro-batches in flight are printed."""
_FAST = 1e15
_read_time = opt.reader(opt.parse_number, zero=True)


def command(
    context: typer.Context,
    schedule: str | None = opt.value("NAME|F.csv", "Schedule: built in, a file, or of a package."),
    plan: Path | None = opt.value("FILE", "Plan to simulate instead: plan.json."),
    cluster: Path | None = opt.value("FILE", "Machines of the plan: cluster.json."),
    stages: int | None = opt.count("Number of stages."),
    micro_batches: int | None = opt.count("Number of micro-batches."),
    ranks: int | None = opt.count("Number of ranks, if fewer than stages."),
    forward: float | None = opt.value(
        "X", "Time of a forward, in any unit; by default 1.", parser=_read_time
    ),
    backward: float | None = opt.value("X", "Time of a backward; by default 2.", parser=_read_time),
    latency: float | None = opt.value(
        "X", "Latency of a message; by default 0.", parser=_read_time
    ),
    svg: Path | None = opt.value("FILE", "Write a picture of the step to this file."),
    as_json: bool = opt.JSON,
) -> None:
    if svg is not None:
        make_directory_of(svg)
    shape = {
        "stages": stages, "micro_batches": micro_batches, "ranks": ranks,
        "forward_s": forward, "backward_s": backward, "latency_s": latency,
    }  # fmt: skip
    shape = {name: value for name, value in shape.items() if value is not None}
    if plan is not None:
        own = "--stages --micro-batches --ranks --forward --backward --latency"
        cure = "leave it out, or name a --schedule alone"
        opt.refuse(context, own, "a plan has its own", cure=cure)
        machines = None if cluster is None else Cluster.load(cluster)
        subject, machines = of_plan(Plan.load(plan), machines, schedule)
    elif schedule is None:
        raise UsageError(
            "nothing to simulate", cure="give --schedule NAME, --schedule FILE.csv or --plan FILE"
        )
    else:
        opt.refuse(context, "--cluster", "needs --plan")
        subject, machines = plan_equal_stages(schedule, **shape)  # type: ignore[arg-type]
    step = simulate(subject, machines)
    in_flight = stage_peaks_in_flight(subject)
    # Of another order than its own, a plan predicts nothing.
    planned_s = None if subject.prediction is None else subject.prediction.step_time_s
    peaks = " ".join(map(str, in_flight[:_MAX_SHOWN])) + " …" * (len(in_flight) > _MAX_SHOWN)
    figures = (
        f"step {step.step_time_s:.6g}, bubble {step.bubble:.1%}, "
        f"micro-batches in flight by stage: {peaks}"
    )
    if svg is not None:
        title = f"{subject.name}: {subject.summary}"
        write_text(svg, gantt_svg(step.timeline, title, figures))
    if as_json:
        say_json(
            {
                "schedule": subject.schedule,
                "stages": len(subject.stages),
                "ranks": subject.ranks,
                "micro_batches": subject.micro_batches,
                "step_time_s": step.step_time_s,
                "planned_step_time_s": planned_s,
                "bubble": step.bubble,
                "utilisation": list(step.utilisation),
                "peak_in_flight": list(in_flight),
                "peak_memory_bytes": list(step.peak_memory_bytes),
                "assumptions": list(machines.assumptions),
            }
        )
        return
    console = output()
    say(subject.summary, "bold")
    say(figures)
    for line in gantt_lines(step.timeline, console.width):
        console.print(line)
    console.print(plain(legend(step.timeline), "dim"))
    for line in assumption_lines(machines.assumptions):
        console.print(line)
    if planned_s is not None and not isclose(planned_s, step.step_time_s, rel_tol=1e-6):
        time = format_time(planned_s)
        say(f"the plan predicts {time} per step, on the machines it was made for", "dim")


def of_plan(
    plan: Plan, cluster: Cluster | None = None, schedule: str | None = None
) -> tuple[Plan, Cluster]:
    """A plan, or its stages in the order of a user's schedule, and its machines.

    Args:
        cluster: by default assumed: shared memory within nodes, 10 Gbit/s Ethernet between.

    Raises:
        UsageError: the schedule is not a user's own, or not of as many stages and micro-batches.
    """
    if schedule is not None:
        plan = _reorder(plan, schedule)
    if cluster is None:
        counts = [plan.node_of_rank.count(node) for node in range(1 + max(plan.node_of_rank))]
        cluster = assumed_cluster(plan.name, counts, max(counts), None)
    return plan, cluster


def plan_equal_stages(
    schedule: str,
    stages: int | None = None,
    micro_batches: int | None = None,
    ranks: int | None = None,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    latency_s: float = 0.0,
) -> tuple[Plan, Cluster]:
    """A schedule on equal stages, whose messages take nothing but a latency, and its machines.

    Args:
        schedule: built in, a file, or what a package offers.
        stages, micro_batches, ranks: None if the schedule says how many.
        forward_s, backward_s: of a micro-batch, in any unit.
        latency_s: of a message between ranks, in the same.

    Raises:
        UsageError: numbers that the schedule needs are missing, or contradict it.
        ScheduleError: it is none.
    """
    options = {"stages": stages, "micro-batches": micro_batches, "ranks": ranks}
    listed: Listed | None = None
    actions: tuple[str, ...] = ()
    if schedule.endswith(SCHEDULE_SUFFIX):
        listed = read_listed(Path(schedule), schedule)
    elif stages is None or micro_batches is None:
        raise UsageError(
            f"schedule {schedule}: of how many stages and micro-batches?",
            cure="add for example --stages 4 --micro-batches 8",
        )
    elif schedule not in NAMES:
        listed = make_listed(schedule, ranks or stages, stages, micro_batches)
    if listed is not None:
        stages, micro_batches, ranks = listed.stages, listed.micro_batches, len(listed.ranks)
        rank_of_stage, warm_up, actions = listed.rank_of_stage, listed.warm_up, listed.text
    else:
        assert stages is not None
        assert micro_batches is not None
        rank_of_stage = default_ranks(schedule, stages, ranks)
        ranks = len(set(rank_of_stage))
        warm_up = default_warm_up(schedule, stages, micro_batches, ranks=ranks)
    numbers = zip(options.items(), (stages, micro_batches, ranks), strict=True)
    for (name, value), number in numbers:
        if value not in (None, number):
            subject = schedule if listed else f"{schedule} of {stages} stages"
            raise UsageError(
                f"{subject} has {number} {name}, not {value}", cure=f"leave --{name} out"
            )
    cost = StageCost(forward_s, backward_s, 0.0, 0, 0, 0)
    pairs = list(pairwise(range(stages)))
    plan = Plan(
        name=schedule,
        fingerprint=None,
        schedule=schedule,
        actions=actions,
        warm_up=tuple(warm_up),
        batch_size=micro_batches,
        micro_batch_size=1,
        micro_batches=micro_batches,
        stages=tuple(Stage((f"stage{s}",), (rank,), cost) for s, rank in enumerate(rank_of_stage)),
        transfers=(
            *(Transfer(TransferKind.ACTIVATION, a, b, 0) for a, b in pairs),
            *(Transfer(TransferKind.GRADIENT, b, a, 0) for a, b in pairs),
        ),
        node_of_rank=(0,) * (1 + max(rank_of_stage)),
    )
    nodes = (Node("one", plan.ranks, plan.ranks, Device("any")),)
    link = Link(latency_s, _FAST)
    return plan, Cluster("equal devices", "imagined", nodes, link, link)


def _reorder(plan: Plan, schedule: str) -> Plan:
    """The plan's stages in the order, and on the ranks, of a user's schedule."""
    if not schedule.endswith(SCHEDULE_SUFFIX):
        raise UsageError(
            f"--schedule {schedule}: a plan's stages are cut for its own schedule",
            cure="name a .csv file, or plan again with pipeline.schedule",
        )
    if any(stage.replicas > 1 or stage.backward_ranks for stage in plan.stages):
        raise UsageError(
            f"--schedule {schedule}: stages of the plan have several ranks, lists give them one",
            cure="plan again with pipeline.schedule",
        )
    listed = read_listed(Path(schedule), schedule)
    have = len(plan.stages), plan.micro_batches, plan.ranks
    needs = listed.stages, listed.micro_batches, len(listed.ranks)
    if have[:2] != needs[:2] or needs[2] > have[2]:
        raise UsageError(
            "{} has {} stages, {} micro-batches and {} ranks; the plan {}, {} and {}".format(
                schedule, *needs, *have
            ),
            cure="use a schedule made for the plan, or plan again with pipeline.schedule",
        )
    ranks = zip(plan.stages, listed.rank_of_stage, strict=True)
    return replace(
        plan,
        schedule=listed.name,
        actions=listed.text,
        warm_up=listed.warm_up,
        stages=tuple(replace(stage, ranks=(rank,)) for stage, rank in ranks),
        prediction=None,
    )
