import json
from dataclasses import replace

import pytest

from pipectl.errors import DataFileError
from pipectl.runs import PROFILING, Event, Record, Setting

RECORD = Record(
    name="gpt",
    scheduler="slurm",
    tag="7f3a9c",
    submitted_at=1795228138.5,
    ranks=8,
    nodes=2,
    steps=500,
)


VALUES = {"optimizer.kwargs.lr": 1e-3, "training.precision": "bf16", "model.kwargs.x": None}


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        RECORD.with_state(1.0, "submitted", job_id="28").with_state(
            2.0, "cancelled", detail="by me"
        ),
        replace(RECORD, kind=PROFILING),
        replace(RECORD, sweep=Setting("20261120-152233-gpt", VALUES), task=3),
    ],
)
def test_a_record_is_read_back_equal(tmp_path, record):
    path = tmp_path / "record.json"
    record.save(path)
    assert Record.load(path) == record
    document = json.loads(path.read_text())
    assert document["version"] == 1
    del document["kind"]  # as written before there were others than trainings
    path.write_text(json.dumps(document))
    assert Record.load(path).kind == "training"


def test_changes_are_kept_in_the_history():
    submitted = RECORD.with_state(1.0, "submitted", job_id="28")
    assert (RECORD.state, RECORD.job_id) == ("submitting", None)
    assert (submitted.state, submitted.job_id) == ("submitted", "28")
    cancelled = submitted.with_state(2.0, "cancelled")
    assert cancelled.job_id == "28"
    assert cancelled.history == (Event(1.0, "submitted", "28"), Event(2.0, "cancelled"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version"),
        ({"state": "flying"}, "state"),
        ({"tag": None}, "tag: missing"),
        ({"ranks": 0}, "ranks"),
        ({"submitted_at": "now"}, "submitted_at"),
        ({"history": [3]}, r"history\[0\]"),
        ({"sweep": 3}, "sweep: must be an object"),
        ({"sweep": {"name": "../elsewhere", "values": {}}}, "sweep.name"),
        ({"task": -1}, "task"),
    ],
)
def test_damaged_records_are_refused_by_field(tmp_path, change, message):
    path = tmp_path / "record.json"
    RECORD.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataFileError, match=message):
        Record.load(path)
