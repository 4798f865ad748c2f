"""What the measuring process holds: no more than a rank's process, and no MPI."""

import subprocess
import sys


def test_neither_measuring_nor_training_loads_the_planners_compiler() -> None:
    modules = "pipectl.jobs.profiles, pipectl.runtime.worker, pipectl.profiler.job"
    program = f"import sys, {modules}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_measuring_needs_no_mpi() -> None:
    """To start it would take a thread, and fails on some login nodes."""
    program = (
        "import sys, pipectl.jobs.profiles, pipectl.profiler; sys.exit('mpi4py' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
