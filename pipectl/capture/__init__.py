"""Capture: a user's model, loss and data as a graph that can be cut anywhere."""

from pipectl.capture.cut import Cut, Lane, Slot, evaluation_stages
from pipectl.capture.graph import CapturedGraph, State
from pipectl.capture.job import CapturedJob
from pipectl.capture.stage import StageCode, build_stage

__all__ = [
    "CapturedGraph",
    "CapturedJob",
    "Cut",
    "Lane",
    "Slot",
    "StageCode",
    "State",
    "build_stage",
    "evaluation_stages",
]
