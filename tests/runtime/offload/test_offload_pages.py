"""Saved values in pages of their own, and the file that these are written to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipectl.jobs.job import TIGHT_HEAP
from pipectl.runtime.offload import PAGE, DiskStore, Pages

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
    assert pages.take(3 * PAGE - 100).data_ptr() == address


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
