"""What a profile says of samples that differ from reading to reading."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipectl.capture import CapturedJob
from pipectl.profile import Readings
from pipectl.profiler.readings import other_reader

ODD = Path(__file__).parents[1] / "runtime" / "odd_data.py"
READINGS = {
    ("Stream", None): Readings.SAME,
    ("Named", "ByName"): Readings.BY_PROCESS,
    ("OwnGenerator", None): Readings.EACH,
    ("Buffered", None): Readings.EACH,
    ("Broken", None): None,
}


@pytest.mark.parametrize(("data", "held_out"), READINGS)
def test_a_second_process_reads_the_same_samples(
    spec_maker, data: str, held_out: str | None
) -> None:
    """What cannot be read tells nothing; training may never come to it."""
    sections = {"evaluation": {"data": f"{ODD}:{held_out}"}} if held_out else {}
    spec = spec_maker(ODD)("Copy", loss="torch.nn:MSELoss", data=data, **sections)
    with other_reader(spec) as other:
        assert other.compare(CapturedJob(spec)) is READINGS[data, held_out]
