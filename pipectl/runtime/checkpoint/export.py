"""Weights of a checkpoint as the files that everybody reads: one, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor

from pipectl.capture.tensor_file import write_tensors
from pipectl.errors import UsageError
from pipectl.files import make_directory, write_text
from pipectl.runtime.checkpoint.stored import Stored

INDEX = "model.safetensors.index.json"
_METADATA = {"format": "pt"}


def export_file(weights: Stored, path: Path) -> int:
    """Write all weights into one safetensors file, tied ones under each of their names.

    One tensor is in memory at a time.

    Returns:
        Bytes of the tensors.

    Raises:
        UsageError: the file cannot be written; one that was there is as it was.
        DataFileError: the checkpoint is damaged.
    """
    make_directory(path.absolute().parent)
    layouts = {name: weights.layout(name) for name in weights}
    with _whole(path) as partial:
        write_tensors(partial, layouts, weights.__getitem__, _METADATA)
    return sum(layout.nbytes for layout in layouts.values())


def export_shards(weights: Stored, directory: Path, max_bytes: int) -> int:
    """Write files of at most so many bytes and their index, as model hubs have them.

    A tensor that is larger gets a file of its own. The files get their names when all are written,
    the index last. Returns and raises as :func:`export_file`.
    """
    make_directory(directory)
    parts = list(_parts({name: weights.layout(name) for name in weights}, max_bytes))
    files = {
        f"model-{index:05d}-of-{len(parts):05d}.safetensors": part
        for index, part in enumerate(parts, 1)
    }
    places = {name: file for file, part in files.items() for name in part}
    total = sum(layout.nbytes for part in parts for layout in part.values())
    document = {"metadata": {"total_size": total}, "weight_map": places}
    with ExitStack() as ends:
        index = ends.enter_context(_whole(directory / INDEX))
        for file, part in files.items():
            partial = ends.enter_context(_whole(directory / file))
            write_tensors(partial, part, weights.__getitem__, _METADATA)
        write_text(index, json.dumps(document, indent=1) + "\n")
    return total


def _parts(layouts: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    part, size = dict[str, Tensor](), 0
    for name, layout in layouts.items():
        if part and size + layout.nbytes > max_bytes:
            yield part
            part, size = {}, 0
        part[name] = layout
        size += layout.nbytes
    if part:
        yield part


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file to write that then takes the place of another; gone if that fails."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error}",
            cure="choose a directory you may write to, or free some space",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
