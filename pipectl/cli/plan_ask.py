"""One call of `pipectl plan`: everything that was asked, and what of it contradicts itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipectl.cli.refusal import refuse
from pipectl.errors import UsageError
from pipectl.jobs.engines import PIPECTL
from pipectl.jobs.wishes import Objective, Wishes


@dataclass(frozen=True)
class Ask:
    """The command line, read.

    Args:
        job: None plans a profile alone.
        overrides: ``--set`` of the job file.
        nodes: numbers of nodes to compare; None plans once.
        new_micro_batches: whether their number may differ from that of the plan before.
        output, svg: files to write besides.
    """

    job: Path | None
    profile_file: Path | None
    scheduler: str | None
    overrides: tuple[str, ...]
    wishes: Wishes
    objective: Objective
    planner: str
    budget_s: int | None
    nodes: tuple[int, ...] | None
    new_micro_batches: bool
    explain: bool
    output: Path | None
    svg: Path | None
    as_json: bool


def check(ask: Ask) -> None:
    """Refuse what contradicts itself.

    Raises:
        UsageError: naming the option.
    """
    if ask.job is None:
        _check_without_job(ask)
    if ask.objective is not Objective.STEP_TIME:
        why = f"has no meaning for --objective {ask.objective}"
        refuse({"--nodes": ask.nodes, "--explain": ask.explain}, why)
        refuse({"-o": ask.output, "--svg": ask.svg}, why)
        refuse({"--planner": ask.planner != PIPECTL, "--allow": ask.wishes.allow}, why)
    if ask.planner != PIPECTL:
        refuse({"--allow": ask.wishes.allow}, f"{ask.planner} chooses by its own rules")
    if ask.objective is not Objective.MAX_STAGE_LOAD:
        ask.wishes.refuse("only --objective max-stage-load has CPUs beside the devices", "cpus")
    if ask.nodes is not None:
        ask.wishes.refuse("--nodes says how many; choose one", "devices")
        why = "cannot be used with --nodes, which makes several plans"
        refuse({"-o": ask.output, "--svg": ask.svg, "--explain": ask.explain}, why)


def _check_without_job(ask: Ask) -> None:
    if ask.profile_file is None:
        raise UsageError("nothing to plan", cure="give JOB.yaml, or a profile: --profile FILE")
    about_jobs = {
        "--set": ask.overrides,
        "--scheduler": ask.scheduler,
        "--new-micro-batches": ask.new_micro_batches,
    }
    refuse(about_jobs, "is about a job file, and none is given")
