"""The wheel and the source distribution of this checkout."""

from pathlib import Path

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from pages import CHECKOUT


def wheel(folder: Path) -> Path:
    """Build it there."""
    (path,) = WheelBuilder(str(CHECKOUT)).build(directory=str(folder), versions=["standard"])
    return Path(path)


def source_distribution(folder: Path) -> Path:
    """Build it there."""
    (path,) = SdistBuilder(str(CHECKOUT)).build(directory=str(folder))
    return Path(path)
