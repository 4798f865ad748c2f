"""The variables of a job, where its code runs without its job script: in the process of a command.

Ranks get ``environment.variables`` from their job script. A factory or module of the user may read
them, so they must hold wherever such code runs: when a model is measured or verified here, too.
Python reads ``PYTHONHASHSEED`` only when it starts; see `cli/restart.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipectl.hash_seed import VARIABLE

_SEARCH = "PYTHONPATH"


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, and of those that it starts, for a while.

    Args:
        variables: ``environment.variables`` of a job.
    """
    variables = {name: text for name, text in variables.items() if name != VARIABLE}
    before = {name: os.environ.get(name) for name in variables}
    search = sys.path[:]
    os.environ.update(variables)
    known = set(search)
    entries = variables.get(_SEARCH, "").split(os.pathsep)
    sys.path[:0] = [e for e in entries if Path(e).is_absolute() and e not in known]
    try:
        yield
    finally:
        added = [entry for entry in sys.path if entry not in known and entry not in entries]
        sys.path[:] = [*added, *search]  # the user's code may have added some
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
