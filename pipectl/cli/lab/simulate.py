"""`pipectl lab simulate`: draw a schedule, of a plan or of equal stages."""

from __future__ import annotations

from math import isclose
from pathlib import Path
from typing import Annotated, Any

import typer

from pipectl.cli.console import output, plain, say, say_json
from pipectl.cli.options import Json, count, option, parse_number, reader, refuse
from pipectl.cli.views.plan import assumption_lines, gantt_lines
from pipectl.cluster import Cluster
from pipectl.errors import UsageError
from pipectl.files import make_directory_of, write_text
from pipectl.plan import Plan
from pipectl.report.gantt import gantt_svg, legend
from pipectl.simulate.one_step import Simulated, plan_equal_stages, simulate_plan
from pipectl.units import format_time

_MAX_SHOWN = 16
"""Stages whose micro-batches in flight are printed."""


def _time_option(help_text: str) -> Any:
    return typer.Option(parser=reader(parse_number, zero=True), metavar="X", help=help_text)


def command(
    schedule: Annotated[
        str | None, option("NAME|F.csv", "Schedule: built in, a file, or of a package.")
    ] = None,
    plan: Annotated[Path | None, option("FILE", "Plan to simulate instead: plan.json.")] = None,
    cluster: Annotated[Path | None, option("FILE", "Machines of the plan: cluster.json.")] = None,
    stages: Annotated[int | None, count("Number of stages.")] = None,
    micro_batches: Annotated[int | None, count("Number of micro-batches.")] = None,
    ranks: Annotated[int | None, count("Number of ranks, if fewer than stages.")] = None,
    forward: Annotated[
        float | None, _time_option("Time of a forward, in any unit; by default 1.")
    ] = None,
    backward: Annotated[float | None, _time_option("Time of a backward; by default 2.")] = None,
    latency: Annotated[float | None, _time_option("Latency of a message; by default 0.")] = None,
    svg: Annotated[Path | None, option("FILE", "Write a picture of the step to this file.")] = None,
    as_json: Json = False,
) -> None:
    if svg is not None:
        make_directory_of(svg)
    shape = {
        "stages": stages, "micro_batches": micro_batches, "ranks": ranks,
        "forward_s": forward, "backward_s": backward, "latency_s": latency,
    }  # fmt: skip
    shape = {name: value for name, value in shape.items() if value is not None}
    if plan is not None:
        options = {f"--{name.removesuffix('_s').replace('_', '-')}": shape[name] for name in shape}
        refuse(options, "a plan has its own", cure="leave it out, or name a --schedule alone")
        machines = None if cluster is None else Cluster.load(cluster)
        step = simulate_plan(Plan.load(plan), machines, schedule)
    elif schedule is None:
        raise UsageError(
            "nothing to simulate", cure="give --schedule NAME, --schedule FILE.csv or --plan FILE"
        )
    else:
        refuse({"--cluster": cluster}, "needs --plan")
        step = simulate_plan(*plan_equal_stages(schedule, **shape))  # type: ignore[arg-type]
    if svg is not None:
        write_text(
            svg,
            gantt_svg(
                step.simulation.timeline, f"{step.plan.name}: {step.plan.summary}", _figures(step)
            ),
        )
    if as_json:
        say_json(step.to_json())
    else:
        _show(step)


def _show(step: Simulated) -> None:
    console, timeline = output(), step.simulation.timeline
    say(step.plan.summary, "bold")
    say(_figures(step))
    for line in gantt_lines(timeline, console.width):
        console.print(line)
    console.print(plain(legend(timeline), "dim"))
    for line in assumption_lines(step.assumptions):
        console.print(line)
    planned_s = step.planned_s
    if planned_s is not None and not isclose(planned_s, step.simulation.step_time_s, rel_tol=1e-6):
        time = format_time(planned_s)
        say(f"the plan predicts {time} per step, on the machines it was made for", "dim")


def _figures(step: Simulated) -> str:
    counts = step.peak_in_flight
    peaks = " ".join(map(str, counts[:_MAX_SHOWN])) + (" …" if len(counts) > _MAX_SHOWN else "")
    return (
        f"step {step.simulation.step_time_s:.6g}, bubble {step.simulation.bubble:.1%}, "
        f"micro-batches in flight by stage: {peaks}"
    )
