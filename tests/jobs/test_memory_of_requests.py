"""What a job's words about memory ask of the planner."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.jobs.planning import request_of
from pipectl.jobs.request import TIGHT_HEAP, make_job, make_request
from pipectl.link import Link
from pipectl.plan import OffloadTarget, Plan, Stage, StageCost
from pipectl.profile import Profile
from pipectl.spec import load

HOST, DISK = OffloadTarget

PROFILE = Profile(
    name="tiny", source="test", micro_batch_size=1, operators=(), edges=(), fingerprint=None
)
JOB = """
version: 1
name: tiny
site_defaults: false
model: {factory: "torch.nn:ReLU"}
loss: {factory: "torch.nn:MSELoss"}
data: {factory: "torch.utils.data:TensorDataset"}
optimizer: {factory: "torch.optim:SGD"}
training: {steps: 1, batch_size: 4}
"""


def asked(
    tmp_path: Path,
    pipeline: str,
    accelerators: int = 0,
    disk: Link | None = None,
    job: str = JOB,
):
    path = tmp_path / "job.yaml"
    resources = f"{{nodes: 2, gpus_per_node: {accelerators}}}"
    path.write_text(f"{job}pipeline: {pipeline}\nresources: {resources}\n")
    cluster = assumed_cluster("here", [1], 1, None)
    device = replace(cluster.nodes[0].device, disk_link=disk)
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], device=device),))
    return request_of(load(path), PROFILE, cluster)


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("auto", (None, None)),
        ("none", (False, False)),
        ("all", (True, False)),
        ("blocks", (True, True)),
    ],
)
def test_recomputation(tmp_path: Path, word: str, wanted: tuple[bool | None, bool | None]) -> None:
    found = asked(tmp_path, f"{{recompute: {word}}}")
    assert (found.recompute, found.blocks) == wanted


@pytest.mark.parametrize(
    ("word", "accelerators", "disk", "wanted"),
    [
        ("none", 0, Link(1e-4, 1e9), (False, DISK)),
        ("disk", 0, None, (True, DISK)),
        ("disk", 1, None, (True, DISK)),
        ("host", 1, None, (True, HOST)),
        ("auto", 1, None, (None, HOST)),
        ("auto", 0, Link(1e-4, 1e9), (None, DISK)),
        ("auto", 0, None, (False, DISK)),  # nobody knows how fast the disk is
    ],
)
def test_offload(tmp_path: Path, word: str, accelerators: int, disk: Link | None, wanted) -> None:
    found = asked(tmp_path, f"{{offload: {word}}}", accelerators, disk)
    assert (found.offload, found.offload_to) == wanted


@pytest.mark.parametrize(("word", "wanted"), [("auto", None), ("together", False), ("apart", True)])
def test_backwards_of_their_own(tmp_path: Path, word: str, wanted: bool | None) -> None:
    assert asked(tmp_path, f"{{backward: {word}, recompute: all}}").backward_apart is wanted


def test_no_backward_leaves_a_rank_that_compiles(tmp_path: Path) -> None:
    compiled = JOB.replace("batch_size: 4", "batch_size: 4, compile: true")
    assert asked(tmp_path, "{backward: auto}", job=compiled).backward_apart is False
    again = asked(tmp_path, "{backward: auto, recompute: all}", job=compiled)
    assert again.backward_apart is None


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("target", ["disk", "host"])
def test_ranks_that_offload_to_a_disk_start_with_a_heap_that_joins_what_is_freed(
    tmp_path: Path, target: str, known: bool
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{JOB}pipeline: {{offload: {target}}}\nresources: {{gpus_per_node: 1}}\n")
    job = make_job(load(path), "local")
    cost = StageCost(1.0, 1.0, 0.0, 1, 1, 1)
    stage = Stage(("a",), (0,), cost, offload=True)
    plan = Plan(
        "tiny", None, "1f1b", (1,), 4, 4, 1, (stage,), (), (0,), offload_to=OffloadTarget(target)
    )
    request = make_request(replace(job, plan=plan if known else None))
    assert request.environment.variables == (TIGHT_HEAP if target == "disk" else {})
    kept = replace(plan, stages=(replace(stage, offload=False),))
    assert make_request(replace(job, plan=kept)).environment.variables == {}


def test_a_job_s_own_setting_of_the_heap_wins(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    own = "environment: {variables: {GLIBC_TUNABLES: glibc.malloc.check=1}}"
    path.write_text(f"{JOB}pipeline: {{offload: disk}}\n{own}\n")
    found = make_request(make_job(load(path), "local")).environment.variables
    assert found == {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
