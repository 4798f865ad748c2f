"""What autograd saves leaves and comes back as the same bits, each storage once."""

import gc
from pathlib import Path

import pytest
import torch

from pipectl.runtime.offload import DiskStore, Mover
from pipectl.runtime.saved_tensors import SavedTensors, unpack
from pipectl.schedule import Kind

CPU = torch.device("cpu")
OUT = (Kind.OFFLOAD_START, Kind.OFFLOAD_WAIT)
BACK = (Kind.FETCH_START, Kind.FETCH_WAIT)


def pool_of(*staying: torch.Tensor, min_bytes: int = 0) -> SavedTensors:
    pool = SavedTensors(staying, CPU)
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


def test_memory_at_an_address_used_before_is_another_block():
    """The allocator hands a freed block out again; its address tells nothing."""
    pool, addresses, kept = pool_of(), set(), []
    for value in range(50):
        tensor = torch.full((1000,), float(value))
        addresses.add(tensor.data_ptr())
        handle = pool.pack(tensor)
        if value % 2:
            kept.append((value, handle))
        del tensor, handle
    gc.collect()
    assert len(addresses) < 50  # else nothing was used again
    assert len(pool.blocks) == len(kept)
    assert all(float(unpack(handle)[0]) == value for value, handle in kept)


def test_parameters_small_and_strange_tensors_stay():
    weight, small = torch.zeros(100), torch.zeros(9)
    strange = [torch.eye(9).to_sparse(), torch.zeros(100, dtype=torch.complex64).conj()]
    pool = pool_of(weight, min_bytes=100)
    for tensor in (weight, weight[3:50], weight.detach(), small, *strange):
        assert pool.pack(tensor) is tensor
    assert pool.blocks == []
    assert pool.pack(torch.zeros(25)) is not None
    assert not isinstance(pool.pack(torch.zeros(25)), torch.Tensor)


@pytest.fixture(params=["host", "disk"])
def mover(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SavedTensors, "min_bytes", 0)
    mover = Mover(None if request.param == "host" else DiskStore(tmp_path, 0), CPU)
    yield mover
    mover.close()


def forward(mover: Mover, micro_batch: int, weight: torch.Tensor):
    torch.manual_seed(micro_batch)
    x = torch.randn(64, 8 + micro_batch)
    saved = SavedTensors([weight], CPU, mover)
    with saved.hooks():
        y = (x @ weight[: x.shape[1]]).relu_()
        return saved, torch.nn.functional.dropout(y.exp() * y.t().contiguous().t(), 0.5).sum()


def test_gradients_are_the_same_bits_whatever_leaves_in_which_order(mover):
    weight = torch.randn(16, 64, requires_grad=True)
    for _, loss in [forward(mover, index, weight) for index in range(4)]:
        loss.backward()
    expected, weight.grad = weight.grad, None
    micro_batches = [forward(mover, index, weight) for index in range(4)]
    for kind, micro_batch in [
        (OUT[0], 0), (OUT[0], 1), (OUT[1], 0), (OUT[0], 2), (OUT[1], 1), (OUT[1], 2),
        (BACK[0], 0), (BACK[0], 1), (BACK[1], 0), (BACK[1], 1), (BACK[0], 2), (BACK[1], 2),
    ]:  # fmt: skip
        micro_batches[micro_batch][0].move(kind)
    for _, loss in micro_batches:
        loss.backward()
    assert torch.equal(weight.grad, expected)


def test_what_is_away_takes_no_memory_and_what_is_unneeded_is_not_moved(mover):
    weight = torch.randn(16, 64, requires_grad=True)
    saved, loss = forward(mover, 0, weight)
    blocks = saved.blocks
    assert blocks
    for kind in OUT:
        saved.move(kind)
    assert all(block.memory is None for block in blocks)
    for kind in BACK:
        saved.move(kind)
    loss.backward()
    del loss
    gone = SavedTensors([], CPU, mover)
    gone.pack(torch.zeros(100))
    assert gone.blocks == []
