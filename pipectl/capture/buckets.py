"""Buckets: batches of sequences of similar length, which are padded to the same length.

Every sample belongs to the shortest bucket that is long enough, and every batch to one bucket. In
the order of an epoch, a batch of a bucket is complete when its last sample comes; the rest of each
bucket comes at the end. So every epoch has the same number of batches per bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import default_collate

from pipectl.errors import CaptureError
from pipectl.torch_api import pytree

_PARTS = ("inputs", "targets")
Indices = npt.NDArray[np.int64]
"""Of samples."""


class Buckets:
    """The samples of a dataset by their padded length.

    Args:
        lengths: of the buckets, ascending.
        pad: the padding values of fields, by name.
        sample_lengths: of every sample.
        section: of the spec that names the dataset.
        epochs: the samples of the first epochs, which may leave some out; all by default.

    Attributes:
        used_lengths: lengths of the buckets that have samples, ascending.

    Raises:
        CaptureError: a sample is longer than all buckets, or another epoch has other numbers of
            samples in them.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        pad: Mapping[str, float],
        sample_lengths: Sequence[int],
        section: str,
        epochs: Sequence[Sequence[int]] = (),
    ) -> None:
        self._lengths = np.asarray(lengths)
        self._pad = pad
        self._section = section
        self._sample_lengths = np.asarray(sample_lengths, dtype=np.int64)
        self._bucket_of = np.searchsorted(self._lengths, self._sample_lengths)
        taken = [np.sort(np.asarray(each)) for each in epochs] or [np.arange(len(sample_lengths))]
        self._taken = self._bucket_of[taken[0]]
        too_long = taken[0][self._taken == len(lengths)]
        if len(too_long):
            first = int(too_long[0])
            raise CaptureError(
                f"{section}: sample {first} has length {self._sample_lengths[first]}, and the "
                f"longest of data.buckets is {lengths[-1]} ({len(too_long)} samples are longer)",
                hint="add a bucket to data.buckets, or cut long samples in the dataset",
            )
        kinds = [np.bincount(self._bucket_of[each]).tolist() for each in taken]
        if any(each != kinds[0] for each in kinds):
            raise CaptureError(
                f"{section}: its epochs have different numbers of samples in the buckets of "
                "data.buckets",
                hint="let the sampler take the same samples in every epoch, or leave data.buckets "
                "out",
            )
        self.used_lengths: tuple[int, ...] = tuple(self._lengths[np.unique(self._taken)].tolist())

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each bucket in an epoch, if it has some, in the order of their lengths."""
        counts: list[int] = np.unique(self._taken, return_counts=True)[1].tolist()
        return tuple(counts)

    def arrange(self, order: Sequence[int], batch_size: int) -> list[Indices]:
        """Return the samples of every batch of an epoch.

        Args:
            order: of its samples.
        """
        samples, full, rest = np.asarray(order), list[Indices](), list[Indices]()
        for bucket in range(len(self._lengths)):
            places = np.flatnonzero(self._bucket_of[samples] == bucket)
            stop = len(places) - len(places) % batch_size
            full += list(places[:stop].reshape(-1, batch_size))
            rest += [places[stop:]] if stop < len(places) else []
        full.sort(key=lambda places: int(places[-1]))
        return [samples[places] for places in (*full, *rest)]

    def length_of(self, samples: Sequence[int] | Indices) -> int:
        """Return the padded length of a batch of some samples."""
        return int(self._lengths[self._bucket_of[samples].max()])

    def tokens_of(self, samples: Indices) -> int:
        """Return the sum of the lengths of some samples."""
        return int(self._sample_lengths[samples].sum())

    def fitting(self, length: int) -> list[int]:
        """Return the samples of one bucket, or of shorter ones if it has none."""
        bucket = int(np.searchsorted(self._lengths, length))
        mine = np.flatnonzero(self._bucket_of == bucket)
        return (mine if len(mine) else np.flatnonzero(self._bucket_of < bucket)).tolist()

    def join(
        self, samples: Sequence[tuple[int, Any]], collate: Callable[[list[Any]], Any], length: int
    ) -> Any:
        """Return a padded batch of samples.

        The output of the dataset's own ``collate_fn`` is padded; otherwise samples are padded
        before they are collated.

        Args:
            samples: each with its index.
            length: 0 stands for that of the samples.

        Raises:
            CaptureError: a sequence is longer than its bucket.
        """
        length = length or self.length_of([index for index, _ in samples])
        if collate is default_collate:
            padded = [self._padded(v, length, 0, f"sample {i}") for i, v in samples]
            return default_collate(padded)
        return self._padded(collate([value for _, value in samples]), length, 1, "a batch")

    def check_fields(self, batch: Any) -> None:
        """Raise unless a batch has all fields that are to be padded.

        Raises:
            CaptureError: naming a field that is missing.
        """
        fields: dict[str, None] = {}
        _map_fields(batch, lambda name, _: fields.setdefault(name))
        missing = next((name for name in self._pad if name not in fields), None)
        if missing is not None:
            raise unknown_field(self._section, missing, fields)

    def _padded(self, value: Any, length: int, dim: int, what: str) -> Any:
        def pad(name: str, field: Any) -> Any:
            if name not in self._pad:
                return field
            tensor = torch.as_tensor(field)
            missing = length - tensor.shape[dim] if tensor.dim() > dim else 0
            if missing < 0:
                raise CaptureError(
                    f"{self._section}: {name!r} of {what} has length {tensor.shape[dim]}, but its "
                    f"bucket (data.buckets) has {length}",
                    hint="give the dataset the attribute lengths, with the length of every sample "
                    "as it is in a batch",
                )
            if not missing:
                return tensor
            sizes = [*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]]
            return torch.cat([tensor, tensor.new_full(sizes, self._pad[name])], dim)

        return _map_fields(value, pad)


def length_of_sample(sample: Any, pad: Mapping[str, float], section: str) -> int:
    """Return the length of the longest padded field of a sample.

    Raises:
        CaptureError: it has none of the fields.
    """
    fields: dict[str, None] = {}
    lengths: list[int] = []

    def measure(name: str, field: Any) -> None:
        fields[name] = None
        if name in pad and hasattr(field, "__len__") and getattr(field, "shape", None) != ():
            lengths.append(len(field))

    _map_fields(sample, measure)
    if not lengths:
        raise unknown_field(section, next(iter(pad)), fields)
    return max(lengths)


def unknown_field(section: str, name: str, fields: Mapping[str, None]) -> CaptureError:
    """Return the refusal of a name under ``data.pad`` that no sequence has."""
    return CaptureError(
        f"{section}: data.pad names {name!r}, but the sequences have the fields "
        f"{', '.join(fields) or 'of no name'}",
        hint="name the fields of a sample that are mappings by their keys, others inputs and "
        "targets; if only the collate_fn makes them, give the dataset the attribute lengths",
    )


def field_of(place: pytree.KeyPath) -> str:
    """Return the name of the field at a place in ``(inputs, targets)``."""
    keys = [str(entry.key) for entry in place if isinstance(entry, pytree.MappingKey)]
    if keys:
        return keys[-1]
    part = place[0]
    assert isinstance(part, pytree.SequenceKey)
    return _PARTS[part.idx]


def _map_fields(value: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """Return a sample or batch with all of its fields changed.

    Args:
        change: called with the name and value of each field.
    """
    if isinstance(value, Mapping):
        return {key: _map_fields(item, change, str(key)) for key, item in value.items()}
    if not name and isinstance(value, tuple | list) and len(value) == len(_PARTS):
        pairs = zip(_PARTS, value, strict=True)
        return tuple(_map_fields(item, change, part) for part, item in pairs)
    if isinstance(value, tuple) or (
        isinstance(value, list) and any(isinstance(item, Tensor) for item in value)
    ):
        items = [_map_fields(item, change, name) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return change(name, value)
