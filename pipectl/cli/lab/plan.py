"""`pipectl lab plan`: other objectives, techniques and links, and time limits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import typer

from pipectl.cli import options as opt
from pipectl.cli.commands import plan as plan_command
from pipectl.cli.console import say, say_json, show, table, warn
from pipectl.cli.search import interruptible
from pipectl.cli.views.plan import assumption_lines
from pipectl.errors import UsageError
from pipectl.jobs.plan_search import BalanceJson, PlanSearch, plan_balance
from pipectl.jobs.planning import PlanInputs, gather
from pipectl.plan import Plan, Replication
from pipectl.units import did_you_mean, format_time, parse_bytes, parse_duration, plural

_TECHNIQUES: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": None, "replication": Replication.WHOLE},
    "split": {"replicas": None, "replication": Replication.SPLIT},
    "recompute": {"recompute": None, "segments": None},
    "offload": {"offload": None},
    "pipefb": {"backward_apart": None},
    "schedules": {"every_schedule": True, "schedule": None, "warm_up": None, "listed": None},
}
"""Changes of the request that let the planner use a technique. Split samples change results."""
_BAR = 24
_BITS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)bit\s*")
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def _bandwidth(text: str) -> float:
    """Parse ``1GB/s``, ``100MiB/s`` or ``10Gbit/s`` to bytes per second."""
    amount = text.strip().removesuffix("/s")
    bits = _BITS.fullmatch(amount)
    try:
        return float(bits[1]) * _PREFIXES[bits[2]] / 8 if bits else float(parse_bytes(amount))
    except ValueError:
        raise ValueError(f"{text!r} is not a bandwidth; write for example 1GB/s") from None


def command(
    context: typer.Context,
    job: Path | None = plan_command.JOB_FILE,
    objective: Literal["step-time", "max-stage-load"] = opt.flag(
        "What makes a plan good.", default="step-time"
    ),
    profile_file: Path | None = plan_command.PROFILE_FILE,
    cluster: Path | None = plan_command.CLUSTER_FILE,
    devices: int | None = plan_command.DEVICES,
    memory_limit: int | None = opt.value(
        "SIZE", "Memory of every rank: 8GiB.", parser=opt.read_size
    ),
    bandwidth: float | None = opt.value(
        "RATE", "Bandwidth of every link: 1GB/s.", parser=opt.reader(_bandwidth)
    ),
    communication_scale: float | None = opt.value(
        "X", "Messages take X times as long.", parser=opt.reader(opt.parse_number)
    ),
    allow: list[str] | None = opt.value(
        "NAME,…",
        "Let the planner choose: replicas, split, recompute, offload, pipefb, schedules.",
    ),
    budget: int | None = opt.value(
        "TIME", "Time limit of each search: 10s.", parser=opt.reader(parse_duration, zero=True)
    ),
    output_file: Path | None = opt.value("FILE", "File to write.", "-o", "--output"),
    as_json: bool = opt.JSON,
    overrides: list[str] | None = opt.OVERRIDES,
) -> None:
    if objective == "max-stage-load":
        opt.refuse(context, "-o --allow", f"is not used with --objective {objective}")
    changes = list(overrides or ())
    if memory_limit is not None:
        changes.append(f"pipeline.memory_limit={memory_limit}B")
    inputs = gather(
        job, profile_file, changes, cluster_file=cluster, devices=devices, new_micro_batches=True
    )
    names = [name.strip() for text in allow or () for name in text.split(",")]
    inputs = _change(inputs, names, bandwidth, communication_scale)
    search = PlanSearch(budget)
    if objective == "max-stage-load":
        for warning in inputs.warnings:
            warn(warning)
        links_count = bandwidth is not None or inputs.cluster_file is not None
        scale = communication_scale or 1.0
        with interruptible(search):
            answer, plan = plan_balance(inputs, search, scale, links_count=links_count)
        if as_json:
            say_json(answer)
        else:
            _print_balance(answer, inputs, plan)
        return
    plan_command.plan_and_print(inputs, search, output_file=output_file, as_json=as_json)


def _change(
    inputs: PlanInputs,
    techniques: Sequence[str],
    bandwidth: float | None,
    communication_scale: float | None,
) -> PlanInputs:
    """The inputs with more techniques and other links.

    Raises:
        UsageError: there is no such technique.
    """
    changes: dict[str, Any] = {}
    machines = inputs.cluster
    for name in techniques:
        if name not in _TECHNIQUES:
            raise UsageError(
                f"--allow: there is no technique {name!r}{did_you_mean(name, list(_TECHNIQUES))}",
                hint=f"any of: {', '.join(_TECHNIQUES)}",
            )
        changes |= _TECHNIQUES[name]
    if {"replicas", "split"} <= set(techniques):
        changes["replication"] = None
    if bandwidth is not None:
        machines = machines.with_bandwidth(bandwidth)
    if communication_scale is not None:
        machines = machines.with_slower_links(communication_scale)
    if machines is not inputs.cluster:  # a plan for these is not the job's
        changes["key"] = None
    request = replace(inputs.request, **changes)
    return replace(inputs, request=request, cluster=machines, changes=changes)


def _print_balance(answer: BalanceJson, inputs: PlanInputs, plan: Plan) -> None:
    """Print the stages with the smallest largest load."""
    value_s, stages = answer["value_s"], answer["stages"]
    proven = "the smallest possible"
    if not answer["exact"]:
        least = format_time(answer["lower_bound_s"])
        proven = f"within {answer['gap']:.1%} of the smallest possible (none is below {least})"
    devices = plural(answer["accelerators"], "device")
    say(f"{inputs.profile.name}: {plural(len(stages), 'stage')} on {devices}")
    planning = format_time(answer["planning_s"])
    say(f"largest stage load {format_time(value_s)}: {proven}, in {planning}")
    rows = [
        (
            index,
            len(stage["nodes"]),
            format_time(stage["load_s"]),
            "█" * round(_BAR * stage["load_s"] / (value_s or 1.0)),
            inputs.profile.by_id[stage["nodes"][0]].name,
        )
        for index, stage in enumerate(stages)
    ]
    show(table(("stage", "ops", "load", "", "from"), rows, left=("", "from")))
    if plan.prediction is not None:
        say(
            f"as a 1f1b pipeline of {plural(plan.micro_batches, 'micro-batch')}: "
            f"{format_time(plan.prediction.step_time_s)} per step, "
            f"bubble {plan.prediction.bubble:.1%}"
        )
    show(*assumption_lines(plan.assumptions))
