"""What a job does, as its heartbeat says it: words for people, of which programs compare these."""

from __future__ import annotations

TRAINS = "training"
"""Ranks compute steps."""
_AFTER_STEP = " after step "


def evaluates(step: int) -> str:
    """Return the phase in which ranks evaluate the weights after a step."""
    return f"evaluating{_AFTER_STEP}{step}"


def is_between_steps(phase: str) -> bool:
    """Return whether a phase names the step that has ended, whose reports may be on their way."""
    return _AFTER_STEP in phase


def without_details(phase: str) -> str:
    """Return what stays while a phase lasts: ``profiling`` of ``profiling 40%``."""
    return phase.partition(" ")[0]
