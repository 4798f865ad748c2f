"""`pipectl lab simulate`: draw a schedule, of a plan or of equal stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipectl.cli.console import output, plain, say, say_json
from pipectl.cli.options import Json, read_by
from pipectl.cli.refusal import refuse
from pipectl.errors import UsageError

if TYPE_CHECKING:
    from pipectl.jobs.simulating import Simulated

_SHAPE = "of equal stages, in any unit"
_MOST = 16
"""Stages whose micro-batches in flight are told."""
_LONGEST = 1e100
"""A time whose sums are finite."""


def _time(text: str) -> float:
    number = float(text)
    if not 0 <= number <= _LONGEST:
        raise ValueError(f"must be a number from 0 to {_LONGEST:g}")
    return number


def _time_option(help_text: str) -> Any:
    return typer.Option(parser=read_by(_time), metavar="X", help=help_text)


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
    forward: Annotated[float | None, _time_option(f"Time {_SHAPE}; else 1.")] = None,
    backward: Annotated[float | None, _time_option(f"Time {_SHAPE}; else 2.")] = None,
    latency: Annotated[float | None, _time_option("Of messages, in this unit; else 0.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the step here.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate one step and draw it: what every rank does when, and where it waits."""
    from pipectl.files import make_directory_of

    if svg is not None:
        make_directory_of(svg)
    shape = _given(stages=stages, micro_batches=micro_batches, ranks=ranks)
    shape |= _given(forward_s=forward, backward_s=backward, latency_s=latency)
    found = _simulated(shape, schedule, plan, cluster)
    if svg is not None:
        _draw(svg, found)
    if as_json:
        say_json(found.to_json())
    else:
        _show(found)


def _given(**options: object) -> dict[str, Any]:
    """Those that are given."""
    return {name: value for name, value in options.items() if value is not None}


def _simulated(
    shape: dict[str, Any], schedule: str | None, plan: Path | None, cluster: Path | None
) -> Simulated:
    """Of a plan, or of equal stages of a shape."""
    from pipectl.jobs.simulating import Shape, simulate_shape

    if plan is not None:
        own = {f"--{key.removesuffix('_s').replace('_', '-')}": shape[key] for key in shape}
        refuse(own, "a plan has its own", cure="leave it out, or name a --schedule alone")
        return _of_plan(plan, cluster, schedule)
    if schedule is None:
        raise UsageError(
            "nothing to simulate", cure="give --schedule NAME, --schedule FILE.csv or --plan FILE"
        )
    refuse({"--cluster": cluster}, "is for a plan's stages", cure="name it: --plan FILE")
    return simulate_shape(schedule, Shape(**shape))


def _of_plan(path: Path, cluster: Path | None, schedule: str | None) -> Simulated:
    from pipectl.cluster import Cluster
    from pipectl.jobs.simulating import simulate_plan
    from pipectl.plan import Plan

    machines = None if cluster is None else Cluster.load(cluster)
    return simulate_plan(Plan.load(path), machines, schedule)


def _draw(path: Path, found: Simulated) -> None:
    from pipectl.cli.views.plan import headline
    from pipectl.files import write_text
    from pipectl.report.gantt_svg import gantt_svg

    timeline = found.simulation.timeline
    write_text(path, gantt_svg(timeline, headline(found.plan), _figures(found)))


def _show(found: Simulated) -> None:
    from pipectl.cli.views.plan import gantt_lines, headline
    from pipectl.report.gantt import legend

    console, timeline = output(), found.simulation.timeline
    say(headline(found.plan).removeprefix(f"{found.plan.name}: "), "bold")
    say(_figures(found))
    for line in gantt_lines(timeline, console.width):
        console.print(line)
    console.print(plain(legend(timeline), "dim"))
    for remark in found.remarks:
        say(remark, "dim")


def _figures(found: Simulated) -> str:
    counts = found.proof.peak_in_flight
    shown = " ".join(map(str, counts[:_MOST])) + (" …" if len(counts) > _MOST else "")
    return (
        f"step {found.simulation.step_time_s:.6g}, bubble {found.simulation.bubble:.1%}, "
        f"micro-batches in flight by stage: {shown}"
    )
