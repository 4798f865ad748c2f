"""Reading tensors of safetensors files one by one, each once, into memory of its own.

The library maps files into memory, where what was read stays in the process for as long as any
tensor of the file does, and where a file that another node removes takes the process with it.
"""

from __future__ import annotations

import json
import os
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from pipectl.access import open_regular
from pipectl.errors import DataFileError
from pipectl.files import MAX_BYTES
from pipectl.runtime.checkpoint.tensor_file import CODES, LENGTH_BYTES, METADATA

_TYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Header:
    """What a file holds.

    Args:
        layouts: of its tensors, on the meta device.
        starts: of their bytes in the file.
        metadata: the file's own notes.
    """

    layouts: dict[str, Tensor]
    starts: dict[str, int]
    metadata: dict[str, str]


class TensorReader:
    """Some files, of which one is open at a time, and every header is read once."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._open = ExitStack()
        self._stream: BinaryIO | None = None
        self.header = cache(self._header)
        weakref.finalize(self, self._open.close)

    def tensor(self, path: Path, name: str) -> Tensor:
        """One tensor, in memory of its own.

        Raises:
            DataFileError: the file is gone or damaged.
        """
        header = self.header(path)
        if name not in header.layouts:
            raise _damaged(path, f"has no {name!r}")
        found = torch.empty_like(header.layouts[name], device="cpu")
        place = found.view(-1).view(torch.uint8).numpy().data
        try:
            stream = self._opened(path)
            stream.seek(header.starts[name])
            while len(place):
                read = stream.readinto(place)  # type: ignore[attr-defined]
                if not read:
                    raise _damaged(path, "ends too early")
                place = place[read:]
        except OSError as error:
            raise _damaged(path, str(error.strerror or error)) from error
        return found

    def close(self) -> None:
        """Close the file that is open; it is opened again when it is asked for."""
        self._open.close()
        self._path = None

    def _opened(self, path: Path) -> BinaryIO:
        if self._path != path or self._stream is None:
            self.close()
            self._stream = self._open.enter_context(
                os.fdopen(open_regular(path), "rb", buffering=0)
            )
            self._path = path
        return self._stream

    def _header(self, path: Path) -> Header:
        try:
            stream = self._opened(path)
            stream.seek(0)
            size = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if size > min(path.stat().st_size, MAX_BYTES):
                raise _damaged(path, "is no safetensors file")
            return _parsed(json.loads(stream.read(size)), LENGTH_BYTES + size)
        except OSError as error:
            raise _damaged(path, str(error.strerror or error)) from error
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise _damaged(path, "is no safetensors file") from error


def _parsed(document: dict[str, Any], start: int) -> Header:
    metadata = document.pop(METADATA, {})
    layouts = {
        name: torch.empty(entry["shape"], dtype=_TYPES[entry["dtype"]], device="meta")
        for name, entry in document.items()
    }
    starts = {name: start + entry["data_offsets"][0] for name, entry in document.items()}
    return Header(layouts, starts, metadata)


def _damaged(path: Path, what: str) -> DataFileError:
    return DataFileError(f"{path}: {what}", cure="use another checkpoint of the run")
