"""The row probe over a real MPI: its structure and its sanity, no speeds."""

import json
import subprocess
import sys

import pytest

from pipectl.fields import read_fields
from pipectl.link import RowTimes

pytestmark = pytest.mark.mpi


def test_two_ranks_measure_rows(tmp_path, mpiexec):
    output = tmp_path / "rows.json"
    program = [sys.executable, "-m", "mpi4py", "-m", "pipectl.runtime.row_probe"]
    files = ["--run", str(tmp_path), "--output", str(output)]
    done = subprocess.run(
        [mpiexec, "-n", "2", *program, *files], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    rows = read_fields(RowTimes, json.loads(output.read_text()), file="rows", cure="")
    for table in (rows.send_start, rows.send_wait, rows.receive_start, rows.receive_wait):
        assert [size for size, _ in table] == [4096, 65536, 262144, 1048576]
        assert all(0 < seconds < 1 for _, seconds in table)
    assert 0 < rows.compute < 1
    assert 0 < rows.begin < 1
    assert 0 < rows.end < 1
