"""What autograd saves leaves and comes back as the same bits; disks that lack space are named."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI
from torch import nn

from pipectl.cluster import OffloadTarget
from pipectl.errors import WorkerError
from pipectl.jobs.job import TIGHT_HEAP
from pipectl.plan import Plan
from pipectl.runs import RunDirectory, read_errors, read_metrics
from pipectl.runtime.offload import PAGE, DiskStore, Mover, Pages, check_space, offload_directory
from pipectl.runtime.saved_tensors import SavedTensors, run_backward, unpack

CPU = torch.device("cpu")


def pool_of(*staying: torch.Tensor, min_bytes: int = 0) -> SavedTensors:
    pool = SavedTensors(staying, CPU, Mover(None, CPU))
    pool.min_bytes = min_bytes
    return pool


def test_views_of_one_storage_share_a_block_and_keep_their_form():
    whole = torch.arange(24.0).reshape(4, 6)
    views = [whole, whole.t(), whole[1:3, ::2], whole.expand(2, 4, 6), whole.view(torch.int32)]
    pool = pool_of()
    handles = [pool.pack(view) for view in views]
    assert len(pool.blocks) == 1
    for view, handle in zip(views, handles, strict=True):
        found = unpack(handle)
        assert (found.shape, found.stride(), found.dtype) == (view.shape, view.stride(), view.dtype)
        assert torch.equal(found, view)


def test_parameters_small_and_strange_tensors_stay():
    weight, small = torch.zeros(100), torch.zeros(9)
    strange = [torch.eye(9).to_sparse(), torch.zeros(100, dtype=torch.complex64).conj()]
    pool = pool_of(weight, min_bytes=100)
    for tensor in (weight, weight[3:50], weight.detach(), small, *strange):
        assert pool.pack(tensor) is tensor
    assert pool.blocks == []
    assert pool.pack(torch.zeros(25)) is not None
    assert not isinstance(pool.pack(torch.zeros(25)), torch.Tensor)


def test_what_is_unneeded_is_not_moved():
    pool = pool_of()
    pool.pack(torch.zeros(100))
    assert pool.blocks == []


STRESS = Path(__file__).with_name("micro_batches_that_leave.py")


def test_pages_are_used_again_once_nothing_lies_in_them():
    pages = Pages()
    first = pages.take(3 * PAGE - 5)
    view, address = first[10:20], first.data_ptr()
    assert address % PAGE == 0
    del first
    assert pages.take(3 * PAGE).data_ptr() != address  # the view still lies there
    del view
    assert pages.take(2 * PAGE).data_ptr() != address
    others = [mmap.mmap(-1, 3 * PAGE) for _ in range(9)]  # what the system would hand out instead
    assert pages.take(3 * PAGE - 100).data_ptr() == address
    assert len(others) == 9


@pytest.mark.parametrize("direct", [True, False])
def test_vectors_come_back_from_the_file_whatever_memory_they_lie_in(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    store, pages = DiskStore(tmp_path, 0), Pages()
    assert direct or not store.is_direct
    source = torch.randint(256, (40_000,), dtype=torch.uint8)
    pieces = [pages.copy_of(source), source, source[7:9000], pages.take(1).fill_(9)]
    place, other = store.write(pieces), store.write(pieces[2:])
    into = [torch.zeros_like(piece) for piece in reversed(pieces)][::-1]
    into[1] = pages.take(len(source))
    store.read(place, into)
    assert all(map(torch.equal, into, pieces))
    into = [pages.take(len(piece)) for piece in pieces[2:]]
    store.read(other, into)
    assert all(map(torch.equal, into, pieces[2:]))
    store.close()


@pytest.mark.skipif(sys.platform != "linux", reason="counts resident pages as Linux tells them")
def test_a_rank_does_not_grow_while_micro_batches_leave():
    done = subprocess.run(
        [sys.executable, str(STRESS)],
        env={**os.environ, **TIGHT_HEAP},
        capture_output=True,
        text=True,
        check=True,
    )
    saved, grown = map(int, done.stdout.split())
    assert saved > 8 << 20
    assert grown < saved / 2


KIB = 1024


def vector(size: int, value: int = 1) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_the_file_has_no_name_and_its_parts_are_used_again(tmp_path: Path):
    store = DiskStore(tmp_path, 0)
    places = [store.write([vector(4 * KIB, value), vector(10, value)]) for value in range(3)]
    assert list(tmp_path.iterdir()) == []
    for round_ in range(5):
        for value, place in enumerate(places):
            into = [vector(4 * KIB, 255), vector(10, 255)]
            store.read(place, into)
            assert [int(piece.min()) for piece in into] == [value + round_] * 2
            assert [int(piece.max()) for piece in into] == [value + round_] * 2
            following = value + round_ + 1
            places[value] = store.write([vector(4 * KIB, following), vector(10, following)])
    assert os.fstat(store.descriptor).st_size == 3 * 8 * KIB
    smaller = store.write([vector(1)])
    store.read(smaller, [vector(1)])
    store.close()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = DiskStore(tmp_path, 3)
    store.write([vector(4 * KIB)])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WorkerError) as caught:
        store.write([vector(8 * KIB)])
    assert caught.value.message == (
        f"rank 3: no space for offload in {tmp_path}: 8.00 KiB more are needed in addition to "
        "4.00 KiB, and the disk is full"
    )
    store.close()


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(WorkerError, match=r"rank 1: offload in .*missing fails: No such file"):
        DiskStore(tmp_path / "missing", 1)


def test_the_directory_is_tmpdir_even_if_it_cannot_be_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", "/missing/tmp")
    assert offload_directory() == Path("/missing/tmp")


class World:
    """Ranks that have all said what they found."""

    def __init__(self, rank: int, others: list) -> None:
        self.rank, self._others = rank, others

    def Ibarrier(self) -> MPI.Request:  # noqa: N802
        return MPI.REQUEST_NULL

    def allgather(self, mine: tuple) -> list:
        need, free, (_, disk), where = mine
        return [(need, free, (node, disk), where) for node in self._others]


@pytest.fixture
def plan_to_disk(pipeline):
    plan = pipeline(2, 8, schedule="gpipe", node_of_rank=[0, 0])
    stages = tuple(
        replace(stage, offload=True, cost=replace(stage.cost, saved_bytes=MIB))
        for stage in plan.stages
    )
    return replace(plan, stages=stages, offload_to=OffloadTarget.DISK)


MIB = 1 << 20


@pytest.mark.parametrize(("nodes", "fits"), [(["a", "a"], False), (["a", "b"], True)])
def test_ranks_of_a_node_share_its_disk(plan_to_disk, nodes, fits, tmp_path, monkeypatch):
    free = SimpleNamespace(free=10 * MIB)  # enough for one of them
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    world = World(0, nodes)
    if fits:
        check_space(world, plan_to_disk, "a", tmp_path)
        return
    with pytest.raises(WorkerError) as caught:
        check_space(world, plan_to_disk, "a", tmp_path)
    start = f"rank 0: no space for offload in {tmp_path} on a: need 16.0 MiB"
    assert caught.value.message.startswith(start)
    assert caught.value.message.endswith("for all its ranks there, have 10.0 MiB")
    assert "TMPDIR" in caught.value.cure


def test_other_plans_need_no_space(plan_to_disk, tmp_path):
    to_host = replace(plan_to_disk, offload_to=OffloadTarget.HOST)
    check_space(World(0, ["a", "a"]), to_host, "a", tmp_path / "missing")
    with pytest.raises(WorkerError, match="no directory that can be written"):
        check_space(World(0, ["a", "a"]), plan_to_disk, "a", tmp_path / "missing")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parameters_behind_views_of_one_value_add_up_by_themselves(count):
    places = [nn.Parameter(torch.zeros(3)) for _ in range(count)]
    weight = torch.tensor([[1.0, 2.0, 3.0]])
    for _ in range(2):
        value = torch.ones(1, 3)
        for place in places:
            value = value + place.unsqueeze(0)
        run_backward([(value * weight).sum()], [torch.ones(())], places)
    assert [place.grad.tolist() for place in places] == [[2.0, 4.0, 6.0]] * count


PARTS = Path(__file__).parents[1] / "job_parts.py"
FILLED = "TEST_FILLED_DIRECTORY"


@pytest.fixture
def offloading(make_run, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], RunDirectory]:
    """``offloading(directory)``: two ranks that write what they keep to a directory."""

    def make(directory: Path) -> RunDirectory:
        pipeline = {"micro_batches": 4, "stages": 2}
        sections = {
            "model": {"factory": f"{PARTS}:Wide"},
            "loss": {"factory": "torch.nn:MSELoss"},
            "data": {"factory": f"{PARTS}:Vectors"},
        }
        run = make_run(2, pipeline=pipeline, **sections)
        monkeypatch.setenv("TMPDIR", str(directory))
        plan = Plan.load(run.plan)
        stages = tuple(replace(stage, offload=True) for stage in plan.stages)
        changed = replace(plan, stages=stages, schedule="gpipe", warm_up=(4, 4))
        replace(changed, offload_to=OffloadTarget.DISK).save(run.plan)
        return run

    return make


@pytest.mark.mpi
def test_it_trains_and_leaves_no_file(offloading, work, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = work(2, offloading(disk))
    assert done.returncode == 0, done.stderr
    assert list(disk.iterdir()) == []


@pytest.mark.mpi
def test_a_missing_directory_ends_the_job_by_name(offloading, work, tmp_path: Path) -> None:
    run = offloading(tmp_path / "missing")
    done = work(2, run)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    report = read_errors(run)[0]
    assert f"no space for offload in {tmp_path}/missing on" in report.message
    assert "TMPDIR" in report.cure


@pytest.mark.mpi
def test_a_disk_that_is_too_small_is_refused_before_anything_starts(offloading, work, disk) -> None:
    directory = disk("1m")
    run = offloading(directory)
    done = work(2, run)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    reports = read_errors(run)
    assert reports
    for report in reports:
        assert f"no space for offload in {directory} on " in report.message
        assert report.message.endswith("for all its ranks there, have 1.00 MiB")
        assert "need " in report.message
        assert "TMPDIR" in report.cure
    assert not run.heartbeat.exists()


@pytest.mark.mpi
def test_a_disk_that_fills_meanwhile_ends_all_ranks(
    offloading, work, disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = disk("8m")
    run = offloading(directory)
    monkeypatch.setenv(FILLED, str(directory))
    done = work(2, run)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    first = read_errors(run)[0]
    rank = first.rank
    assert first.message.startswith(f"rank {rank}: no space for offload in {directory}: ")
    assert first.message.endswith("and the disk is full")
    assert first.stage == rank
    assert first.action.startswith("OFFLOAD_WAIT micro-batch ")
    assert "TMPDIR" in first.cure
    assert read_metrics(run) == []
