"""Between two steps weights go from where they are updated to where forwards run."""

from dataclasses import replace

from pipectl.schedule import Kind, channels, lower_renewal


def apart_plan(pipeline):
    """Two stages; the backward of each on the other one's rank."""
    plan = pipeline(2, 4)
    stages = (replace(s, backward_ranks=(1 - s.ranks[0],)) for s in plan.stages)
    return replace(plan, stages=tuple(stages))


def test_every_rank_starts_all_messages_before_it_waits(pipeline):
    plan = apart_plan(pipeline)
    for rank in (0, 1):
        rows = list(lower_renewal(plan, rank))
        kinds = [Kind(row.kind) for row in rows]
        assert set(kinds[:2]) == {Kind.SEND_START, Kind.RECEIVE_START}
        assert set(kinds[2:]) == {Kind.SEND_WAIT, Kind.RECEIVE_WAIT}
        for row in rows:
            channel = channels(plan)[row.channel]
            sends = row.kind in (Kind.SEND_START, Kind.SEND_WAIT)
            assert channel.kind == "weight"
            assert rank == (channel.source_rank if sends else channel.target_rank)


def test_nothing_is_sent_where_backwards_stay(pipeline):
    assert len(lower_renewal(pipeline(2, 4), 0)) == 0
