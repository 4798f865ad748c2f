import pytest

from pipectl.runtime import clock


@pytest.mark.parametrize("what", ["_BOOT", "_NAMESPACE"])
def test_machines_and_namespaces_of_clocks_are_told_apart(monkeypatch, tmp_path, what):
    for name in ("_BOOT", "_NAMESPACE"):
        (tmp_path / name).symlink_to(__file__)
        monkeypatch.setattr(clock, name, tmp_path / name)
    here = clock._machine()
    assert clock._machine() == here
    (tmp_path / "other").write_text("other")
    (tmp_path / what).unlink()
    (tmp_path / what).symlink_to(tmp_path / "other")
    assert clock._machine() != here


AGREEING = """
from mpi4py import MPI
from pipectl.runtime.clock import CommonClock, agree
assert agree(MPI.COMM_WORLD.Dup()) == CommonClock(0.0, 0.0)
"""


@pytest.mark.mpi
def test_ranks_of_one_machine_read_the_same_clock(launch, tmp_path):
    script = tmp_path / "agreeing.py"
    script.write_text(AGREEING)
    done = launch(2, script)
    assert done.returncode == 0, done.stderr
