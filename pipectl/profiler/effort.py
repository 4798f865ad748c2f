"""How much time measuring may take."""

from __future__ import annotations

from enum import Enum


class Effort(Enum):
    """The trade of measuring time against accuracy."""

    FAST = "fast"
    NORMAL = "normal"
    THOROUGH = "thorough"
