"""`pipectl lab plan`: other planners, objectives, techniques and links, and time limits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import typer

from pipectl.cli import options as opt
from pipectl.cli.commands import plan as plan_command
from pipectl.cli.console import say, say_json, show, table, warn
from pipectl.cli.views.plan import assumption_lines
from pipectl.errors import InfeasibleError, PipectlError, UsageError
from pipectl.jobs.plan_search import PlanSearch
from pipectl.jobs.planning import PlanInputs, gather
from pipectl.plan import Replication
from pipectl.planner.balance.balance import balance
from pipectl.planner.balance.load_model import BalanceRequest
from pipectl.planner.baselines import NAMES, OWN
from pipectl.planner.explain.what_if import with_bandwidth, with_ranks, with_slower_links
from pipectl.planner.graph.imported import folded, prepared
from pipectl.planner.judge import plan_of_stages
from pipectl.units import (
    did_you_mean,
    format_bytes,
    format_time,
    parse_bytes,
    parse_duration,
    plural,
)

_TECHNIQUES: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": None, "replication": Replication.WHOLE},
    "split": {"replicas": None, "replication": Replication.SPLIT},
    "recompute": {"recompute": None, "blocks": None},
    "offload": {"offload": None},
    "pipefb": {"backward_apart": None},
    "schedules": {"every_schedule": True},
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
    planner: str = opt.value(
        "NAME", "dapple, pipedream, …: plan as others do, to compare.", default=OWN
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
    scheduler: opt.SchedulerName | None = opt.SCHEDULER,
    nodes: list[str] | None = plan_command.NODE_COUNTS,
    explain: bool = plan_command.EXPLAIN,
    output_file: Path | None = opt.value("FILE", "File to write.", "-o", "--output"),
    svg: Path | None = plan_command.SVG_FILE,
    as_json: bool = opt.JSON,
    overrides: list[str] | None = opt.OVERRIDES,
) -> None:
    if job is None:
        opt.refuse(context, "--scheduler", "needs a JOB.yaml")
    if objective == "max-stage-load":
        of_steps = "--nodes --explain -o --svg --planner --allow"
        opt.refuse(context, of_steps, f"is not used with --objective {objective}")
    if planner != OWN:
        opt.refuse(context, "--allow", f"{planner} chooses by its own rules")
    changes = list(overrides or ())
    if memory_limit is not None:
        changes.append(f"pipeline.memory_limit={memory_limit}B")
    counts = plan_command.read_node_counts(context, nodes)
    inputs = gather(
        job, profile_file, changes, scheduler=scheduler, cluster=cluster, devices=devices,
        nodes=counts, new_micro_batches=True,
    )  # fmt: skip
    names = [name.strip() for text in allow or () for name in text.split(",")]
    inputs = _change(inputs, planner, names, bandwidth, communication_scale)
    search = PlanSearch(planner, budget)
    if objective == "max-stage-load":
        _show_balance(inputs, search, bandwidth, communication_scale, as_json=as_json)
        return
    plan_command.plan_and_print(
        inputs, search, counts,
        explained=explain, output_file=output_file, svg=svg, as_json=as_json,
    )  # fmt: skip


def _change(
    inputs: PlanInputs,
    planner: str,
    techniques: Sequence[str],
    bandwidth: float | None,
    communication_scale: float | None,
) -> PlanInputs:
    """The inputs with more techniques and other links.

    Raises:
        UsageError: there is no such planner or technique, or the planner ignores the schedule.
    """
    request, machines = inputs.request, inputs.cluster
    if planner not in NAMES:
        raise UsageError(
            f"--planner: there is no planner {planner!r}{did_you_mean(planner, NAMES)}",
            cure=f"one of: {', '.join(NAMES)}",
        )
    if planner != OWN and request.listed is not None:
        raise UsageError(
            f"--planner {planner}: chooses a schedule, but the job has {request.listed.name}",
            cure="leave --planner out, or set pipeline.schedule: auto",
        )
    for name in techniques:
        if name not in _TECHNIQUES:
            raise UsageError(
                f"--allow: there is no technique {name!r}{did_you_mean(name, list(_TECHNIQUES))}",
                cure=f"any of: {', '.join(_TECHNIQUES)}",
            )
        request = replace(request, **_TECHNIQUES[name])
    if {"replicas", "split"} <= set(techniques):
        request = replace(request, replication=None)
    if bandwidth is not None:
        machines = with_bandwidth(machines, bandwidth)
    if communication_scale is not None:
        machines = with_slower_links(machines, communication_scale)
    if machines is not inputs.cluster:  # a plan for these is not the job's
        request = replace(request, key=None)
    return replace(inputs, request=request, cluster=machines)


class BalanceJson(TypedDict):
    """The partition with the smallest largest stage load.

    Args:
        objective: ``max-stage-load``.
        value_s: the largest stage load.
        lower_bound_s, gap: no partition has a smaller load; how far the value is above it.
        exact: whether it is proven to be the smallest.
        planning_s: time of the search.
        accelerators: number of devices.
        memory_limit_bytes: memory of a device; null if not limited.
        bandwidth_bytes_per_s: of a link, for values without ``transfer_s``; null if not given.
        communication_scale: factor of every ``transfer_s``.
        stages: of each stage ``nodes``, ``replicas``, ``devices``, ``device`` and ``load_s``.
        predicted: a simulated step, as ``prediction`` in ``plan.json``.
        assumptions: what neither profile nor cluster said.
        cut_short: whether ``--budget`` or Ctrl-C ended the search.
    """

    objective: str
    value_s: float
    lower_bound_s: float
    gap: float
    exact: bool
    planning_s: float
    accelerators: int
    memory_limit_bytes: float | None
    bandwidth_bytes_per_s: float | None
    communication_scale: float
    stages: list[dict[str, Any]]
    predicted: dict[str, Any]
    assumptions: list[str]
    cut_short: bool


def _show_balance(
    inputs: PlanInputs,
    search: PlanSearch,
    bandwidth: float | None,
    communication_scale: float | None,
    *,
    as_json: bool,
) -> None:
    """Minimise the largest stage load, as related work does, and print the stages.

    The prediction is that of 1F1B with one device per stage.
    """
    for warning in inputs.warnings:
        warn(warning)
    profile, cluster = prepared(inputs.profile), inputs.cluster
    # What values cost counts if the bandwidth is given, by a cluster file or here. The scale of
    # messages is in it already.
    links_count = bandwidth is not None or inputs.cluster_file is not None
    request = BalanceRequest(
        devices=cluster.ranks,
        memory_limit_bytes=inputs.request.memory_limit_bytes,
        bandwidth_bytes_per_s=cluster.widest_link.bandwidth_bytes_per_s if links_count else None,
        communication_scale=communication_scale or 1.0,
    )
    with plan_command.interruptible(search):
        search.restart()
        result = balance(profile, request, search.expired)
        planning_s = search.elapsed_s
    if result is None and search.cut_short:
        raise PipectlError("planning was ended before any plan was found", cure="allow more time")
    if result is None:
        limit = request.memory_limit_bytes
        within = "" if limit is None else f" of {format_bytes(limit)} each"
        names = inputs.request.named("ranks"), inputs.request.named("memory_limit")
        raise InfeasibleError(
            f"no feasible plan: no partition fits on {request.devices} devices{within}",
            cure=f"give {names[0]}, or a larger {names[1]}",
        )
    nodes = [stage.nodes for stage in result.stages]
    machines = with_ranks(cluster, len(nodes))
    plan = plan_of_stages(folded(profile, nodes), machines, inputs.request, nodes)
    if as_json:
        stages = [
            {"nodes": list(stage.nodes), "replicas": 1, "devices": [index], "device": "acc",
             "load_s": stage.load_s}
            for index, stage in enumerate(result.stages)
        ]  # fmt: skip
        answer: BalanceJson = {
            "objective": "max-stage-load",
            "value_s": result.value_s,
            "lower_bound_s": result.lower_bound_s,
            "gap": result.gap,
            "exact": result.exact,
            "planning_s": planning_s,
            "accelerators": request.devices,
            "memory_limit_bytes": request.memory_limit_bytes,
            "bandwidth_bytes_per_s": request.bandwidth_bytes_per_s,
            "communication_scale": request.communication_scale,
            "stages": stages,
            "predicted": plan.to_json()["prediction"],
            "assumptions": list(plan.assumptions),
            "cut_short": search.cut_short,
        }
        say_json(answer)
        return
    proven = "the smallest possible"
    if not result.exact:
        least = format_time(result.lower_bound_s)
        proven = f"within {result.gap:.1%} of the smallest possible (none is below {least})"
    devices, value = plural(request.devices, "device"), format_time(result.value_s)
    say(f"{inputs.profile.name}: {plural(len(nodes), 'stage')} on {devices}")
    say(f"largest stage load {value}: {proven}, in {format_time(planning_s)}")
    rows = [
        (
            index,
            len(stage.nodes),
            format_time(stage.load_s),
            "█" * round(_BAR * stage.load_s / (result.value_s or 1.0)),
            inputs.profile.by_id[stage.nodes[0]].name,
        )
        for index, stage in enumerate(result.stages)
    ]
    show(table(("stage", "ops", "load", "", "from"), rows, left=("", "from")))
    if plan.prediction is not None:
        say(
            f"as a 1f1b pipeline of {plural(plan.micro_batches, 'micro-batch')}: "
            f"{format_time(plan.prediction.step_time_s)} per step, "
            f"bubble {plan.prediction.bubble:.1%}"
        )
    show(*assumption_lines(plan.assumptions))
