"""Weights on disk: safetensors by full parameter name, one file a rank, and a manifest.

The names are those of the user's model, so the files load into it whatever the plan was.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpi4py import MPI
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipectl.errors import DataFileError
from pipectl.fields import Reader
from pipectl.files import read_json, write_json
from pipectl.runtime.waiting import barrier

VERSION = 1
MANIFEST = "manifest.json"
_PREFIX = "model."
_CURE = "use another checkpoint of the run"


def save(
    communicator: MPI.Comm,
    directory: Path,
    step: int,
    states: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    keep: int,
) -> Path:
    """Write a checkpoint of the weights; collective.

    Everything is written under a temporary name that the last rename makes valid, so an
    interrupted save leaves the previous checkpoint as it was.

    Args:
        directory: of all checkpoints.
        states: the parameters and buffers this rank saves, by full name.
        aliases: further names of tied states, to the name they are stored under.
        keep: how many checkpoints stay, this one included.

    Returns:
        Directory of the checkpoint.
    """
    final = directory / f"step-{step:06d}"
    partial = directory / f".step-{step:06d}.partial"
    if communicator.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier(communicator)
    shards = communicator.gather(_write_shard(partial, communicator.rank, states))
    if communicator.rank == 0:
        assert shards is not None
        _write_manifest(partial, step, [shard for shard in shards if shard], aliases)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _sync(directory)
        _drop_old(directory, keep)
    barrier(communicator)
    return final


def load(directory: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint by the names of the user's model, checksums verified.

    Raises:
        DataFileError: a file is missing or damaged.
    """
    return dict(Stored(directory))


class Stored(Mapping[str, Tensor]):
    """The weights of a checkpoint, each read from its file when it is asked for.

    Raises:
        DataFileError: a file is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / MANIFEST
        manifest = Reader(read_json(path, cure=_CURE), file=str(path), cure=_CURE)
        manifest.check_version(VERSION)
        self._files: dict[str, Path] = {}
        for shard in manifest.items("shards"):
            file = directory / Path(shard.text("file")).name
            self._files.update(dict.fromkeys(_names(file, shard.text("sha256")), file))
        aliases = manifest.value("aliases")
        known = self._files
        if not isinstance(aliases, dict) or not all(str(n) in known for n in aliases.values()):
            raise manifest.error("aliases", "must give each further name of a saved weight")
        self._aliases = {str(alias): str(name) for alias, name in aliases.items()}

    def __getitem__(self, name: str) -> Tensor:
        stored = self._aliases.get(name, name)
        with safe_open(self._files[stored], "pt") as file:
            tensor: Tensor = file.get_tensor(stored)
        return tensor

    def __iter__(self) -> Iterator[str]:
        yield from self._files
        yield from self._aliases

    def __len__(self) -> int:
        return len(self._files) + len(self._aliases)


def _names(path: Path, checksum: str) -> list[str]:
    """The tensors in a file, whose bytes are what they were."""
    if not path.is_file() or _checksum(path) != checksum:
        raise DataFileError(f"{path}: missing or damaged", cure=_CURE)
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _write_shard(directory: Path, rank: int, states: Mapping[str, Tensor]) -> dict[str, Any] | None:
    tensors = {
        name.removeprefix(_PREFIX): tensor.detach().cpu().contiguous()
        for name, tensor in states.items()
        if name.startswith(_PREFIX)
    }
    if not tensors:
        return None
    path = directory / f"rank-{rank:04d}.safetensors"
    save_file(tensors, path)
    _sync(path)
    size_bytes = path.stat().st_size
    names = sorted(tensors)
    return {"file": path.name, "sha256": _checksum(path), "bytes": size_bytes, "names": names}


def _write_manifest(
    directory: Path, step: int, shards: list[dict[str, Any]], aliases: Mapping[str, str]
) -> None:
    plain = {
        alias.removeprefix(_PREFIX): name.removeprefix(_PREFIX) for alias, name in aliases.items()
    }
    write_json(
        directory / MANIFEST,
        {"version": VERSION, "step": step, "shards": shards, "aliases": plain},
    )


def _drop_old(directory: Path, keep: int) -> None:
    saved = sorted(directory.glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
    for old in saved[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
