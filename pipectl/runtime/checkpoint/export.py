"""Weights of a checkpoint as the files that everybody reads: one, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from pipectl.errors import UsageError
from pipectl.files import make_directory, write_text
from pipectl.runtime.checkpoint.snapshot import sync

INDEX = "model.safetensors.index.json"
_METADATA = {"format": "pt"}


def export_file(weights: Mapping[str, Tensor], path: Path) -> int:
    """Write all weights into one safetensors file, tied ones under each of their names.

    Returns:
        Bytes of the tensors.

    Raises:
        UsageError: the file cannot be written; one that was there is as it was.
    """
    tensors = {name: weights[name] for name in weights}
    make_directory(path.absolute().parent)
    with _whole(path) as partial:
        save_file(tensors, partial, _METADATA)
    return sum(tensor.nbytes for tensor in tensors.values())


def export_shards(weights: Mapping[str, Tensor], directory: Path, most_bytes: int) -> int:
    """Write files of at most so many bytes and their index, as model hubs have them.

    A tensor that is larger gets a file of its own. The index is written last.

    Returns:
        Bytes of all tensors.

    Raises:
        UsageError: a file cannot be written.
    """
    make_directory(directory)
    names = list(_parts(weights, most_bytes))
    files = {
        f"model-{index:05d}-of-{len(names):05d}.safetensors": part
        for index, part in enumerate(names, 1)
    }
    total = 0
    for file, part in files.items():
        total += export_file({name: weights[name] for name in part}, directory / file)
    places = {name: file for file, part in files.items() for name in part}
    document = {"metadata": {"total_size": total}, "weight_map": places}
    write_text(directory / INDEX, json.dumps(document, indent=1) + "\n")
    return total


def _parts(weights: Mapping[str, Tensor], most_bytes: int) -> Iterator[list[str]]:
    """Names file by file; each tensor is looked at once, and not kept."""
    part, size = list[str](), 0
    for name in weights:
        more = weights[name].nbytes
        if part and size + more > most_bytes:
            yield part
            part, size = [], 0
        part.append(name)
        size += more
    if part:
        yield part


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file to write that then takes the place of another."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    except Exception as error:  # safetensors raises its own for a full disk
        partial.unlink(missing_ok=True)
        raise UsageError(
            f"{path}: cannot be written: {error}",
            cure="choose a directory you may write to, or free some space",
        ) from error
