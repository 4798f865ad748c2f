"""Metrics as event files for TensorBoard: ``tracking: tensorboard``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipectl.errors import CaptureError
from pipectl.runtime.tracking import get_figures


class Writer:
    """Called with lines of the metrics; figures become scalars, by step.

    Args:
        directory: of the event files.

    Raises:
        CaptureError: there is no TensorBoard.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise CaptureError(
                f"TensorBoard cannot be imported: {error}",
                cure="pip install tensorboard",
            ) from None
        self._events = SummaryWriter(str(directory))

    def __call__(self, line: dict[str, Any]) -> None:
        """Add a line; of evaluations every metric, under ``evaluation/``."""
        for name, value in get_figures(line).items():
            self._events.add_scalar(name, value, line["step"], line.get("time"))

    def close(self) -> None:
        """Write what is left."""
        self._events.close()


def writer(run: Path, config: dict[str, Any], directory: str = "tensorboard") -> Writer:  # noqa: ARG001
    """A writer to a directory below that of the run."""
    return Writer(run / directory)
