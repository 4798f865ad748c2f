"""Copies beside kernels on an accelerator, and times of its work; on a real one or the pretended.

A kernel that sleeps stands for one that computes for long.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pipectl.runtime.device import AcceleratorDevice
from pipectl.runtime.offload import Mover
from pipectl.runtime.staging import Staging
from pipectl.runtime.tracing import Recording
from pipectl.runtime.work_clock import Interval, WorkClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here"),
]
LONG_S = 3.0


@pytest.fixture
def device() -> AcceleratorDevice:
    return AcceleratorDevice(0)


def sleeping(device: AcceleratorDevice) -> torch.Event:
    """Queue a kernel that takes long; returns the event after it."""
    sleep(LONG_S)
    event = torch.Event(device.torch_device)
    event.record()
    return event


def sleep(seconds: float) -> None:
    """Queue a kernel that sleeps, at least as long."""
    if hasattr(torch.ops.pretended, "sleep"):
        torch.ops.pretended.sleep(int(seconds * 1e9))
    else:
        torch.cuda._sleep(int(seconds * 2.5e9))  # cycles; no GPU has more in a second


def copies_of_unpinned_memory() -> int:
    """How many copies were slow so far; 0 on a real accelerator, which does not tell."""
    counts = getattr(torch.ops.pretended, "counts", lambda: [0, 0])
    return int(counts()[1])


def values(device: AcceleratorDevice, count: int = 1000) -> Tensor:
    tensor = torch.arange(count, device=device.torch_device).to(torch.float32)
    device.synchronize()
    return tensor


@pytest.fixture
def used(device: AcceleratorDevice) -> None:
    """All was allocated once: where a driver allocates memory, it may wait for kernels."""
    for size in (1000, 4000):
        staging, vector = device.messages, values(device, size)
        leaves, arrives = staging.outgoing(vector, 1024), staging.buffer(size, vector.dtype)
        arrives.landing.finish()
        device.bring(torch.arange(size, dtype=vector.dtype))
        leaves.free[-1].synchronize()
    mover = Mover(None, device.torch_device)
    for _ in range(2):
        mover.fetch(mover.leave([vector.view(torch.uint8)]).result(), [4 * size]).result()
    mover.close()
    device.synchronize()


@pytest.mark.usefixtures("used")
def test_messages_pass_kernels_that_they_do_not_need(device: AcceleratorDevice) -> None:
    staging, sent = device.messages, 2 * values(device)  # which is still computed
    assert isinstance(staging, Staging)
    leaves = staging.outgoing(sent, 1024)
    busy = sleeping(device)
    leaves.free[-1].synchronize()
    arrives = staging.buffer(sent.numel(), sent.dtype)
    arrives.buffer[:500] = torch.arange(500)
    assert arrives.landing is not None
    arrives.landing.take(arrives.buffer.nbytes // 2)
    device._arriving.synchronize()
    assert not busy.query()
    assert torch.equal(leaves.buffer, 2 * torch.arange(1000.0))
    assert torch.equal(arrives.landing._target[:500].cpu(), torch.arange(500.0))  # not the rest yet


@pytest.mark.usefixtures("used")
def test_kernels_pass_messages_that_leave(device: AcceleratorDevice) -> None:
    sent, kernel = values(device), torch.Event(device.torch_device)
    with device._leaving.entered():
        sleep(LONG_S)  # as other messages that leave
    leaves = device.messages.outgoing(sent, 1024)
    sent.add(1)
    kernel.record()
    kernel.synchronize()
    assert not leaves.free[-1].query()
    leaves.free[-1].synchronize()


def test_kernels_wait_for_what_arrives(device: AcceleratorDevice) -> None:
    staging = device.messages
    assert isinstance(staging, Staging)
    message = staging.buffer((10, 100), torch.float32)
    message.buffer.copy_(torch.arange(1000).view(10, 100))
    assert message.landing is not None
    doubled = 2 * message.landing.finish()
    del message  # while the kernel may still read it
    assert torch.equal(doubled.cpu(), 2.0 * torch.arange(1000).view(10, 100))


@pytest.mark.parametrize("sizes", [(), (7,), (3, 0), (4, 5)])
def test_batches_arrive_whatever_their_shape(
    device: AcceleratorDevice, sizes: tuple[int, ...]
) -> None:
    batch = torch.rand(sizes).t() if len(sizes) == 2 else torch.rand(sizes)
    before = copies_of_unpinned_memory()
    there = device.bring(batch)
    assert there.device == device.torch_device
    assert copies_of_unpinned_memory() == before
    assert torch.equal(there.cpu(), batch)


@pytest.mark.usefixtures("used")
def test_batches_pass_kernels(device: AcceleratorDevice) -> None:
    batch = torch.arange(1000.0)
    busy = sleeping(device)
    device.bring(batch)
    device._arriving.synchronize()
    assert not busy.query()


def test_what_is_offloaded_comes_back_while_other_values_leave(device: AcceleratorDevice) -> None:
    mover = Mover(None, device.torch_device)
    sizes = [40_000_001, 3, 17]  # of which one fills several chunks
    vectors = [torch.full((size,), size % 251, dtype=torch.uint8, device="cpu") for size in sizes]
    there = [vector.to(device.torch_device) + 0 for vector in vectors]
    before = copies_of_unpinned_memory()
    for last in (False, True):  # all is allocated once: a driver may wait for kernels then
        place = mover.leave(there).result()
        if last:
            sleeping(device)
        leaving = mover.leave(there[1:])
        back = mover.fetch(place, sizes).result()
        if not last:
            leaving.result()
            del back
            device.synchronize()
    assert not leaving.done()
    assert copies_of_unpinned_memory() == before
    for vector, found in zip(vectors, back, strict=True):
        assert torch.equal(found.cpu(), vector)
    leaving.result()
    mover.close()


def test_threads_work_on_the_accelerator_of_their_rank() -> None:
    """Elsewhere, a rank would hold memory of the first one, too."""
    index = torch.accelerator.device_count() - 1
    device = torch.device(torch.accelerator.current_accelerator().type, index)
    mover = Mover(None, device)
    for direction in (mover._out, mover._in):
        assert direction.begin(torch.accelerator.current_device_index).result() == index
    mover.close()


def test_host_memory_is_that_of_the_host_whatever_the_default_is(device: AcceleratorDevice) -> None:
    vector, mover = values(device).view(torch.uint8), Mover(None, device.torch_device)
    with torch.device(device.torch_device):
        (back,) = mover.fetch(mover.leave([vector]).result(), [vector.numel()]).result()
        leaves, arrives = (
            device.messages.outgoing(vector, 1024),
            device.messages.buffer(4, vector.dtype),
        )
    leaves.free[-1].synchronize()
    assert leaves.buffer.is_pinned()
    assert arrives.buffer.is_pinned()
    assert torch.equal(back, vector)
    mover.close()


def test_places_of_offloaded_values_are_used_again(device: AcceleratorDevice) -> None:
    mover, vector = Mover(None, device.torch_device), values(device).view(torch.uint8)
    addresses = set()
    for _ in range(3):
        place = mover.leave([vector + 0]).result()
        assert isinstance(place, list)
        addresses.add(place[0].data_ptr())
        (back,) = mover.fetch(place, [vector.numel()]).result()
        assert torch.equal(back, vector)
    mover.close()
    assert len(addresses) == 1


def test_work_takes_the_time_of_the_accelerator(device: AcceleratorDevice) -> None:
    clock = WorkClock(device.torch_device)
    clock.compare()
    for row, seconds in ((3, 0.02), (5, 0.01)):
        clock.begin(row)
        sleep(seconds)
        clock.end()
    (third, first_s, second_s), (fifth, next_s, last_s) = clock.read(wait=True)
    assert (third, fifth) == (3, 5)
    assert second_s - first_s >= 0.015
    assert next_s >= second_s - 1e-4
    assert last_s - next_s >= 0.007
    assert clock.read() == []


def test_rows_happen_when_the_accelerator_did_them() -> None:
    """A forward, a wait that the forward hides, a wait beyond it, a backward."""
    recording = Recording()
    recording.expect(np.zeros((4, 7), dtype=np.int64))
    for start_s, end_s in ((1.0, 1.1), (1.1, 1.5), (1.5, 4.0), (4.0, 4.1)):
        recording.add(start_s, end_s)
    recording.correct([Interval(0, 1.0, 3.0), Interval(3, 4.5, 6.0)])
    times = recording.table()[:, :2].tolist()
    assert times == [[1.0, 3.0], [3.0, 3.0], [3.0, 4.0], [4.5, 6.0]]
