"""``profile.json``: the measured operator graph of a model. The input of the planner."""

from pipectl.profile.memory import OperatorMemory, StepMemory
from pipectl.profile.operators import NO_TEMPORARIES, Operator
from pipectl.profile.overhead import OptimizerCost, StageOverhead
from pipectl.profile.profile import MeasuredOn, Profile

__all__ = [
    "NO_TEMPORARIES",
    "MeasuredOn",
    "Operator",
    "OperatorMemory",
    "OptimizerCost",
    "Profile",
    "StageOverhead",
    "StepMemory",
]
