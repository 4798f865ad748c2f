"""Checksums of samples and weights, by which processes compare what each of them has."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipectl.capture.data import Loader
from pipectl.capture.tensors import octets_of
from pipectl.torch_api import pytree

_SAMPLES = 4
"""Of each dataset, for a comparison of processes."""
_MAX_HELD_OUT, _MAX_TRAINED, _PATIENCE_S = 64, 10_000, 0.5
"""Samples of each dataset that are compared with each other, and for how long."""
_DISTINCT = 0.9
"""Share of samples that differ from all others, unless data have few values."""
_WORD = 8
Digests = npt.NDArray[np.uint32]
"""One per sample."""


def digests_of(batch: Any, samples: int) -> Digests:
    """Return a checksum of every sample of a collated batch.

    It covers the values, types and shapes of all tensors, and numbers; what no graph computes with
    (names of files, for example) may differ. Keys of dictionaries may come in any order.

    Args:
        batch: any tree; a leaf with another first dimension than ``samples`` counts for all.
    """
    if isinstance(batch, tuple) and all(type(part) is Tensor for part in batch):  # most often
        named = [(f"[{index}]", part) for index, part in enumerate(batch)]
    else:
        leaves = pytree.tree_flatten_with_path(batch)[0]
        named = sorted(((pytree.keystr(place), leaf) for place, leaf in leaves), key=_name)
    common, digests = 0, [0] * samples
    for name, leaf in named:
        if isinstance(leaf, Tensor):
            head = _head(name, leaf.dtype, leaf.shape[1:])
            octets = memoryview(
                octets_of(leaf if leaf.layout is torch.strided else leaf.to_dense())
            )
            if leaf.dim() and leaf.shape[0] == samples:
                size = len(octets) // samples
                digests = [
                    crc32(octets[i * size : (i + 1) * size], digest ^ head)
                    for i, digest in enumerate(digests)
                ]
            else:
                common = crc32(octets, common ^ head)
        elif isinstance(leaf, int | float):
            common = crc32(f"{name} {leaf!r}".encode(), common)
    return np.array(digests, dtype=np.uint32) ^ np.uint32(common)


def checksum(tensor: Tensor) -> int:
    """The sum of a tensor's bits, read as integers, modulo 2 ** 64."""
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % _WORD:
        octets = octets.clone()
    words = octets.numel() // _WORD * _WORD
    total = int(octets[:words].view(torch.int64).sum()) + int(octets[words:].sum())
    return (total + 2**63) % 2**64 - 2**63


def _name(leaf: tuple[str, Any]) -> str:
    return leaf[0]


@lru_cache(maxsize=1000)
def _head(name: str, dtype: torch.dtype, sizes: torch.Size) -> int:
    return crc32(f"{name} {dtype} {tuple(sizes)}".encode())


def sample_digests(*loaders: Loader | None) -> list[list[int]]:
    """Return checksums of a few samples of each dataset, spread over it if it is not iterable.

    Raises:
        CaptureError: a sample cannot be read.
    """
    found = []
    for loader in loaders:
        if loader is None:
            continue
        if (count := loader.samples) is None:
            found.append(digests_of(loader.example(_SAMPLES), _SAMPLES).tolist())
            continue
        firsts = sorted({i * (count - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)})
        batches = [loader.example(1, first) for first in firsts]
        found.append([int(digests_of(batch, 1)[0]) for batch in batches])
    return found


def shared_samples(training: Loader, held_out: Loader) -> list[tuple[int, int]]:
    """Return the indices of some held-out samples, each with that of an equal one in training.

    A few samples all over the held-out data are compared with those of the same indices, counted
    from the beginning or from the end; then with as many of any index, or from the beginning of
    iterable data, as are read in a short time. None are returned unless these few are equal, and
    samples are different from each other: data of few values, or constants, are equal by chance.

    Raises:
        CaptureError: a sample cannot be read.
    """
    total, count = training.samples, held_out.samples
    if count is None or min(count, _SAMPLES if total is None else total) < _SAMPLES:
        return []
    # Not to the last row: a generator draws the end of a tensor in another way than its middle.
    picks = [i * min(total or 0, count) // _SAMPLES for i in range(_SAMPLES)]
    for shift in () if total is None else dict.fromkeys((0, total - count)):
        mine = [index - min(shift, 0) for index in picks]
        theirs = [index + max(shift, 0) for index in picks]
        digests = [_digest(held_out, index) for index in mine]
        if len({*digests}) < _SAMPLES:
            return []
        if digests == [_digest(training, index) for index in theirs]:
            return list(zip(mine, theirs, strict=True))
    return trained_on(training, held_out_digests(held_out))


def held_out_digests(held_out: Loader) -> dict[int, int]:
    """Return the indices of some held-out samples by their checksums; none if many are equal.

    Raises:
        CaptureError: a sample cannot be read.
    """
    count = held_out.samples or 0
    drawn = Random(0).sample(range(count), min(count, _MAX_HELD_OUT))
    found = {_digest(held_out, index): index for index in drawn}
    return found if len(found) >= _DISTINCT * len(drawn) else {}


def trained_on(training: Loader, held_out: Mapping[int, int]) -> list[tuple[int, int]]:
    """As :func:`shared_samples`, for samples of :func:`held_out_digests`, at any indices."""
    if (total := training.samples) is None:
        samples: Iterable[tuple[int, Any]] = islice(enumerate(training.stream()), _MAX_TRAINED)
    else:
        drawn = Random(0).sample(range(total), min(total, _MAX_TRAINED))
        samples = ((index, training.sample(index)) for index in drawn)
    until, trained = time.monotonic() + _PATIENCE_S, dict[int, int]()
    for read, (index, sample) in enumerate(samples if held_out else ()):
        if time.monotonic() > until:
            break
        trained.setdefault(int(digests_of(sample, 1)[0]), index)
        if len(trained) < _DISTINCT * read:
            return []
    found = sorted((index, trained[each]) for each, index in held_out.items() if each in trained)
    return found[:_SAMPLES] if len(found) >= _SAMPLES else []


def _digest(loader: Loader, index: int) -> int:
    return int(digests_of(loader.sample(index), 1)[0])
