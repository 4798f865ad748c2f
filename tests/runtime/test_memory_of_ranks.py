"""What a rank cannot hold: saved values leave and come back as the same bits, disks that lack space
are named, and a model is spread over ranks."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.func import grad, hessian, jacrev
from torch.multiprocessing.reductions import StorageWeakRef

from pipectl.batch.script import TIGHT_HEAP
from pipectl.cluster import OffloadTarget, assumed_cluster
from pipectl.errors import WorkerError
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import read_errors, read_heartbeat, read_metrics
from pipectl.runtime import checkpoint
from pipectl.runtime.offload import DiskStore, Mover, check_space
from pipectl.runtime.pages import LARGE_BYTES, PAGE, MessagePages, Pages
from pipectl.runtime.saved_tensors import SavedTensors, run_backward, unpack
from pipectl.simulate import simulate

CPU, MIB = torch.device("cpu"), 1 << 20
PARTS = Path(__file__).with_name("job_parts.py")


def test_a_storage_leaves_once_and_parameters_small_and_strange_tensors_stay():
    whole, weight = torch.arange(24.0).reshape(4, 6), torch.zeros(100)
    views = [whole, whole.t(), whole[1:3, ::2], whole.expand(2, 4, 6), whole.view(torch.int32)]
    strange = [torch.eye(9).to_sparse(), torch.zeros(100, dtype=torch.complex64).conj()]
    cast = torch.zeros(100, dtype=torch.bfloat16)
    shared = {StorageWeakRef(cast.untyped_storage())}
    pool = SavedTensors([weight], CPU, Mover(None, CPU), shared)
    pool.min_bytes = whole.nbytes
    staying = weight, weight[3:50], weight.detach(), cast.t(), torch.zeros(23)
    for tensor in (*staying, *strange):
        assert pool.pack(tensor) is tensor
    assert pool.blocks == []
    handles = [pool.pack(view) for view in views]
    assert len(pool.blocks) == 1
    for view, found in zip(views, map(unpack, handles), strict=True):
        assert (found.shape, found.stride(), found.dtype) == (view.shape, view.stride(), view.dtype)
        assert torch.equal(found, view)
    handles.clear()
    assert pool.blocks == []  # what nobody needs is not moved


@pytest.mark.parametrize("transform", [grad, jacrev, hessian])
def test_torch_func_differentiates_where_saved_tensors_leave(transform):
    """Torch refuses it within hooks, so what it saves stays; all else leaves."""
    layer, x = nn.Linear(50, 1), torch.randn(50)

    def gradients(hooks: AbstractContextManager[object]) -> tuple[torch.Tensor, ...]:
        with hooks:
            loss = transform(lambda x: layer(x).tanh().sum())(x).sum() + layer(x).exp().sum()
            packed.append(len(pool.blocks))
        return torch.autograd.grad(loss, list(layer.parameters()))

    pool, packed = SavedTensors([], CPU, Mover(None, CPU)), []
    pool.min_bytes = 1
    assert all(map(torch.equal, gradients(pool.hooks()), gradients(nullcontext())))
    assert packed[0] >= 2  # the input and the result of exp
    with pytest.raises(RuntimeError, match="support saved tensor hooks"):
        gradients(save_on_cpu())  # of others


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


def test_messages_of_about_one_size_share_pages():
    pages = MessagePages()

    def address(count: int) -> int:
        return pages.take((count, LARGE_BYTES // 4), torch.float32).data_ptr()

    def free() -> list[int]:
        return [len(memory) // LARGE_BYTES for memory in pages._free]

    assert address(4) == address(3) == address(2)
    assert free() == [4]
    held = pages.take((3, LARGE_BYTES // 4), torch.float32)
    assert address(4) != held.data_ptr()
    assert free() == [4]
    del held
    address(6)  # instead of one of those for four
    assert free() == [4, 6]
    address(1)
    assert free() == [4, 6, 1]
    assert pages.take(10, torch.int8).untyped_storage().nbytes() == 10


def test_what_another_user_puts_in_place_of_the_file_of_offload_is_not_written(
    tmp_path, monkeypatch
):
    """Whoever may write to the directory may exchange the name."""
    victim, make = tmp_path / "mine", tempfile.mkstemp
    victim.write_bytes(b"mine" * PAGE)

    def exchanged(**options):
        handle, name = make(**options)
        Path(name).unlink()
        Path(name).symlink_to(victim)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", exchanged)
    store = DiskStore(tmp_path, 0)
    source = torch.arange(PAGE, dtype=torch.uint8)
    into = torch.zeros_like(source)
    store.read(store.write([source]), [into])
    store.close()
    assert torch.equal(into, source)
    assert victim.read_bytes() == b"mine" * PAGE


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_without_a_name_gives_vectors_back_and_uses_its_parts_again(
    direct, tmp_path, monkeypatch
):
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    store, pages = DiskStore(tmp_path, 0), Pages()
    assert list(tmp_path.iterdir()) == []
    assert direct or not store.is_direct
    for order in (1, -1, 1):
        source = torch.randint(256, (10 * PAGE - 960,), dtype=torch.uint8)
        pieces = [pages.copy_of(source), source, source[7:9000], pages.take(1).fill_(9)]
        groups = [pieces, pieces[2:]][::order]
        for place, group in [(store.write(group), group) for group in groups]:
            into = [torch.zeros_like(group[0]), *(pages.take(len(piece)) for piece in group[1:])]
            store.read(place, into)
            assert all(map(torch.equal, into, group))
    assert os.fstat(store.descriptor).st_size == (10 + 10 + 3 + 1 + 3 + 1) * PAGE
    store.close()
    with pytest.raises(WorkerError, match=r"rank 1: offload in .*missing fails: No such file"):
        DiskStore(tmp_path / "missing", 1)


@pytest.mark.parametrize(("nodes", "free_mib"), [("ab", 8), ("aa", 16)])
def test_ranks_of_a_node_share_its_disk(pipeline, nodes, free_mib, tmp_path, monkeypatch):
    plan = pipeline(2, 8, schedule="gpipe", node_of_rank=[0, 0])
    first, last = (
        replace(stage, offload=True, cost=replace(stage.cost, saved_bytes=MIB))
        for stage in plan.stages
    )
    plan = replace(plan, stages=(first, last), offload_to=OffloadTarget.DISK)

    def gather(_: MPI.Comm, mine: tuple) -> list:
        need, free, (_, disk), where = mine
        return [(need, free, (node, disk), where) for node in nodes]

    def check(free_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))
        check_space(MPI.COMM_SELF, plan, "a", tmp_path)

    monkeypatch.setattr("pipectl.runtime.offload.gather_all", gather)
    check(free_mib * MIB)
    with pytest.raises(WorkerError, match=f"need {free_mib}.0* MiB for all its ranks there, have"):
        check(free_mib * MIB - 1)
    plan = replace(plan, offload_to=OffloadTarget.HOST)
    check(0)


def test_parameters_behind_views_of_one_value_add_up_by_themselves():
    places = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    for _ in range(2):
        value = torch.ones(1, 3)
        for place in places:
            value = value + place.unsqueeze(0)
        weighted = value * torch.tensor([[1.0, 2.0, 3.0]])
        run_backward([weighted.sum()], [torch.ones(())], places)
    assert [place.grad.tolist() for place in places] == [[2.0, 4.0, 6.0]] * 3


MISSING = "on .*: it is no directory that can be written"
TOO_SMALL = "on .*: need .* for all its ranks there, have 1.00 MiB"
FULL = "[.0-9]+ [KM]iB more are needed in addition to 0 B, and the disk is full"


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("size", "words"), [(None, MISSING), ("1m", TOO_SMALL), ("8m", FULL)], ids=str
)
def test_a_disk_that_is_too_small_or_fills_ends_all_ranks_and_is_named(
    make_run, work, request, monkeypatch, tmp_path, size, words
):
    """Before anything starts if it can be known then."""
    directory = request.getfixturevalue("disk")(size) if size else tmp_path / "missing"
    run = make_run(
        2,
        {"factory": f"{PARTS}:Filling"},
        model={"factory": f"{PARTS}:Wide"},
        pipeline={"micro_batches": 4, "stages": 2},
    )
    plan = Plan.load(run.plan)
    stages = tuple(replace(stage, offload=True) for stage in plan.stages)
    plan = replace(plan, stages=stages, schedule="gpipe", warm_up=(4, 4))
    replace(plan, offload_to=OffloadTarget.DISK).save(run.plan)
    monkeypatch.setenv("TMPDIR", str(directory))
    if words == FULL:
        monkeypatch.setenv("TEST_FILLED_DIRECTORY", str(directory))
    done = work(2, run)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    first = read_errors(run.start)[0]
    where = f"no space for offload in {directory}"
    assert re.fullmatch(rf"rank \d: {where}:? {words}", first.message)
    assert "TMPDIR" in first.hint
    assert read_metrics(run) == []
    if words == FULL:
        assert first.message.startswith(f"rank {first.rank}: ")
        assert first.stage == first.rank
        assert first.action.startswith("OFFLOAD_WAIT micro-batch ")
    else:
        assert not run.start.heartbeat.exists()


@pytest.mark.mpi
def test_a_model_three_times_larger_than_a_rank_trains(make_spec, make_run, work, profile_of):
    """20 layers of two million parameters. With copies of all they save, ranks would exceed the
    limit, too."""
    sections = {
        "model": {
            "factory": f"{PARTS}:Model",
            "kwargs": {"depth": 20, "width": 1448},
            "materialize": "per_rank",
        },
        "data": {"kwargs": {"width": 1448}},
        "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 1e-4}},
        "training": {"steps": 2, "batch_size": 4},
        "checkpoint": {"every": 1, "keep": 1},
    }
    profile = profile_of(make_spec(4, **sections))
    baseline = profile.process_baseline_bytes
    assert baseline is not None
    parameters = {pair for operator in profile.operators for pair in operator.parameters}
    state_bytes = 4 * sum(size for _, size in parameters)  # with gradients and averages of Adam
    assert state_bytes > 0.6 * 2**30
    limit = baseline + state_bytes // 3
    pipeline = {"micro_batches": 2, "stages": 4, "memory_limit": limit}
    run = make_run(4, **sections, pipeline=pipeline)
    done = work(4, run, fresh=True)  # a fork has the memory of what it is forked from
    assert done.returncode == 0, done.stderr
    peaks = [rank.peak_bytes for rank in read_heartbeat(run.start).ranks]
    assert len(peaks) == 4
    assert max(peaks) <= limit, [peak >> 20 for peak in peaks]
    weights = checkpoint.load(run.checkpoints / "step-000002")
    assert 4 * sum(tensor.nbytes for tensor in weights.values()) >= state_bytes
    assert [line.step for line in read_metrics(run)] == [1, 2]


MODELS = Path(__file__).parents[2] / "configs" / "models"


@pytest.mark.product
@pytest.mark.mpi
def test_a_head_takes_what_is_predicted_whatever_its_vocabulary(make_run, work, monkeypatch):
    """What a process takes besides is the same for all. With 32,768 words, logits take 16 MiB."""
    monkeypatch.setenv("GLIBC_TUNABLES", TIGHT_HEAP)
    besides = []
    for ranks, words, precision, schedule in (
        (1, 1024, "float32", "1f1b"),
        (2, 8192, "bf16", "zb-h1"),
        (1, 32768, "float32", "gpipe"),
    ):
        run = make_run(
            ranks,
            {"factory": f"{MODELS}/text.py:training", "kwargs": {"length": 64, "megabytes": 0.1}},
            model={"factory": f"{PARTS}:Head", "kwargs": {"words": words}},
            loss={"factory": f"{MODELS}/gpt.py:loss"},
            training={"steps": 2, "batch_size": 8, "precision": precision},
            pipeline={"micro_batches": 4, "stages": ranks, "schedule": schedule},
        )
        done = work(ranks, run, fresh=True)
        assert done.returncode == 0, done.stderr
        cluster, share = (
            assumed_cluster("c", [ranks], 1, None),
            Profile.load(run.profile).heap_share,
        )
        predicted = simulate(Plan.load(run.plan), cluster, heap_share=share).peak_memory_bytes
        peaks = [rank.peak_bytes for rank in read_heartbeat(run.start).ranks]
        besides += [peak - held for peak, held in zip(peaks, predicted, strict=True)]
        assert abs(besides[-1] - besides[0]) < max(16 * MIB, 0.05 * peaks[-1])
