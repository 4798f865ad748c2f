"""Figures in a line of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """A character a value, or for as many neighbours as it takes to fit, their mean.

    Args:
        width: characters at most.
    """
    count = min(len(values), width)
    bounds = [index * len(values) // count for index in range(count + 1)] if count else []
    means = [fmean(values[a:b]) for a, b in pairwise(bounds)]
    if not means:
        return ""
    low, span = min(means), max(means) - min(means)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(top * (mean - low) / span) if span else 0] for mean in means)
