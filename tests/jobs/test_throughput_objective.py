import json
import os
from pathlib import Path

import pytest

from pipectl.errors import InfeasibleError
from pipectl.jobs.deadline import Deadline
from pipectl.jobs.subject import for_steps, subject_of_profile
from pipectl.jobs.throughput import Throughput, find_throughput
from pipectl.jobs.wishes import Wishes
from pipectl.profile import Profile

WORKLOADS = os.environ.get("PIPECTL_WORKLOADS")


def profile(**changes: object) -> Profile:
    """A chain of three operators of 1, 2 and 3 s that nothing is sent between."""
    nodes = [
        {"id": f"n{i}", "forward_s": 0.4 * i, "backward_s": 0.6 * i, "parameter_bytes": 0}
        | {"output_bytes": 0, "saved": [[f"n{i}", 100]]}
        for i in (1, 2, 3)
    ]
    edges = [["n1", "n2"], ["n2", "n3"]]
    document = {"name": "chain", "micro_batch_size": 2, "nodes": nodes, "edges": edges, **changes}
    return Profile.from_json(document)


def found_with(wishes: Wishes, **changes: object) -> Throughput:
    return find_throughput(for_steps(subject_of_profile(profile(**changes), wishes)), Deadline())


def test_six_devices_share_six_seconds():
    found = found_with(Wishes(devices=6, micro_batches=12))
    assert found.plan.value_s == pytest.approx(1.0)
    assert found.plan.exact
    assert found.samples_per_s == pytest.approx(2.0)


def test_devices_are_numbered_stage_by_stage():
    found = json.loads(json.dumps(found_with(Wishes(devices=6, micro_batches=12)).to_json()))
    numbers = [device for stage in found["stages"] for device in stage["devices"]]
    assert numbers == list(range(len(numbers)))
    for stage in found["stages"]:
        assert len(stage["devices"]) == stage["replicas"] * stage["tensor_parallel"]
    assert found["objective"] == "throughput"
    assert (found["gap"], found["exact"]) == (0.0, True)


def test_the_micro_batches_of_a_step():
    assert found_with(Wishes(devices=2)).request.micro_batches == 8
    assert found_with(Wishes(devices=2, batch_size=6)).request.micro_batches == 3
    shipped = {"microbatches_in_batch": 5}
    assert found_with(Wishes(devices=2), cluster=shipped).request.micro_batches == 5
    wishes = Wishes(devices=2, micro_batches=7)
    assert found_with(wishes, cluster=shipped).request.micro_batches == 7


def test_what_does_not_fit():
    wishes = Wishes(devices=1, micro_batches=4, memory_limit_bytes=299)
    with pytest.raises(InfeasibleError, match="no stages on 1 devices of 299 B each") as caught:
        found_with(wishes)
    assert caught.value.cure == "give more --devices, or a larger --memory-limit"


@pytest.mark.skipif(WORKLOADS is None, reason="PIPECTL_WORKLOADS is not set")
def test_pipers_model_on_64_devices():
    wishes = Wishes(devices=64, memory_limit_bytes=2**33, bandwidth_bytes_per_s=25 * 2.0**30)
    path = Path(str(WORKLOADS)) / "piper-bert32a100.json"
    found = find_throughput(for_steps(subject_of_profile(Profile.load(path), wishes)), Deadline())
    assert found.plan.value_s == pytest.approx(0.0202006, rel=1e-5)
    assert found.plan.exact
