"""The job that most tests are about, and a profile of its model."""

from itertools import pairwise

import pytest

from pipectl.profile import Profile
from pipectl.profile_parts import Operator, OperatorMemory, OptimizerCost

JOB = """\
version: 1
name: tiny
model: {factory: "m:build"}
loss: {factory: "model"}
data: {factory: "m:data"}
training: {steps: 4, batch_size: 8}
site_defaults: false
"""


@pytest.fixture
def write_job(tmp_path):
    """``write_job("resources: {nodes: 2}")`` writes ``job.yaml`` with these further lines."""

    def write(*lines):
        path = tmp_path / "job.yaml"
        path.write_text(JOB + "".join(f"{line}\n" for line in lines))
        return path

    return write


@pytest.fixture(scope="session")
def profile():
    """A chain of six operators."""
    names, memory = [f"op{index}" for index in range(6)], OperatorMemory(0, "op0", 0, 0)
    more = {"timings": {4: (0.02, 0.04)}, "memory": memory}
    operators = tuple(
        Operator(name, name, 0.01, 0.02, 4000, 1000, 1000, ((name, 4000),), **more)
        for name in names
    )
    edges, cost = tuple(pairwise(names)), OptimizerCost(2.0, 1e-9)
    return Profile("tiny", "test", 2, operators, edges, "abc", cost, process_baseline_bytes=2**28)
