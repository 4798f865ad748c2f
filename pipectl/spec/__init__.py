"""The job spec: loading, checking, writing and documenting it."""

from pipectl.spec.dump import dump, settled
from pipectl.spec.keys import links_key, plan_key, profile_key
from pipectl.spec.launching import Checkpoint, Environment, Launch, Output
from pipectl.spec.layers import site_files
from pipectl.spec.load import load, load_sweep, load_with_origins
from pipectl.spec.models import JobSpec
from pipectl.spec.origins import Origin
from pipectl.spec.pipeline import Pipeline
from pipectl.spec.points import Point
from pipectl.spec.references import Reference
from pipectl.spec.resources import MoreNodes, NodeKind, Pbs, Resources, Slurm
from pipectl.spec.schedules import GROUP as SCHEDULES_GROUP
from pipectl.spec.schema import json_schema
from pipectl.spec.sweep import Sweep
from pipectl.spec.training import (
    Data,
    Evaluation,
    Factory,
    Loss,
    Optimizer,
    Training,
)

__all__ = [
    "SCHEDULES_GROUP",
    "Checkpoint",
    "Data",
    "Environment",
    "Evaluation",
    "Factory",
    "JobSpec",
    "Launch",
    "Loss",
    "MoreNodes",
    "NodeKind",
    "Optimizer",
    "Origin",
    "Output",
    "Pbs",
    "Pipeline",
    "Point",
    "Reference",
    "Resources",
    "Slurm",
    "Sweep",
    "Training",
    "dump",
    "json_schema",
    "links_key",
    "load",
    "load_sweep",
    "load_with_origins",
    "plan_key",
    "profile_key",
    "settled",
    "site_files",
]
