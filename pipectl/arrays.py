"""Names for the types of NumPy arrays, and tables: arrays of records."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
"""Sets of small numbers, 64 per word."""
Records = npt.NDArray[np.void]
"""A table; the fields of its records are attributes."""


def record(integers: str = "", floats: str = "") -> np.dtype[np.void]:
    """The type of the records of a table, by the names of their fields.

    Kernels take few tables rather than many arrays: what one takes to compile grows with these.
    """
    fields: list[tuple[str, type]] = [(name, np.int64) for name in integers.split()]
    fields += [(name, np.float64) for name in floats.split()]
    # Without numba, NumPy would give its own attribute of such a name.
    assert not [name for name, _ in fields if hasattr(np.record, name)], fields
    return np.dtype((np.record, fields))
