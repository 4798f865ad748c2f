"""Figures in a line of text."""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.report.curves import thinned

_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """A character a value, or for as many neighbours as it takes to fit, their mean.

    Args:
        width: characters at most.
    """
    if not values:
        return ""
    means = [mean for _, mean in thinned(list(enumerate(values)), width)]
    low, span = min(means), max(means) - min(means)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(top * (mean - low) / span) if span else 0] for mean in means)
