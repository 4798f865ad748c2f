"""`pipectl lab simulate`: draw a step of a plan, or of a schedule with equal stages."""

from __future__ import annotations

from math import isclose
from pathlib import Path
from typing import Any, TypedDict

import typer

from pipectl.cli import options as opt
from pipectl.cli.console import say, say_json, show
from pipectl.cli.views.plan import assumption_lines, draw_step
from pipectl.cluster import Cluster, Device, Node, assumed_cluster
from pipectl.errors import UsageError
from pipectl.files import make_directory_of, write_text
from pipectl.link import Link
from pipectl.plan import Plan, StageCost
from pipectl.report.gantt import gantt_svg
from pipectl.schedule.equal_stages import plan_equal_stages, reorder
from pipectl.schedule.registry import read_listed
from pipectl.simulate import simulate
from pipectl.simulate.memory import stage_peaks_in_flight
from pipectl.spec import SCHEDULE_SUFFIX
from pipectl.units import format_time

_MAX_SHOWN = 16
"""Maximum number of stages whose micro-batches in flight are printed."""
_FAST = 1e15
_TIME: Any = {"parser": opt.reader(opt.parse_number, zero=True), "show_default": False}


def command(
    context: typer.Context,
    schedule: str | None = opt.value("NAME|F.csv", "Schedule: built in, a file, or of a package."),
    plan: Path | None = opt.value("FILE", "Plan to simulate instead: plan.json."),
    cluster: Path | None = opt.value("FILE", "Machines of the plan: cluster.json."),
    stages: int | None = opt.count("Number of stages; needed with the name of a schedule."),
    micro_batches: int | None = opt.count(
        "Number of micro-batches; needed with the name of a schedule."
    ),
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
    listed = None
    if schedule is not None and schedule.endswith(SCHEDULE_SUFFIX):
        listed = read_listed(Path(schedule), schedule)
    if plan is not None:
        own = "--stages --micro-batches --ranks --forward --backward --latency"
        hint = "leave it out, or name a --schedule alone"
        opt.refuse(context, own, "a plan has its own", hint=hint)
        if schedule is not None and listed is None:
            raise UsageError(
                f"--schedule {schedule}: a plan's stages are cut for its own schedule",
                hint="name a .csv file, or plan again with pipeline.schedule",
            )
        subject = Plan.load(plan)
        subject = subject if listed is None else reorder(subject, listed)
        machines = assume_cluster(subject) if cluster is None else Cluster.load(cluster)
    elif schedule is None:
        raise UsageError(
            "nothing to simulate", hint="give --schedule NAME, --schedule FILE.csv or --plan FILE"
        )
    else:
        opt.refuse(context, "--cluster", "needs --plan")
        numbers = {"stages": stages, "micro-batches": micro_batches, "ranks": ranks}
        cost = StageCost(forward, backward, 0.0, 0, 0, 0)
        subject = plan_equal_stages(schedule, listed, numbers, cost)
        node, link = Node("one", subject.ranks, subject.ranks, Device("any")), Link(latency, _FAST)
        machines = Cluster("equal devices", "imagined", (node,), link, link)
    _show(subject, machines, svg, in_seconds=plan is not None, as_json=as_json)


class SimulationJson(TypedDict):
    """A simulated step.

    Args:
        schedule: name of the schedule.
        stages, ranks, micro_batches: numbers of them.
        step_time_s: time of the step.
        planned_step_time_s: what the plan predicts; null without a plan.
        bubble: share of the ranks' time without computation.
        utilisation: share of the step in which each rank computes.
        peak_in_flight: largest number of micro-batches in flight, of each stage.
        peak_memory_bytes: peak memory of each rank.
        assumptions: what the cluster file does not say.
    """

    schedule: str
    stages: int
    ranks: int
    micro_batches: int
    step_time_s: float
    planned_step_time_s: float | None
    bubble: float
    utilisation: list[float]
    peak_in_flight: list[int]
    peak_memory_bytes: list[int]
    assumptions: list[str]


def _show(
    subject: Plan, machines: Cluster, svg: Path | None, *, in_seconds: bool, as_json: bool
) -> None:
    """Simulate a plan, and print and draw the step.

    Args:
        in_seconds: whether times are in seconds, not in a unit of the user's own.
    """
    step = simulate(subject, machines)
    in_flight = stage_peaks_in_flight(subject)
    # Of another order than its own, a plan predicts nothing.
    planned_s = None if subject.prediction is None else subject.prediction.step_time_s
    peaks = " ".join(map(str, in_flight[:_MAX_SHOWN])) + " …" * (len(in_flight) > _MAX_SHOWN)
    time = format_time(step.step_time_s) if in_seconds else f"{step.step_time_s:.6g}"
    figures = f"step {time}, bubble {step.bubble:.1%}, micro-batches in flight by stage: {peaks}"
    if svg is not None:
        title = f"{subject.name}: {subject.summary}"
        write_text(svg, gantt_svg(step.timeline, title, figures))
    if as_json:
        answer: SimulationJson = {
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
        say_json(answer)
        return
    say(subject.summary, "bold")
    say(figures)
    show(draw_step(step.timeline), *assumption_lines(machines.assumptions))
    if planned_s is not None and not isclose(planned_s, step.step_time_s, rel_tol=1e-6):
        time = format_time(planned_s)
        say(f"the plan predicts {time} per step, on the machines it was made for", "dim")
    if svg is not None:
        say(f"picture: {svg}")


def assume_cluster(plan: Plan) -> Cluster:
    """The nodes of a plan with shared memory, and 10 Gbit/s Ethernet between them."""
    counts = [plan.node_of_rank.count(node) for node in range(1 + max(plan.node_of_rank))]
    return assumed_cluster(plan.name, counts, max(counts), None)
