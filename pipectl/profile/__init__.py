"""``profile.json``: the measured operator graph of a model. The input of the planner."""

from pipectl.profile.operators import (
    Operator,
    OperatorMemory,
    OptimizerCost,
    StageOverhead,
    StepMemory,
)
from pipectl.profile.profile import MeasuredOn, Profile

__all__ = [
    "MeasuredOn", "Operator", "OperatorMemory", "OptimizerCost", "Profile", "StageOverhead",
    "StepMemory",
]  # fmt: skip
