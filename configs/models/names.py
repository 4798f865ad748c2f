"""Functions of Python's standard library without their names, and the names: on every machine."""

from __future__ import annotations

import ast
import string
import sysconfig
import textwrap
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

# 0 is padding, 1 opens a name and 2 ends it; any other character but the printable ones is 3.
START, END, OTHER = 1, 2, 3
CODES = {character: code for code, character in enumerate(string.printable[:95], start=4)}
VOCABULARY = 4 + len(CODES)

# Every tenth function is kept from training, to measure on functions the model has not seen.
HELD_OUT_EVERY = 10


class Names(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """({source, target}, targets): the target of each character of a name is the one after it.

    Sources are as long as they are, up to ``length``; `data.pad` pads them.
    """

    def __init__(self, functions: list[tuple[str, str]], length: int, name_length: int) -> None:
        self.functions = functions
        self.length = length
        self.name_length = name_length

    def __len__(self) -> int:
        return len(self.functions)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        body, name = self.functions[index]
        target = padded([START, *encode(name)[: self.name_length - 1], END], self.name_length + 1)
        source = torch.tensor(encode(body)[: self.length])
        return {"source": source, "target": target[:-1]}, target[1:]


def training(length: int = 128, name_length: int = 24, limit: int = 4000) -> Names:
    """Nine of ten functions, of the first ``limit``."""
    functions = [pair for i, pair in enumerate(named_functions(limit)) if i % HELD_OUT_EVERY]
    return Names(functions, length, name_length)


def held_out(length: int = 128, name_length: int = 24, limit: int = 4000) -> Names:
    """The functions that training leaves out."""
    return Names(named_functions(limit)[::HELD_OUT_EVERY], length, name_length)


@cache
def named_functions(limit: int) -> list[tuple[str, str]]:
    """(body, name) of the first functions of the library's top-level modules, by file name."""
    functions: list[tuple[str, str]] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = lines[node.body[0].lineno - 1 : node.end_lineno]
                functions.append((textwrap.dedent("\n".join(body)), node.name))
        if len(functions) >= limit:
            break
    return functions[:limit]


def encode(text: str) -> list[int]:
    return [CODES.get(character, OTHER) for character in text]


def padded(codes: list[int], length: int) -> Tensor:
    return torch.tensor((codes + [0] * length)[:length])
