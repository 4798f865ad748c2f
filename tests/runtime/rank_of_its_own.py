"""A rank of two whose second differs: ``rank_of_its_own.py RUN_OF_0 RUN_OF_1 [CHANGE]``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from pipectl.capture import CapturedJob
from pipectl.runtime import agreement
from pipectl.runtime.process import run_rank
from pipectl.runtime.worker import run


def change(what: str) -> None:
    """Let this rank be another one."""
    if what == "pipectl":
        agreement.__version__ = "0.0.7"
    elif what == "torch":
        torch.__version__ = "0.0.7"
    elif what == "stranger":
        agreement.identity = lambda *_: ("a fingerprint", "a hash")
    elif what == "deeper":
        build_other_model()
    elif what == "accelerator":
        see_an_accelerator()


def build_other_model() -> None:
    built = CapturedJob.__init__

    def deeper(self: CapturedJob, spec: Any) -> None:
        model = spec.model.model_copy(update={"kwargs": {"depth": 3}})
        built(self, spec.model_copy(update={"model": model}))

    CapturedJob.__init__ = deeper


def see_an_accelerator() -> None:
    """As torch would name one; nothing is computed on it before the ranks have agreed."""
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")


if __name__ == "__main__":
    first, second, *changes = sys.argv[1:]
    if MPI.COMM_WORLD.rank == 1:
        for item in changes:
            change(item)
    sys.argv[1:] = ["--run", str(Path((first, second)[MPI.COMM_WORLD.rank]))]
    run_rank(run, __doc__)
