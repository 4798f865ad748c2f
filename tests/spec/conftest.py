"""A small valid job spec to spoil, and what the loader then says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipectl.errors import SpecError
from pipectl.spec import JobSpec, load

MINIMAL = """\
version: 1
name: demo
model: {factory: torch.nn:Linear, kwargs: {in_features: 4, out_features: 2}}
loss: {factory: torch.nn:MSELoss}
data: {factory: torch.utils.data:TensorDataset}
training: {steps: 10, batch_size: 8}
"""

Loader = Callable[..., JobSpec]
Complaints = Callable[..., list[str]]


@pytest.fixture
def minimal() -> str:
    """The required keys; further keys begin on line 7."""
    return MINIMAL


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loader:
    """Load a text as ``job.yaml`` of the current directory, without site files."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str | bytes, *overrides: str) -> JobSpec:
        content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        Path("job.yaml").write_bytes(content)
        return load(Path("job.yaml"), overrides, sites=())

    return load_text


@pytest.fixture
def complaints(read: Loader) -> Complaints:
    """The lines of the error for a text; fails where the text is accepted."""

    def lines(text: str | bytes, *overrides: str) -> list[str]:
        with pytest.raises(SpecError) as caught:
            read(text, *overrides)
        return [str(problem) for problem in caught.value.problems]

    return lines


@pytest.fixture
def added(complaints: Complaints) -> Complaints:
    """The complaints about a text added to the minimal spec, on line 7."""
    return lambda text, *overrides: complaints(MINIMAL + text, *overrides)
