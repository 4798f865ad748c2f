"""One call of `pipectl plan`: everything that was asked, and what of it contradicts itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
        _refuse(why, **{"--nodes": ask.nodes, "--explain": ask.explain})
        _refuse(why, **{"-o": ask.output, "--svg": ask.svg})
        _refuse(why, **{"--planner": ask.planner != PIPECTL, "--allow": ask.wishes.allow})
    if ask.planner != PIPECTL:
        _refuse(f"{ask.planner} chooses by its own rules", **{"--allow": ask.wishes.allow})
    if ask.objective is not Objective.MAX_STAGE_LOAD:
        ask.wishes.refuse("only --objective max-stage-load has CPUs beside the devices", "cpus")
    if ask.nodes is not None:
        ask.wishes.refuse("--nodes says how many; choose one", "devices")
        why = "cannot be used with --nodes, which makes several plans"
        _refuse(why, **{"-o": ask.output, "--svg": ask.svg, "--explain": ask.explain})


def _check_without_job(ask: Ask) -> None:
    if ask.profile_file is None:
        raise UsageError("nothing to plan", cure="give JOB.yaml, or a profile: --profile FILE")
    _refuse(
        "is about a job file, and none is given",
        **{"--set": ask.overrides, "--scheduler": ask.scheduler},
    )


def _refuse(why: str, **options: object) -> None:
    for name, value in options.items():
        if value:
            raise UsageError(f"{name}: {why}")
