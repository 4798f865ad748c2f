"""Capture: a user's model, loss and data as a graph that can be cut anywhere."""

from pipectl.capture.graph import CapturedGraph, State
from pipectl.capture.job import CapturedJob
from pipectl.capture.stage import (
    Cut,
    Slot,
    StageCode,
    build_stage,
    evaluation_stages,
)

__all__ = [
    "CapturedGraph",
    "CapturedJob",
    "Cut",
    "Slot",
    "StageCode",
    "State",
    "build_stage",
    "evaluation_stages",
]
