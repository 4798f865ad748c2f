"""Types of NumPy arrays, and tables (arrays of records)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
"""Sets of small integers, one bit each, 64 per word."""
Records = npt.NDArray[np.void]
"""A table: an array of records whose fields can be read as attributes."""


def unique(values: npt.NDArray[Any], axis: int | None = None) -> npt.NDArray[Any]:
    """Return the different values, or rows for axis 0, in ascending order.

    Only without counts, `np.unique` imports `numpy.ma`, which takes as long as all of NumPy.
    """
    return np.unique(values, return_counts=True, axis=axis)[0]


def record(integers: str = "", floats: str = "") -> np.dtype[np.void]:
    """Return the record type of a table from the names of its fields.

    Kernels take a few tables instead of many arrays, which would take longer to compile.
    """
    fields: list[tuple[str, type]] = [(name, np.int64) for name in integers.split()]
    fields += [(name, np.float64) for name in floats.split()]
    # In interpreted kernels, an attribute of np.record would hide a field of the same name.
    assert not [name for name, _ in fields if hasattr(np.record, name)], fields
    return np.dtype((np.record, fields))
