"""The measuring process says what a rank's process needs, so it must not hold more than one."""

import subprocess
import sys


def test_neither_measuring_nor_training_loads_the_planners_compiler() -> None:
    modules = "pipectl.jobs.profile, pipectl.runtime.worker, pipectl.profiler.job"
    program = f"import sys, {modules}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
