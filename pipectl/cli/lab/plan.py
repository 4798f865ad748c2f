"""`pipectl lab plan`: other planners and objectives, other links, and time limits."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from rich.console import Group, RenderableType

from pipectl.cli.commands import plan as plan_command
from pipectl.cli.console import output, plain, say_json, table, warn
from pipectl.cli.options import (
    Json,
    Overrides,
    SchedulerOption,
    flag,
    option,
    parse_number,
    read_size,
    reader,
    refuse,
)
from pipectl.cli.views.plan import assumption_lines
from pipectl.jobs.lab_plan import Balanced, adapt, plan_balance
from pipectl.jobs.plan_answers import Deadline, gather
from pipectl.profile import Profile
from pipectl.units import format_time, parse_bytes, parse_duration, plural

PLANNER = "pipectl"
_BAR = 24
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
        return float(bits[1]) * _PREFIXES[bits[2]] / 8 if bits else float(parse_bytes(amount))
    except ValueError:
        raise ValueError(f"{text!r} is not a bandwidth; write for example 1GB/s") from None


def command(
    job: plan_command.JobFile = None,
    objective: Annotated[Objective, flag("What makes a plan good.")] = Objective.STEP_TIME,
    planner: Annotated[
        str, option("NAME", "dapple, pipedream, …: plan as others do, to compare.")
    ] = PLANNER,
    profile_file: plan_command.ProfileFile = None,
    cluster: plan_command.ClusterFile = None,
    devices: plan_command.Devices = None,
    memory_limit: Annotated[
        int | None, option("SIZE", "Memory of every rank: 8GiB.", parser=read_size)
    ] = None,
    bandwidth: Annotated[
        float | None, option("RATE", "Bandwidth of every link: 1GB/s.", parser=reader(_bandwidth))
    ] = None,
    communication_scale: Annotated[
        float | None, option("X", "Messages take X times as long.", parser=reader(parse_number))
    ] = None,
    allow: Annotated[
        list[str] | None,
        option(
            "NAME,…",
            "Let the planner choose: replicas, split, recompute, offload, pipefb, schedules.",
        ),
    ] = None,
    budget: Annotated[
        int | None,
        option("TIME", "Time limit of each search: 10s.", parser=reader(parse_duration, zero=True)),
    ] = None,
    scheduler: SchedulerOption = None,
    nodes: plan_command.NodeCounts = None,
    explain: plan_command.Explain = False,
    output_file: Annotated[Path | None, option("FILE", "File to write.", "-o", "--output")] = None,
    svg: plan_command.SvgFile = None,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    if job is None:
        refuse({"--scheduler": scheduler}, "needs a JOB.yaml")
    if objective is Objective.MAX_STAGE_LOAD:
        of_steps = {"--nodes": nodes, "--explain": explain, "-o": output_file, "--svg": svg}
        of_steps |= {"--planner": planner != PLANNER, "--allow": allow}
        refuse(of_steps, f"is not used with --objective {objective}")
    if planner != PLANNER:
        refuse({"--allow": allow}, f"{planner} chooses by its own rules")
    changes = list(overrides or ())
    if memory_limit is not None:
        changes.append(f"pipeline.memory_limit={memory_limit}")
    of_one_plan = {"--devices": devices, "-o": output_file, "--svg": svg, "--explain": explain}
    counts = plan_command.node_counts(nodes, of_one_plan)
    inputs = gather(
        job, profile_file, changes, scheduler=scheduler, cluster=cluster, devices=devices,
        nodes=counts, new_micro_batches=True,
    )  # fmt: skip
    techniques = [name.strip() for text in allow or () for name in text.split(",")]
    inputs = adapt(
        inputs,
        planner=planner,
        techniques=techniques,
        bandwidth_bytes_per_s=bandwidth,
        communication_scale=communication_scale,
    )
    for warning in inputs.warnings:
        warn(warning)
    deadline = Deadline(budget)
    if objective is Objective.MAX_STAGE_LOAD:
        with plan_command.stop_at_interrupt(deadline):
            balanced = plan_balance(inputs, deadline, bandwidth, communication_scale)
        if as_json:
            say_json({**balanced.to_json(), "cut_short": deadline.cut_short})
        else:
            output().print(_balance_view(balanced, inputs.profile))
        return
    inputs = inputs.fold()
    if counts is not None:
        plan_command.compare_nodes(inputs, counts, deadline, as_json=as_json)
    else:
        plan_command.show_step(
            inputs, deadline,
            explain=explain, output_file=output_file, svg=svg, as_json=as_json,
        )  # fmt: skip


def _balance_view(balanced: Balanced, profile: Profile) -> RenderableType:
    """The stages with the smallest largest load, and how good they are."""
    result, request, plan = balanced.balance, balanced.request, balanced.plan
    value, took = format_time(result.value_s), format_time(balanced.planning_s)
    proven = "the smallest possible"
    if not result.exact:
        least = format_time(result.lower_bound_s)
        proven = f"within {result.gap:.1%} of the smallest possible (none is below {least})"
    devices = plural(request.devices, "device")
    lines = [
        f"{profile.name}: {plural(len(result.stages), 'stage')} on {devices}",
        f"largest stage load {value}: {proven}, in {took}",
    ]
    rows = [
        (
            index,
            len(stage.nodes),
            format_time(stage.load_s),
            "█" * round(_BAR * stage.load_s / (result.value_s or 1.0)),
            profile.by_id[stage.nodes[0]].name,
        )
        for index, stage in enumerate(result.stages)
    ]
    stages = table(("stage", "ops", "load", "", "from"), rows, left=("", "from"))
    parts: list[RenderableType] = [*map(plain, lines), stages]
    if plan.prediction is not None:
        parts.append(
            plain(
                f"as a 1f1b pipeline of {plural(plan.micro_batches, 'micro-batch')}: "
                f"{format_time(plan.prediction.step_time_s)} per step, "
                f"bubble {plan.prediction.bubble:.1%}"
            )
        )
    return Group(*parts, *assumption_lines(plan.assumptions))
