"""`pipectl simulate`: draw a schedule, of a plan or of equal stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.console import output, plain, say, say_json
from pipectl.cli.options import Json
from pipectl.errors import UsageError

if TYPE_CHECKING:
    from pipectl.jobs.simulating import Simulated

_SHAPE = "of equal stages, in any unit"
_MOST = 16
"""Stages whose micro-batches in flight are told."""


def command(
    schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME|F.csv", help="Built in, a file, or a package's."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Of this plan.json instead.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="On this cluster.json; with --plan.")] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Stages.")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Micro-batches.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks, if fewer than stages.")] = None,
    forward: Annotated[float, typer.Option(min=0, help=f"Time {_SHAPE}.")] = 1.0,
    backward: Annotated[float, typer.Option(min=0, help=f"Time {_SHAPE}.")] = 2.0,
    latency: Annotated[float, typer.Option(min=0, help="Of messages, in this unit.")] = 0.0,
    svg: Annotated[Path | None, typer.Option(help="Draw the step here.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate one step and draw it: what every rank does when, and where it waits."""
    from pipectl.jobs.simulating import Shape, simulate_shape

    if plan is not None:
        found = _of_plan(plan, cluster, schedule)
    elif schedule is None:
        raise UsageError(
            "nothing to simulate", cure="give --schedule NAME, --schedule FILE.csv or --plan FILE"
        )
    else:
        shape = Shape(stages, micro_batches, ranks, forward, backward, latency)
        found = simulate_shape(schedule, shape)
    if svg is not None:
        _draw(svg, found)
    if as_json:
        say_json(found.to_json())
    else:
        _show(found)


def _of_plan(path: Path, cluster: Path | None, schedule: str | None) -> Simulated:
    from pipectl.cluster import Cluster
    from pipectl.jobs.simulating import simulate_plan
    from pipectl.plan import Plan

    machines = None if cluster is None else Cluster.load(cluster)
    return simulate_plan(Plan.load(path), machines, schedule)


def _draw(path: Path, found: Simulated) -> None:
    from pipectl.cli.plan_view import headline
    from pipectl.files import make_directory, write_text
    from pipectl.report.gantt_svg import gantt_svg

    make_directory(path.parent)
    timeline = found.simulation.timeline
    write_text(path, gantt_svg(timeline, headline(found.plan), _figures(found)))


def _show(found: Simulated) -> None:
    from pipectl.cli.plan_view import gantt_lines, headline
    from pipectl.report.gantt import legend

    console, timeline = output(), found.simulation.timeline
    say(headline(found.plan).removeprefix(f"{found.plan.name}: "), "bold")
    say(_figures(found))
    for line in gantt_lines(timeline, console.width):
        console.print(line)
    console.print(plain(legend(timeline), "dim"))


def _figures(found: Simulated) -> str:
    counts = found.proof.peak_in_flight
    shown = " ".join(map(str, counts[:_MOST])) + (" …" if len(counts) > _MOST else "")
    return (
        f"step {found.simulation.step_time_s:.6g}, bubble {found.simulation.bubble:.1%}, "
        f"micro-batches in flight by stage: {shown}"
    )
