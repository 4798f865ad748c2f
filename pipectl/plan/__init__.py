"""``plan.json``: the stages, their ranks, the schedule, and what was predicted of them."""

from pipectl.cluster import OffloadTarget
from pipectl.plan.plan import Plan, Prediction, Replication, Search, Transfer
from pipectl.plan.stage import Blocks, Stage, StageCost, StagePeaks

__all__ = [
    "Blocks",
    "OffloadTarget",
    "Plan",
    "Prediction",
    "Replication",
    "Search",
    "Stage",
    "StageCost",
    "StagePeaks",
    "Transfer",
]
