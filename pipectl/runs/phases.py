"""What a job does, as its heartbeat says it: words for people, of which programs compare these."""

from __future__ import annotations

TRAINS = "training"
"""Ranks compute steps."""
DONE = "done"
"""All steps are made, or the training has ended early."""
_AFTER_STEP = " after step "


def evaluates(step: int) -> str:
    """Return the phase in which ranks evaluate the weights after a step."""
    return f"evaluating{_AFTER_STEP}{step}"


def saves(step: int) -> str:
    """Return the phase in which ranks begin to save the state after a step."""
    return f"saving{_AFTER_STEP}{step}"


def step_before(phase: str) -> int | None:
    """Return the step that a phase names, which has ended, but whose reports may be on their way;
    None of other phases."""
    number = phase.partition(_AFTER_STEP)[2]
    return int(number) if number.isascii() and number.isdecimal() else None


def without_details(phase: str) -> str:
    """Return what stays while a phase lasts: ``profiling`` of ``profiling 40%``."""
    return phase.partition(" ")[0]
