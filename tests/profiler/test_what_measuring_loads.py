"""The measuring process says what a rank's process needs, so it must not hold more than one."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["pipectl.jobs.profile", "pipectl.runtime.worker"])
def test_neither_measuring_nor_training_loads_the_planners_compiler(module: str) -> None:
    program = f"import sys, {module}, pipectl.profiler.job; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
