"""Files that leave nothing behind, and disks that are too small."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI

from pipectl.cluster import OffloadTarget
from pipectl.errors import WorkerError
from pipectl.runtime.offload import DiskStore, check_space, offload_directory

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
def offloading(pipeline):
    plan = pipeline(2, 8, schedule="gpipe", node_of_rank=[0, 0])
    stages = tuple(
        replace(stage, offload=True, cost=replace(stage.cost, saved_bytes=MIB))
        for stage in plan.stages
    )
    return replace(plan, stages=stages, offload_to=OffloadTarget.DISK)


MIB = 1 << 20


@pytest.mark.parametrize(("nodes", "fits"), [(["a", "a"], False), (["a", "b"], True)])
def test_ranks_of_a_node_share_its_disk(offloading, nodes, fits, tmp_path, monkeypatch):
    free = SimpleNamespace(free=10 * MIB)  # enough for one of them
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    world = World(0, nodes)
    if fits:
        check_space(world, offloading, "a", tmp_path)
        return
    with pytest.raises(WorkerError) as caught:
        check_space(world, offloading, "a", tmp_path)
    start = f"rank 0: no space for offload in {tmp_path} on a: need 16.0 MiB"
    assert caught.value.message.startswith(start)
    assert caught.value.message.endswith("for all its ranks there, have 10.0 MiB")
    assert "TMPDIR" in caught.value.cure


def test_other_plans_need_no_space(offloading, tmp_path):
    to_host = replace(offloading, offload_to=OffloadTarget.HOST)
    check_space(World(0, ["a", "a"]), to_host, "a", tmp_path / "missing")
    with pytest.raises(WorkerError, match="no directory that can be written"):
        check_space(World(0, ["a", "a"]), offloading, "a", tmp_path / "missing")
