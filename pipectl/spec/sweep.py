"""The section of the spec that makes several runs of one job."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from pipectl.spec.section import Section
from pipectl.spec.tree import plain
from pipectl.spec.values import Count

Grid = Annotated[dict[str, tuple[Any, ...]], BeforeValidator(plain)]
Settings = Annotated[tuple[dict[str, Any], ...], BeforeValidator(plain)]


class Sweep(Section):
    """Several runs of this job that differ in some values: a job array on Slurm and PBS.

    Keys are dotted as for `--set`. What decides which nodes a job gets is the same for all runs:
    `version`, `name`, `resources`, `slurm`, `pbs`, `launch.scheduler`, `launch.template`, `output`,
    `site_defaults` and how a checkpoint is asked for (`on_signal`, `lead_time`, `max_requeues`)
    cannot be swept. All commands but `check` and `submit` leave the sweep alone, and work on the
    job as the rest of the file says. See [sweeps](sweeps.md).
    """

    grid: Grid = Field(
        default_factory=dict,
        description="Keys with lists of values, such as `optimizer.kwargs.lr: [1e-3, 3e-4]`; every "
        "combination is a run.",
    )
    points: Settings = Field(
        default=(), description="Further runs, each a mapping of keys to values."
    )
    at_once: Count | None = Field(
        default=None,
        description="How many may run at the same time; by default all that the batch system "
        "starts, and on this machine one.",
    )
