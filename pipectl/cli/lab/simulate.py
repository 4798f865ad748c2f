"""`pipectl lab simulate`: draw a step, of a plan, or of a schedule on equal stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import isclose
from pathlib import Path
from typing import Any

import typer

from pipectl.cli import options as opt
from pipectl.cli.console import output, say, say_json
from pipectl.cli.views.plan import assumption_lines, gantt_lines
from pipectl.cluster import Cluster, Device, Node, assumed_cluster
from pipectl.errors import UsageError
from pipectl.files import make_directory_of, write_text
from pipectl.graph import TransferKind
from pipectl.link import Link
from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.report.gantt import gantt_svg
from pipectl.schedule import NAMES, default_ranks, default_warm_up, stage_peaks_in_flight
from pipectl.schedule.listed import Listed
from pipectl.schedule.registry import make_listed, read_listed
from pipectl.simulate import simulate
from pipectl.spec import SCHEDULE_SUFFIX
from pipectl.units import format_time

_MAX_SHOWN = 16
"""Stages whose micro-batches in flight are printed."""
_FAST = 1e15
_TIME: Any = {"parser": opt.reader(opt.parse_number, zero=True), "show_default": False}


def command(
    context: typer.Context,
    schedule: str | None = opt.value("NAME|F.csv", "Schedule: built in, a file, or of a package."),
    plan: Path | None = opt.value("FILE", "Plan to simulate instead: plan.json."),
    cluster: Path | None = opt.value("FILE", "Machines of the plan: cluster.json."),
    stages: int | None = opt.count("Number of stages."),
    micro_batches: int | None = opt.count("Number of micro-batches."),
    ranks: int | None = opt.count("Number of ranks, if fewer than stages."),
    forward: float = opt.value(
        "X", "Time of a forward, in any unit; by default 1.", default="1", **_TIME
    ),
    backward: float = opt.value("X", "Time of a backward; by default 2.", default="2", **_TIME),
    latency: float = opt.value("X", "Latency of a message; by default 0.", default="0", **_TIME),
    svg: Path | None = opt.value("FILE", "Write a picture of the step to this file."),
    as_json: bool = opt.JSON,
) -> None:
    if svg is not None:
        make_directory_of(svg)
    if plan is not None:
        own = "--stages --micro-batches --ranks --forward --backward --latency"
        cure = "leave it out, or name a --schedule alone"
        opt.refuse(context, own, "a plan has its own", cure=cure)
        subject = Plan.load(plan)
        if schedule is not None:
            subject = _reorder(subject, schedule)
        machines = assume_cluster(subject) if cluster is None else Cluster.load(cluster)
    elif schedule is None:
        raise UsageError(
            "nothing to simulate", cure="give --schedule NAME, --schedule FILE.csv or --plan FILE"
        )
    else:
        opt.refuse(context, "--cluster", "needs --plan")
        numbers = {"stages": stages, "micro-batches": micro_batches, "ranks": ranks}
        subject = plan_equal_stages(schedule, numbers, StageCost(forward, backward, 0.0, 0, 0, 0))
        nodes, link = (
            (Node("one", subject.ranks, subject.ranks, Device("any")),),
            Link(latency, _FAST),
        )
        machines = Cluster("equal devices", "imagined", nodes, link, link)
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
    for line in (
        *gantt_lines(step.timeline, console.width),
        *assumption_lines(machines.assumptions),
    ):
        console.print(line)
    if planned_s is not None and not isclose(planned_s, step.step_time_s, rel_tol=1e-6):
        time = format_time(planned_s)
        say(f"the plan predicts {time} per step, on the machines it was made for", "dim")


def assume_cluster(plan: Plan) -> Cluster:
    """The nodes of a plan: shared memory within them, 10 Gbit/s Ethernet between."""
    counts = [plan.node_of_rank.count(node) for node in range(1 + max(plan.node_of_rank))]
    return assumed_cluster(plan.name, counts, max(counts), None)


def plan_equal_stages(schedule: str, numbers: Mapping[str, int | None], cost: StageCost) -> Plan:
    """A schedule on equal stages, whose messages have no bytes.

    Args:
        schedule: built in, a file, or what a package offers.
        numbers: of ``stages``, ``micro-batches`` and ``ranks``; None if the schedule has its own.
        cost: of every stage.

    Raises:
        UsageError: numbers that the schedule needs are missing, or contradict it.
        ScheduleError: it is none.
    """
    stages, micro_batches, ranks = numbers.values()
    listed: Listed | None = None
    if schedule.endswith(SCHEDULE_SUFFIX):
        listed = read_listed(Path(schedule), schedule)
    elif stages is None or micro_batches is None:
        raise UsageError(
            f"schedule {schedule}: of how many stages and micro-batches?",
            cure="add for example --stages 4 --micro-batches 8",
        )
    elif schedule not in NAMES:
        listed = make_listed(schedule, ranks or stages, stages, micro_batches)
    else:
        rank_of_stage = default_ranks(schedule, stages, ranks)
        ranks = len(set(rank_of_stage))
        warm_up = default_warm_up(schedule, stages, micro_batches, ranks=ranks)
    if listed is not None:
        stages, micro_batches, ranks = listed.stages, listed.micro_batches, len(listed.ranks)
        rank_of_stage, warm_up = listed.rank_of_stage, listed.warm_up
    assert stages is not None
    assert micro_batches is not None
    for (name, value), number in zip(numbers.items(), (stages, micro_batches, ranks), strict=True):
        if value not in (None, number):
            subject = schedule if listed else f"{schedule} of {stages} stages"
            raise UsageError(
                f"{subject} has {number} {name}, not {value}", cure=f"leave --{name} out"
            )
    pairs = list(pairwise(range(stages)))
    return Plan(
        name=schedule,
        fingerprint=None,
        schedule=schedule,
        actions=listed.text if listed else (),
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
