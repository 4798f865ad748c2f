import json
from dataclasses import replace

import pytest

from pipectl.errors import DataFileError
from pipectl.runs import PROFILING, Event, Record, Setting

RECORD = Record("gpt", "slurm", "7f3a9c", 1795228138.5, ranks=8, nodes=2, steps=500)
VALUES = {"optimizer.kwargs.lr": 1e-3, "training.precision": "bf16", "model.kwargs.x": None}


def test_a_record_keeps_its_history_and_is_read_back_equal(tmp_path):
    submitted = RECORD.with_state(1.0, "submitted", job_id="28")
    assert (RECORD.state, RECORD.job_id) == ("submitting", None)
    assert (submitted.state, submitted.job_id) == ("submitted", "28")
    cancelled = submitted.with_state(2.0, "cancelled")
    assert cancelled.job_id == "28"
    assert cancelled.history == (Event(1.0, "submitted", "28"), Event(2.0, "cancelled"))
    path = tmp_path / "record.json"
    for record in (
        RECORD,
        cancelled,
        submitted.with_state(2.0, "cancelled", detail="by me"),
        replace(RECORD, kind=PROFILING),
        replace(RECORD, sweep=Setting("20261120-152233-gpt", VALUES), task=3),
    ):
        record.save(path)
        assert Record.load(path) == record
    document = json.loads(path.read_text())
    assert document["version"] == 1
    del document["kind"]  # as written before there were others than trainings
    path.write_text(json.dumps(document))
    assert Record.load(path).kind == "training"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version"),
        ({"state": "flying"}, "state"),
        ({"tag": None}, "tag: missing"),
        ({"ranks": 0}, "ranks"),
        ({"submitted_at": "now"}, "submitted_at"),
        ({"submitted_at": 2.5e11}, "submitted_at"),
        ({"job_id": "7;touch x"}, "job_id"),
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
