"""The fastest plan of a small problem, proven by looking at every other one.

:mod:`units` says what one plan takes at least, :mod:`chains` looks at all cuts of a graph under one
layout, :mod:`layouts` lists what else can be chosen, and :mod:`search` puts this together.
"""

from pipectl.planner.proof.search import proven

__all__ = ["proven"]
