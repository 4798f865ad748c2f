"""Safetensors files, written in pieces with a checksum, and read tensor by tensor.

The library's writer needs all tensors at once, and the checksum would read the file again. Here a
tensor is released after it is written, and every piece is hashed while it is in the cache. The
format: eight bytes with the length of a JSON header, the header, and the tensors without gaps.

The library's reader maps files into memory: what was read stays in the process as long as any
tensor of the file, and if another node removes the file, the process ends.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipectl.capture.tensors import octets_of
from pipectl.errors import DataFileError
from pipectl.files import MAX_BYTES, open_regular

_PIECE_BYTES = 2**20
_ALIGNMENT = 8
LENGTH_BYTES = 8
"""Of the number in front of the header."""
METADATA = "__metadata__"
"""Key of the header under which a file's own notes are."""
CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def write_tensors(
    path: Path,
    layouts: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Write a file and flush it to the disk; tensors are requested one at a time.

    Readers expect numbers at multiples of their size, so the largest types come first.

    Args:
        layouts: of all tensors: the tensors, or tensors of the meta device.
        read: returns a tensor by its name.

    Returns:
        Bytes of the file, and its SHA-256.

    Raises:
        OSError: the disk is full, for example.
        TypeError: the format has no such type.
    """
    ordered = sorted(layouts, key=lambda name: (-layouts[name].element_size(), name))
    header = _header({name: layouts[name] for name in ordered}, metadata)
    digest, size_bytes = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(open_regular(path, flags), "wb", buffering=0) as stream:
        head = memoryview(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for content in chain([head], (octets_of(read(name)).data for name in ordered)):
            for start in range(0, len(content), _PIECE_BYTES):  # other threads run in both calls
                rest = content[start : start + _PIECE_BYTES]
                digest.update(rest)
                while len(rest):
                    rest = rest[stream.write(rest) :]
            size_bytes += len(content)
        os.fsync(stream.fileno())
    return size_bytes, digest.hexdigest()


def _header(layouts: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if metadata is None else {METADATA: dict(metadata)}
    end = 0
    for name, tensor in layouts.items():
        if tensor.dtype not in CODES:
            raise TypeError(f"{name} has the type {tensor.dtype}, which safetensors does not know")
        start, end = end, end + tensor.nbytes
        code, shape = CODES[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


_TYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Header:
    """The contents of a file.

    Args:
        layouts: of its tensors, on the meta device.
        starts: offsets of their bytes in the file.
        metadata: the file's own notes.
    """

    layouts: dict[str, Tensor]
    starts: dict[str, int]
    metadata: dict[str, str]


class TensorReader:
    """Reads tensors one at a time; no file stays open, and every header is read once.

    Args:
        hint: of errors.
    """

    def __init__(self, hint: str = "use another checkpoint of the run") -> None:
        self._hint = hint
        self.header = cache(self._header)

    def tensor(self, path: Path, name: str) -> Tensor:
        """One tensor, in memory of its own.

        Raises:
            DataFileError: the file is gone or damaged.
        """
        header = self.header(path)
        if name not in header.layouts:
            raise self._damaged(path, f"has no {name!r}")
        tensor = torch.empty_like(header.layouts[name], device="cpu")
        place = tensor.view(-1).view(torch.uint8).numpy().data
        try:
            with os.fdopen(open_regular(path), "rb", buffering=0) as stream:
                stream.seek(header.starts[name])
                while len(place):
                    read = stream.readinto(place)
                    if not read:
                        raise self._damaged(path, "ends too early")
                    place = place[read:]
        except OSError as error:
            raise self._damaged(path, str(error.strerror or error)) from error
        return tensor

    def _header(self, path: Path) -> Header:
        try:
            with os.fdopen(open_regular(path), "rb", buffering=0) as stream:
                size = int.from_bytes(stream.read(LENGTH_BYTES), "little")
                if size > min(path.stat().st_size, MAX_BYTES):
                    raise self._damaged(path, "cannot be read as safetensors")
                document = json.loads(stream.read(size))
            metadata = document.pop(METADATA, {})
            layouts = {
                name: torch.empty(entry["shape"], dtype=_TYPES[entry["dtype"]], device="meta")
                for name, entry in document.items()
            }
            first = LENGTH_BYTES + size
            starts = {name: first + entry["data_offsets"][0] for name, entry in document.items()}
            return Header(layouts, starts, metadata)
        except OSError as error:
            raise self._damaged(path, str(error.strerror or error)) from error
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise self._damaged(path, "cannot be read as safetensors") from error

    def _damaged(self, path: Path, what: str) -> DataFileError:
        return DataFileError(f"{path}: {what}", hint=self._hint)
