"""What the command line asks of the planner besides the job file, or instead of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

from pipectl.errors import UsageError


class Objective(StrEnum):
    """What makes a plan good."""

    STEP_TIME = "step-time"
    MAX_STAGE_LOAD = "max-stage-load"
    THROUGHPUT = "throughput"


class Technique(StrEnum):
    """What the planner chooses only where it is allowed: the job has not asked for it, or results
    change (split samples)."""

    REPLICAS = "replicas"
    SPLIT = "split"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    PIPEFB = "pipefb"
    INTERLEAVE = "interleave"


@dataclass(frozen=True)
class Wishes:
    """Settings of `pipectl plan`; None leaves each to the job file, the profile or the planner.

    Args:
        cluster: file that describes the machines.
        devices: how many to use.
        cpus: besides the accelerators, for the objective ``max-stage-load``.
        bandwidth_bytes_per_s: of every link.
        communication_scale: how many times as long every message takes.
        allow: techniques that the planner may choose.
    """

    batch_size: int | None = None
    micro_batches: int | None = None
    cluster: Path | None = None
    devices: int | None = None
    cpus: int | None = None
    memory_limit_bytes: int | None = None
    bandwidth_bytes_per_s: float | None = None
    communication_scale: float | None = None
    allow: tuple[Technique, ...] = ()

    def in_job(self) -> list[str]:
        """Those that a job file has keys for, as its overrides."""
        keys = {
            "training.batch_size": self.batch_size,
            "pipeline.micro_batches": self.micro_batches,
            "pipeline.memory_limit": self.memory_limit_bytes,
            "cluster": self._cluster_in_job(),
        }
        return [f"{key}={value}" for key, value in keys.items() if value is not None]

    def _cluster_in_job(self) -> str | None:
        """Quoted, as the names of files may mean something else in YAML."""
        if self.cluster is None:
            return None
        return json.dumps(str(self.cluster.absolute()), ensure_ascii=False)

    @property
    def is_what_if(self) -> bool:
        """Whether the plan may be for other machines, or of another kind, than a job would run."""
        names = ("devices", "bandwidth_bytes_per_s", "communication_scale")
        return bool(self.allow) or any(getattr(self, name) is not None for name in names)

    def refuse(self, why: str, *names: str) -> None:
        """Raise an error about options that were given and have no meaning here.

        Raises:
            UsageError: naming the first.
        """
        for field in fields(self):
            if field.name in names and getattr(self, field.name) is not None:
                raise UsageError(f"--{field.name.replace('_', '-')}: {why}")
