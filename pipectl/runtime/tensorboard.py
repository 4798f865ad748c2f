"""Metrics as event files for TensorBoard: ``callbacks: {tensorboard: <this module>:writer}``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipectl.errors import CaptureError

_NOT_DRAWN = frozenset({"attempt", "step", "steps", "time"})


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
                f"callbacks: TensorBoard cannot be imported: {error}",
                cure="pip install tensorboard",
            ) from None
        self._events = SummaryWriter(str(directory))

    def __call__(self, line: dict[str, Any]) -> None:
        """Add a line; of evaluations every metric, under ``evaluation/``."""
        evaluation = line.get("evaluation") or {}
        figures = {name: line[name] for name in line.keys() - _NOT_DRAWN}
        figures |= {f"evaluation/{name}": value for name, value in evaluation.items()}
        for name, value in figures.items():
            if isinstance(value, int | float):
                self._events.add_scalar(name, value, line["step"], line.get("time"))

    def close(self) -> None:
        """Write what is left."""
        self._events.close()


def writer(run: Path, config: dict[str, Any], directory: str = "tensorboard") -> Writer:  # noqa: ARG001
    """A writer to a directory below that of the run."""
    return Writer(run / directory)
