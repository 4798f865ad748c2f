"""What rows take, from recorded steps of two ranks that are made up here."""

import pytest

from pipectl.lanes import TransferKind
from pipectl.schedule import Channel
from pipectl.schedule.measured_rows import Steps, row_times_of
from pipectl.timeline import Event, Timeline

MS = 1e-3


def channels(size_bytes):
    return (Channel(TransferKind.ACTIVATION, 0, 1, 0, 1, size_bytes),)


def step(waits=0.03, gap=0.02):
    """Rank 0 computes, sends and updates; the message is there 0.5 ms before rank 1 takes it."""
    rows = [
        (0, 0.1, 5.1, "forward", 0, 0, -1),
        (0, 5.1 + gap, 5.2 + gap, "send_start", 0, 0, 0),
        (0, 5.2 + gap, 5.21 + gap, "send_wait", 0, 0, 0),
        (0, 6.0, 6.4, "update_wait", -1, -1, -1),
        (0, 6.4, 6.7, "update", -1, -1, -1),
        (1, 0.2, 0.25, "receive_start", 1, 0, 0),
        (1, 5.8, 5.8 + waits, "receive_wait", 1, 0, 0),
        (1, 5.9, 6.4, "update_wait", -1, -1, -1),
        (1, 6.4, 6.6, "update", -1, -1, -1),
    ]
    events = tuple(Event(rank, b * MS, e * MS, *rest) for rank, b, e, *rest in rows)
    return Timeline(events, 2)


def measured(size_bytes, **times):
    return Steps(channels(size_bytes), [step(**times)] * 6, [6.9 * MS] * 6)


def test_every_row_has_the_time_that_it_took_and_a_step_what_no_row_has():
    found = row_times_of([measured(1000)])
    assert found.send_start == ((1000, pytest.approx(0.1 * MS)),)
    assert found.send_wait == ((1000, pytest.approx(0.01 * MS)),)
    assert found.receive_start == ((1000, pytest.approx(0.05 * MS)),)
    assert found.receive_wait == ((1000, pytest.approx(0.03 * MS)),)
    assert found.compute == pytest.approx(0.02 * MS)
    assert found.begin == pytest.approx(0.1 * MS)
    assert found.agree == pytest.approx(0.4 * MS)
    # 6.9 ms in all, from its first to its last row 6.6, and an update of 0.3
    assert found.end == pytest.approx(0.5 * MS)
    # what large messages add between rows counts as receiving them
    found = row_times_of([measured(1000), measured(9000, gap=0.06)])
    assert found.compute == pytest.approx(0.02 * MS)
    assert dict(found.receive_wait)[9000] == pytest.approx(0.07 * MS)
    nothing = row_times_of([])
    assert (nothing.send_start, nothing.end) == ((), 0.0)


def test_of_messages_that_nobody_had_sent_before_the_quickest_count():
    late = [step(waits=each) for each in (0.9, 0.8, 0.05)]
    events = [
        tuple(e._replace(start_s=4 * MS) if e.kind == "receive_wait" else e for e in t.events)
        for t in late
    ]
    steps = Steps(channels(10), [Timeline(each, 2) for each in events], [6.9 * MS] * 3)
    assert dict(row_times_of([steps]).receive_wait)[10] == pytest.approx(1.85 * MS)
