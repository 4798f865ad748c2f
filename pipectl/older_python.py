"""What Python 3.11 has in its library and Python 3.10 has not."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any

if sys.version_info >= (3, 11):
    from enum import StrEnum as StrEnum
    from typing import NotRequired as NotRequired
    from typing import Self as Self
    from typing import Unpack as Unpack
else:
    from typing_extensions import NotRequired as NotRequired
    from typing_extensions import Self as Self
    from typing_extensions import Unpack as Unpack

    class StrEnum(str, Enum):
        """Members are strings; those without a value have their name in lower case."""

        __str__ = str.__str__
        __format__ = str.__format__

        @staticmethod
        def _generate_next_value_(name: str, *_: Any) -> str:
            return name.lower()
