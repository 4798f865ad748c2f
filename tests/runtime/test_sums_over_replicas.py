"""Sums over replicas on real ranks: the same bits everywhere, in the order of the replicas."""

from __future__ import annotations

import importlib.util
import json
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

from pipectl.cluster import assumed_cluster
from pipectl.link import Link
from pipectl.plan import Stage, StageCost
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.reduction import Bucket, StageReduction
from pipectl.runtime.transport import Progress, Wire
from pipectl.simulate.network import reduction_s

PROGRAM = Path(__file__).with_name("ranks_that_sum.py")
_SPEC = importlib.util.spec_from_file_location("ranks_that_sum", PROGRAM)
assert _SPEC is not None
assert _SPEC.loader is not None
RANKS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(RANKS)


@pytest.fixture(scope="module", params=[(2, "none"), (3, "thread")], ids=str)
def found(
    request: pytest.FixtureRequest,
    launch: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    ranks, mode = request.param
    file = tmp_path_factory.mktemp("sums") / "found.json"
    done = launch(ranks, PROGRAM, file, mode)
    assert done.returncode == 0, done.stderr
    loaded: list[dict[str, Any]] = json.loads(file.read_text())
    return loaded


def expected(name: str, ranks: int, dtype: torch.dtype) -> list[float]:
    parts = [RANKS.gradient(name, rank, dtype).float() for rank in range(ranks)]
    total: list[float] = reduce(torch.add, parts).to(dtype).double().tolist()
    return total


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_replica_has_the_sum_in_float32_by_rising_replica(
    found: list[dict[str, Any]], dtype: torch.dtype
) -> None:
    key = str(dtype).removeprefix("torch.")
    for mine in found:
        assert mine[key].pop("unused") is None
        assert mine[key] == {name: expected(name, len(found), dtype) for name in mine[key]}


@pytest.mark.mpi
def test_sharded_sums_are_at_their_owners_alone(found: list[dict[str, Any]]) -> None:
    owners = RANKS.owners_of(RANKS.made(torch.float32), len(found))
    for replica, mine in enumerate(found):
        for name, owner in owners.items():
            here = owner == replica and name != "unused"
            wanted = expected(name, len(found), torch.float32) if here else None
            assert mine["sharded"][name] == wanted


@pytest.mark.mpi
def test_sums_begin_within_the_last_backward_and_no_earlier_one(
    found: list[dict[str, Any]],
) -> None:
    for mine in found:
        assert mine["begun"] == {"earlier": [False, False], "last": [True, True]}


@pytest.mark.mpi
def test_a_gradient_of_one_replica_is_one_of_all(
    found: list[dict[str, Any]],
) -> None:
    everywhere = [float(len(found))]
    for mine in found:
        assert mine["branching"] == {"a": everywhere, "b": everywhere, "c": [1.0], "unused": None}


@pytest.mark.mpi
def test_all_replicas_get_what_an_owner_updated(found: list[dict[str, Any]]) -> None:
    owners = RANKS.owners_of(RANKS.made(torch.float32), len(found))
    for mine in found:
        assert mine["shared"] == {
            name: [1.0 + owner] * RANKS.SIZES[name] for name, owner in owners.items()
        }


@pytest.mark.mpi
def test_statistics_are_means_over_micro_batches_and_counts_are_sums(
    found: list[dict[str, Any]],
) -> None:
    micro_batches = len(found) + 1
    mean = sum(12.0 * replica for replica in range(len(found))) / micro_batches
    for mine in found:
        assert mine["agreed"] == {
            "mean": [mean, 2 * mean],
            "phase": [mean],
            "same": [0.1, math.inf],
            "count": [5 + micro_batches],
            "large": [2**60 + len(found)],
            "place": [1],
            "seen": [True, False, True],
        }


class Counting:
    """What replicas exchange, with others that answer at once; counts what it holds."""

    def __init__(self, replicas: int) -> None:
        self.rank, self.size = 0, replicas
        self.others = list(range(1, replicas))
        self.sent_bytes = 0
        self._buffers: list[weakref.ref[torch.Tensor]] = []

    @property
    def held_bytes(self) -> int:
        held = [buffer() for buffer in self._buffers]
        return sum(buffer.nbytes for buffer in held if buffer is not None)

    def send(self, vector: torch.Tensor, *_: int) -> torch.Tensor:
        self.sent_bytes += vector.nbytes
        return vector

    def receive(self, count: int, dtype: torch.dtype, *_: object) -> torch.Tensor:
        buffer = torch.ones(count, dtype=dtype)
        self._buffers.append(weakref.ref(buffer))
        return buffer

    def arrived(self, transfer: torch.Tensor) -> torch.Tensor:
        return transfer

    def wait(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_a_sum_holds_what_the_memory_account_says(replicas: int) -> None:
    leaf, size_bytes = torch.zeros(11, requires_grad=True), 12 * 4  # with the number behind it
    leaf.grad = torch.full_like(leaf, 2.0)
    exchange = Counting(replicas)
    bucket = Bucket(exchange, [leaf], None, 0)  # type: ignore[arg-type]
    cost = StageCost(1.0, 2.0, 0.0, size_bytes, 0, 0)
    expected = Stage(("n",), tuple(range(replicas)), cost).reduction_bytes
    bucket.start()
    assert size_bytes + exchange.held_bytes == expected
    bucket.settle()
    assert size_bytes + exchange.held_bytes == expected
    bucket.finish()
    assert exchange.held_bytes == 0
    free = Link(0.0, 1.0)
    cluster = replace(assumed_cluster("one", [replicas], replicas, None), within_node=free)
    priced = reduction_s(cluster, [0] * replicas, range(replicas), size_bytes)
    assert exchange.sent_bytes == priced  # a byte takes a second
    assert leaf.grad.tolist() == [1.0 + replicas] * (12 // replicas) + [1.0] * (11 - 12 // replicas)


class Awaited:
    """The messages of one replica of two, whose other answers with what it got when it may."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.answers = False
        self.tests = 0

    def Isend(self, buffer: Any, *_: int) -> Any:  # noqa: N802
        return Awaiting(self, buffer[0].nbytes)

    Irecv = Isend


class Awaiting:
    """A message under way."""

    def __init__(self, messages: Awaited, size_bytes: int) -> None:
        self._messages, self._size_bytes = messages, size_bytes

    def Test(self, status: MPI.Status | None = None) -> bool:  # noqa: N802
        self._messages.tests += 1
        if status is not None:
            status.Set_elements(MPI.BYTE, self._size_bytes)
        return self._messages.answers


@pytest.mark.parametrize("buckets", [10, 400])
def test_the_work_on_sums_under_way_grows_with_their_number_and_no_faster(buckets: int) -> None:
    """Counted in calls of MPI, of which each asks about one message."""
    messages, progress = Awaited(), Progress()
    leaves = {str(i): torch.zeros(2, requires_grad=True) for i in range(buckets)}
    for leaf in leaves.values():
        leaf.grad = torch.ones_like(leaf)
    wire = Wire(messages, CpuDevice(), progress)  # type: ignore[arg-type]
    reduction = StageReduction(wire, leaves, bucket_bytes=1)
    reduction.start()
    for _ in range(3):  # as between actions
        progress.advance()
        reduction.advance()
    # Each sends half of a bucket, which is asked about at once, and receives the other.
    assert messages.tests == (1 + 3 * 2) * buckets
    messages.answers = True
    reduction.finish()
    assert messages.tests <= 8 * 2 * buckets
