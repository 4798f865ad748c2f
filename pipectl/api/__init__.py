"""What `import pipectl` offers to scripts and notebooks: jobs, plans and runs.

Like the commands, it is thin over the use cases in `jobs/`: it reads arguments, calls them, and
gives back what they return. It prints nothing unless asked, and no code of the user runs in its
process.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from pipectl.api.job import Job
from pipectl.api.plan import Plan
from pipectl.api.run import Run, runs
from pipectl.runs import Best

__all__ = ["Best", "Job", "Plan", "Run", "runs"]


class _Runs(ModuleType):
    """The package `pipectl.runs`, which hides the function of that name once it is imported."""

    def __call__(self, directory: str | os.PathLike[str] | None = None) -> list[Run]:
        return runs(directory)


sys.modules["pipectl.runs"].__class__ = _Runs
