"""`pipectl lab plan`: other planners and objectives, other links, and time limits."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.commands import plan as plan_command
from pipectl.cli.console import output, say_json, warn
from pipectl.cli.options import Json, Overrides, SchedulerOption, above_zero, read_by
from pipectl.cli.progress import stoppable
from pipectl.cli.refusal import refuse
from pipectl.errors import UsageError
from pipectl.units import did_you_mean, parse_bytes, parse_duration

if TYPE_CHECKING:
    from pipectl.jobs.lab_plan import LinkChanges, Technique
    from pipectl.jobs.plan import Deadline, PlanInputs

PLANNER = "pipectl"
_BITS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)bit\s*")
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Objective(StrEnum):
    """What makes a plan good."""

    STEP_TIME = "step-time"
    MAX_STAGE_LOAD = "max-stage-load"


def _bandwidth(text: str) -> float:
    """Bytes per second in ``1GB/s``, ``100MiB/s`` or ``10Gbit/s``."""
    amount = text.strip().removesuffix("/s")
    bits = _BITS.fullmatch(amount)
    try:
        rate = float(bits[1]) * _PREFIXES[bits[2]] / 8 if bits else float(parse_bytes(amount))
    except ValueError:
        raise ValueError(f"{text!r} is not a bandwidth; write for example 1GB/s") from None
    if not 0 < rate < inf:
        raise ValueError("must be above 0, and finite")
    return rate


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < inf:
        raise ValueError("must be a number above 0")
    return number


def command(
    job: plan_command.JobFile = None,
    objective: Annotated[
        Objective, typer.Option(help="What makes a plan good.")
    ] = Objective.STEP_TIME,
    planner: Annotated[
        str,
        typer.Option(metavar="NAME", help="dapple, pipedream, …: plan as others do, to compare."),
    ] = PLANNER,
    profile_file: plan_command.ProfileFile = None,
    cluster: plan_command.ClusterFile = None,
    devices: plan_command.Devices = None,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            parser=read_by(above_zero(parse_bytes)), metavar="SIZE", help="Of every rank: 8GiB."
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(parser=read_by(_bandwidth), metavar="RATE", help="Of every link: 1GB/s."),
    ] = None,
    communication_scale: Annotated[
        float | None,
        typer.Option(parser=read_by(_positive), metavar="X", help="Messages take X times as long."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,…",
            help="Let the planner choose: replicas, split, recompute, offload, pipefb, interleave.",
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(parser=read_by(parse_duration), metavar="TIME", help="Of each search: 10s."),
    ] = None,
    scheduler: SchedulerOption = None,
    nodes: plan_command.NodeCounts = None,
    explain: plan_command.Explain = False,
    output_file: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan to this file.")
    ] = None,
    svg: plan_command.SvgFile = None,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    """Plan with other planners, for other objectives or links.

    -o writes the plan.
    """
    from pipectl.jobs.lab_plan import LinkChanges, allow_techniques, change_links, searcher_named
    from pipectl.jobs.plan import Deadline, gather

    if job is None:
        refuse({"--scheduler": scheduler}, "is about a job file, and none is given")
    if objective is Objective.MAX_STAGE_LOAD:
        of_steps = {"--nodes": nodes, "--explain": explain, "-o": output_file, "--svg": svg}
        of_steps |= {"--planner": planner != PLANNER, "--allow": allow}
        refuse(of_steps, f"has no meaning for --objective {objective}")
    if planner != PLANNER:
        refuse({"--allow": allow}, f"{planner} chooses by its own rules")
    changes = list(overrides or ())
    if memory_limit is not None:
        changes.append(f"pipeline.memory_limit={memory_limit}")
    counts = plan_command.node_counts(nodes)
    if counts is not None:
        plan_command.refuse_beside_nodes(devices, output_file, svg, explain=explain)
    techniques, links = _techniques(allow), LinkChanges(bandwidth, communication_scale)
    inputs = gather(
        job, profile_file, changes, scheduler=scheduler, cluster=cluster, devices=devices,
        nodes=counts, new_micro_batches=True,
    )  # fmt: skip
    inputs = change_links(inputs, links)
    inputs = replace(inputs, request=allow_techniques(inputs.request, techniques))
    for warning in inputs.warnings:
        warn(warning)
    deadline = Deadline(budget)
    if objective is Objective.MAX_STAGE_LOAD:
        _show_balance(inputs, links, deadline, as_json=as_json)
        return
    inputs, search = inputs.fold(), searcher_named(planner)
    if counts is not None:
        plan_command.compare_nodes(inputs, counts, deadline, search, as_json=as_json)
    else:
        plan_command.show_step(
            inputs, deadline, search,
            explain=explain, output_file=output_file, svg=svg, as_json=as_json,
        )  # fmt: skip


def _techniques(texts: list[str] | None) -> tuple[Technique, ...]:
    """Names with commas between them, each once.

    Raises:
        UsageError: there is none of that name.
    """
    from pipectl.jobs.lab_plan import Technique

    names = [name.strip() for text in texts or () for name in text.split(",")]
    for name in names:
        if name not in tuple(Technique):
            meant = did_you_mean(name, [technique.value for technique in Technique])
            raise UsageError(
                f"--allow: there is no technique {name!r}{meant}",
                cure=f"any of: {', '.join(Technique)}",
            )
    return tuple(dict.fromkeys(map(Technique, names)))


def _show_balance(
    inputs: PlanInputs, links: LinkChanges, deadline: Deadline, *, as_json: bool
) -> None:
    from pipectl.cli.views.plan import balance_view
    from pipectl.jobs.lab_plan import plan_balance

    with stoppable(deadline):
        balanced = plan_balance(inputs, links, deadline)
    if as_json:
        say_json({**balanced.to_json(), "cut_short": deadline.cut_short})
    else:
        output().print(balance_view(balanced, inputs.profile))
