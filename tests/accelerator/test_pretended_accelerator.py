"""Ranks on an accelerator that torch itself does not know, where there is no real one.

Its tensors are of a device of their own, whose operators refuse tensors of the CPU; messages,
offload and checkpoints go the way they go on any accelerator. It is late: an operator that uses
memory without having waited for its last use fails, and the host does not see what is copied to it
before it has waited. What it cannot show is speed (of snapshots for checkpoints, say, which are
copied while the rank waits), memory that the host does not reach, and memory of other processes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.gpu.building import COMPILER, build

HERE = Path(__file__).parent
TESTS = [
    str(HERE.parent / "runtime" / name)
    for name in ("test_on_accelerators.py", "test_streams_of_accelerators.py")
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes the device known to every Python that has it on its path."""
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


@pytest.mark.gpu
@pytest.mark.skipif(not hasattr(torch, "pretended"), reason="within the test below")
def test_its_operators_refuse_tensors_of_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        torch.embedding(torch.ones(3, 3, device="pretended"), torch.tensor([1]))


@pytest.mark.mpi
@pytest.mark.timeout(3600)  # of many tests, which have their own
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a real one")
@pytest.mark.parametrize(
    "chosen",
    [
        "tied or host_memory or numbers or refuse or streams or snapshot",
        pytest.param("test", marks=pytest.mark.product),
    ],
)
def test_what_is_for_accelerators_passes_on_it(place: Path, warm_python: str, chosen: str) -> None:
    """Messages, optimizers, a GPT whose saved values go to the host; all takes two minutes."""
    options = ("-n0", "-m", "gpu", "-k", chosen, "-p", "no:cacheprovider")
    path = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [warm_python, "-m", "pytest", *options, *TESTS, __file__],
        env={**os.environ, "PYTHONPATH": path, "PRETENDED_LATE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " skipped" not in done.stdout
