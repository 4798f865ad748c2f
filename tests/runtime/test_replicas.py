"""Replicas sum in one order, agree on buffers, and are noticed if they drift apart."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI

from pipectl.capture.digests import checksum
from pipectl.cluster import assumed_cluster
from pipectl.link import Link
from pipectl.plan import Stage, StageCost
from pipectl.runs import read_errors, read_metrics
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.reduction import Bucket, StageReduction
from pipectl.runtime.replicas import common_value
from pipectl.runtime.transport import Progress, Wire
from pipectl.simulate.network import reduction_s

PARTS = Path(__file__).with_name("job_parts.py")
PROGRAM = Path(__file__).with_name("ranks_that_sum.py")


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "mode"), [(2, "none"), (3, "thread")])
def test_replicas_sum_in_their_order_and_agree_on_buffers(launch, ranks: int, mode: str) -> None:
    done = launch(ranks, PROGRAM, mode)
    assert done.returncode == 0, done.stderr


class Counting:
    """What replicas exchange, with others that answer at once; counts what it holds."""

    rank = 0

    def __init__(self, replicas: int) -> None:
        self.size, self.others, self.sent_bytes = replicas, range(1, replicas), 0
        self.held: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def held_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in list(self.held))

    def send(self, vector: torch.Tensor, *_: int) -> torch.Tensor:
        self.sent_bytes += vector.nbytes
        return vector

    def receive(self, count: int, dtype: torch.dtype, *_: object) -> torch.Tensor:
        buffer = torch.ones(count, dtype=dtype)
        self.held.add(buffer)
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
    expected = Stage(("n",), tuple(range(replicas)), cost).reduction_bytes()
    bucket.start()
    assert size_bytes + exchange.held_bytes() == expected
    bucket.settle()
    assert size_bytes + exchange.held_bytes() == expected
    bucket.finish()
    assert not exchange.held
    free = Link(0.0, 1.0)
    cluster = replace(assumed_cluster("one", [replicas], replicas, None), within_node=free)
    priced = reduction_s(cluster, [0] * replicas, range(replicas), size_bytes)
    assert exchange.sent_bytes == priced  # a byte takes a second
    assert leaf.grad.tolist() == [1.0 + replicas] * (12 // replicas) + [1.0] * (11 - 12 // replicas)


class Awaited:
    """The messages of one of two replicas; none of them ends until ``answers`` is set."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.answers, self.tests = False, 0

    def Isend(self, buffer: Any, *_: int) -> Any:  # noqa: N802
        return SimpleNamespace(Test=partial(self.test, buffer[0].nbytes))

    Irecv = Isend

    def test(self, size_bytes: int, status: MPI.Status | None = None) -> bool:
        self.tests += 1
        if status is not None:
            status.Set_elements(MPI.BYTE, size_bytes)
        return self.answers


def test_the_work_on_sums_under_way_grows_with_their_number_and_no_faster() -> None:
    """Counted in calls of MPI, of which each asks about one message."""
    messages, progress, buckets = Awaited(), Progress(), 400
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


def test_no_sum_starts_in_a_thread_of_an_accelerator_from_which_mpi_allows_no_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED)
    leaf = torch.zeros(2, device="meta", requires_grad=True)
    started: list[Bucket] = []
    monkeypatch.setattr(Bucket, "start", lambda bucket: started.append(bucket))
    wire = Wire(Awaited(), CpuDevice(), Progress())  # type: ignore[arg-type]
    reduction = StageReduction(wire, {"leaf": leaf})
    reduction.arm()
    leaf.sum().backward()
    assert not started
    reduction.start()
    assert len(started) == 1


def test_a_micro_batch_that_replicas_split_counts_once() -> None:
    values, before = torch.tensor([[8], [8]]), torch.tensor([5])
    assert common_value(values, [[0, 1, 2]] * 2, before, split=True).tolist() == [8]
    assert common_value(values, [[0, 2, 4], [1, 3, 5]], before, split=False).tolist() == [11]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.arange(13).to(dtype)
    before, octets = checksum(tensor), tensor.view(torch.uint8)
    for index in range(octets.numel()):
        for bit in range(8) if dtype != torch.bool else [0]:
            octets[index] ^= 1 << bit
            assert checksum(tensor) != before
            octets[index] ^= 1 << bit
    assert checksum(tensor) == before


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("step", "saving", "stop"),
    [(99, {}, False), (3, {"checkpoint": {"every": 4}}, False), (1, {}, True)],
    ids=["every hundred steps", "before a checkpoint", "before a stop"],
)
def test_a_flipped_bit_ends_the_job_where_replicas_are_compared_next(
    make_run, work, step: int, saving: dict[str, Any], stop: bool
) -> None:
    """On the second of three replicas, a step before; no checkpoint has it."""
    optimizer = {"factory": f"{PARTS}:Faulty", "kwargs": {"lr": 0.1, "rank": 1, "step": step}}
    training = {"steps": step + 3, "batch_size": 6}
    pipeline = {"micro_batches": 3, "stages": 1, "replicas": 3}
    run = make_run(3, optimizer=optimizer, training=training, pipeline=pipeline, **saving)
    if stop:  # all ranks do, behind step 2
        run.start.stop_request.write_text("")
    done = work(3, run)
    assert done.returncode != 0
    (error,) = read_errors(run.start)
    assert error.rank == 1
    assert error.message.startswith(
        f"step {step + 1}: the replicas of stage 0 no longer hold the same weights: "
        "'layers.0.0.bias'; rank 1 differs from the others of ranks 0, 1, 2"
    )
    assert {line.step for line in read_metrics(run)} <= {*range(1, step + 2)}
    assert list(run.checkpoints.glob("step-*")) == []
