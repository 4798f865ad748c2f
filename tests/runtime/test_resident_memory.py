"""The resident memory of a rank: which part the reported peak counts, and what it keeps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipectl.jobs.job import TIGHT_HEAP

MIB = 2**20


def measure(what: str, environment: dict[str, str] | None = None) -> list[int]:
    command = [sys.executable, str(Path(__file__).with_name("resident_memory.py")), what]
    environment = {**os.environ, **(environment or {})}
    return [*map(int, subprocess.check_output(command, env=environment, text=True).split())]


def test_a_copy_for_a_checkpoint_does_not_count() -> None:
    during, beside, after, with_large = measure("with_a_copy")
    assert during < 8 * MIB
    assert beside == pytest.approx(64 * MIB, abs=8 * MIB)
    assert after < 72 * MIB
    assert with_large == pytest.approx(192 * MIB, abs=16 * MIB)  # the copy has 256 MiB


def test_parameters_of_other_ranks_return_to_the_system_and_memory_of_steps_stays() -> None:
    kept, added = measure("with_dropped_parameters")
    assert kept == pytest.approx(64 * MIB, abs=16 * MIB)
    assert added > 48 * MIB


def test_a_rank_does_not_grow_while_micro_batches_leave() -> None:
    saved, grown = measure("with_micro_batches_that_leave", TIGHT_HEAP)
    assert saved > 8 * MIB
    assert grown < saved / 2
