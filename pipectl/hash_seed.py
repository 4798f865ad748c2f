"""One hash seed for all processes of a run.

Python hashes text differently in every process. A dataset that numbers words by their order in a
set would have other numbers on every rank, and a model built from a set another graph. Python takes
the number in ``PYTHONHASHSEED`` instead, but reads it only when it starts: job scripts export it,
and commands that run the user's code start again under it (`cli/restart.py`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from functools import cache

VARIABLE = "PYTHONHASHSEED"
DRAWN = "PIPECTL_HASH_SEED"
"""Environment variable with the number that was drawn for a job that asks for a random one."""
MAX_SEED = 2**32 - 1
RANDOM = "random"


def hash_seed_of(variables: Mapping[str, str]) -> int:
    """The hash seed of a job: that of its variables, else of this process's environment, else 0.

    ``random`` in one of them stands for a number that is drawn once per command.

    Args:
        variables: ``environment.variables`` of the job.
    """
    text = variables.get(VARIABLE) or os.environ.get(VARIABLE, "")
    if text != RANDOM:
        return int(text) if is_seed(text) else 0
    drawn = os.environ.get(DRAWN, "")
    return int(drawn) if is_seed(drawn) else _draw()


def seed_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables under which a process of the job must start.

    Args:
        variables: ``environment.variables`` of the job.
    """
    seed = str(hash_seed_of(variables))
    drawn = {DRAWN: seed} if variables.get(VARIABLE) == RANDOM else {}
    return {VARIABLE: seed, **drawn}


def is_seed(text: str) -> bool:
    """Whether Python takes a text for a hash seed; it also takes ``random``."""
    return text.isascii() and text.isdecimal() and int(text) <= MAX_SEED


@cache
def _draw() -> int:
    return 1 + secrets.randbelow(MAX_SEED)
