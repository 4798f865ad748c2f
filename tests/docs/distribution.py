"""The wheel and the source distribution of this checkout, as ``make dist`` builds them."""

import shutil
from pathlib import Path

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from tests.docs.man_pages import write_man_pages
from tests.docs.pages import CHECKOUT


def wheel(folder: Path) -> Path:
    """Build it there, of the source distribution, which is there then, too, with man pages."""
    (archive,) = SdistBuilder(str(CHECKOUT)).build(directory=str(folder))
    shutil.unpack_archive(archive, folder)  # Debian 12's tarfile has no filters
    (source,) = folder.glob("*/pyproject.toml")
    write_man_pages(source.parent / "build" / "man")
    (path,) = WheelBuilder(str(source.parent)).build(directory=str(folder), versions=["standard"])
    return Path(path)
