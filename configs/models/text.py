"""Text that is on every machine: the source code of Python's own standard library."""

from __future__ import annotations

import string
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

# Tab, newline and the printable ASCII characters; any other character is the symbol 0.
CHARACTERS = "\t\n" + "".join(sorted(set(string.printable) - set(string.whitespace))) + " "
VOCABULARY = len(CHARACTERS) + 1
CODES = {character: code for code, character in enumerate(CHARACTERS, start=1)}

# Every tenth file is kept from training, to measure on text the model has not seen.
HELD_OUT_EVERY = 10


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of ``length`` characters; the target of each character is the one behind it."""

    def __init__(self, codes: Tensor, length: int) -> None:
        # A view of shape [windows, length + 1]: the last character of each opens the next.
        self.windows = codes.unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.windows[index].long()
        return window[:-1], window[1:]


def training(length: int = 128, megabytes: float = 3.0) -> Windows:
    """Nine of ten files, up to so many million characters."""
    files = [path for index, path in enumerate(source_files()) if index % HELD_OUT_EVERY]
    return Windows(encode(files, int(megabytes * 1e6)), length)


def held_out(length: int = 128, windows: int = 256) -> Windows:
    """The start of the files that training leaves out."""
    return Windows(encode(source_files()[::HELD_OUT_EVERY], windows * length + 1), length)


def source_files() -> list[Path]:
    """The library's top-level modules, by name."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def encode(files: list[Path], limit: int) -> Tensor:
    """The codes of the first ``limit`` characters of the files, one byte each."""
    codes = bytearray()
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        codes.extend(CODES.get(character, 0) for character in text)
        if len(codes) >= limit:
            break
    return torch.frombuffer(codes[:limit], dtype=torch.uint8)
