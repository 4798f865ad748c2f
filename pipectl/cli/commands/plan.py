"""`pipectl plan`: cut the model into stages and show what to expect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli import plan_options as given
from pipectl.cli.options import Json, Overrides, SchedulerOption
from pipectl.jobs.wishes import Objective, Wishes

if TYPE_CHECKING:
    from pipectl.cli.plan_ask import Ask

OptionalJobFile = Annotated[
    Path | None, typer.Argument(metavar="[JOB.yaml]", help="The job spec; or give --profile.")
]


def command(
    job: OptionalJobFile = None,
    profile_file: given.ProfileFile = None,
    output_file: given.OutputFile = None,
    scheduler: SchedulerOption = None,
    svg: given.SvgFile = None,
    cluster: given.ClusterFile = None,
    batch_size: given.BatchSize = None,
    micro_batches: given.MicroBatches = None,
    devices: given.Devices = None,
    cpus: given.Cpus = None,
    memory_limit: given.MemoryLimit = None,
    bandwidth: given.Bandwidth = None,
    communication_scale: given.CommunicationScale = None,
    objective: given.ObjectiveOption = Objective.STEP_TIME,
    planner: given.PlannerName = "pipectl",
    budget: given.Budget = None,
    nodes: given.NodeCounts = None,
    allow: given.Allow = None,
    new_micro_batches: given.NewMicroBatches = False,
    explain: given.Explain = False,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    """Choose stages, ranks and schedule, and predict a step."""
    from pipectl.cli.plan_ask import Ask, check

    wishes = Wishes(
        batch_size=batch_size, micro_batches=micro_batches, cluster=cluster, devices=devices,
        cpus=cpus, memory_limit_bytes=memory_limit, bandwidth_bytes_per_s=bandwidth,
        communication_scale=communication_scale, allow=given.techniques(allow),
    )  # fmt: skip
    ask = Ask(
        job=job, profile_file=profile_file, scheduler=scheduler, overrides=tuple(overrides or ()),
        wishes=wishes, objective=objective, planner=planner, budget_s=budget,
        nodes=given.counts(nodes), new_micro_batches=new_micro_batches, explain=explain,
        output=output_file, svg=svg, as_json=as_json,
    )  # fmt: skip
    check(ask)
    _answer(ask)


def _answer(ask: Ask) -> None:
    if ask.objective is Objective.MAX_STAGE_LOAD:
        from pipectl.cli.plan_balance import answer
    elif ask.objective is Objective.THROUGHPUT:
        from pipectl.cli.plan_throughput import answer
    elif ask.nodes is not None:
        from pipectl.cli.plan_nodes import answer
    else:
        from pipectl.cli.plan_step import answer
    answer(ask)
