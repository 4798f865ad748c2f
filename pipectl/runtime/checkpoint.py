"""Weights on disk: safetensors by full parameter name, one file a rank, and a manifest.

The names are those of the user's model, so the files load into it whatever the plan was.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpi4py import MPI
from safetensors.torch import load_file, save_file
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
    path = directory / MANIFEST
    manifest = Reader(read_json(path, cure=_CURE), file=str(path), cure=_CURE)
    manifest.check_version(VERSION)
    found: dict[str, Tensor] = {}
    for shard in manifest.items("shards"):
        found.update(_read_shard(directory / Path(shard.text("file")).name, shard.text("sha256")))
    aliases = manifest.value("aliases")
    if not isinstance(aliases, dict) or not all(str(name) in found for name in aliases.values()):
        raise manifest.error("aliases", "must give each further name of a saved weight")
    return {**found, **{alias: found[str(name)] for alias, name in aliases.items()}}


def _read_shard(path: Path, checksum: str) -> dict[str, Tensor]:
    if not path.is_file() or _checksum(path) != checksum:
        raise DataFileError(f"{path}: missing or damaged", cure=_CURE)
    return load_file(path)


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
