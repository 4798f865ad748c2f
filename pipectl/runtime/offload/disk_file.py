"""A file that vectors of bytes are written to past the system's cache, where the disk allows it.

Through the cache a core copies every byte, and a node's memory holds it for a while. Past it, the
disk reads and writes a vector's own memory, and no core has work. It takes whole pages only, in
memory as in the file.
"""

from __future__ import annotations

import errno
import os

from torch import Tensor

from pipectl.runtime.offload.pages import PAGE, new_pages, whole_pages


class DiskFile:
    """A file without a name, which goes with the process, however that ends.

    Args:
        opened: its descriptor.
        name: which is removed.

    Attributes:
        descriptor: of the open file.
        is_direct: whether it is written past the cache.

    Raises:
        OSError: the disk fails.
    """

    def __init__(self, opened: int, name: str) -> None:
        self.descriptor = opened
        self.is_direct = _is_direct(opened, name)
        os.unlink(name)  # noqa: PTH108

    def write(self, vector: Tensor, offset: int) -> int:
        """Write a vector at an offset of whole pages; returns that behind it.

        Raises:
            OSError: the disk is full, or fails.
        """
        rest = whole_pages(vector)
        if rest is None:
            rest = new_pages(vector.numel())
            rest[: vector.numel()] = vector.numpy().data
        while len(rest):  # one call moves 2 GiB at most
            done = os.pwrite(self.descriptor, rest, offset)
            rest, offset = rest[done:], offset + done
        return offset

    def read(self, vector: Tensor, offset: int) -> int:
        """Fill a vector from an offset of whole pages; returns that behind it.

        Raises:
            OSError: the disk fails.
        """
        own = whole_pages(vector)
        pages = new_pages(vector.numel()) if own is None else own
        rest = pages
        while len(rest):
            done = os.preadv(self.descriptor, [rest], offset)
            if not done:
                raise OSError(errno.EIO, "the file is shorter than what was written")
            rest, offset = rest[done:], offset + done
        if own is None:
            vector.numpy().data[:] = pages[: vector.numel()]
        return offset

    def close(self) -> None:
        """Give its space back."""
        os.close(self.descriptor)


def _is_direct(opened: int, name: str) -> bool:
    """Whether a page can be written past the cache and read again.

    If so, the descriptor from then on stands for the file past the cache.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    page, direct = new_pages(PAGE), -1
    try:
        direct = os.open(name, os.O_RDWR | flag)
        works = os.pwrite(direct, page, 0) == os.preadv(direct, [page], 0) == PAGE
        if works:
            os.dup2(direct, opened, inheritable=False)
        return works
    except OSError:
        return False
    finally:
        if direct >= 0:
            os.close(direct)
