"""Where lowering puts the messages."""

import dataclasses

from pipectl import schedule
from pipectl.graph import TransferKind
from pipectl.plan import Transfer
from pipectl.schedule import Channel, Kind, lower, lower_evaluation, program_hash

SHORT = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.EVALUATE: "E",
    Kind.UPDATE: "update",
    Kind.SEND_START: "send",
    Kind.SEND_WAIT: "sent",
    Kind.RECEIVE_START: "receive",
    Kind.RECEIVE_WAIT: "received",
}


def text(program):
    """One word an action: what, the channel of a transfer after a dot, the micro-batch."""
    words = []
    for action in program.body:
        channel = "" if action.channel < 0 else f".{action.channel}"
        words.append(f"{SHORT[action.kind]}{channel}:{action.micro_batch}")
    return " ".join(words)


def test_channels_join_transfers_by_kind_and_stages(pipeline):
    plan = pipeline(3, 2, size_bytes=10, skips=[(0, (1,), False), (0, (2,), True)])
    found = [
        (c.kind, c.source_stage, c.target_stage, c.size_bytes) for c in schedule.channels(plan)
    ]
    activation, gradient = TransferKind.ACTIVATION, TransferKind.GRADIENT
    assert found == [
        (activation, 0, 1, 20),
        (activation, 0, 2, 10),
        (activation, 1, 2, 10),
        (gradient, 1, 0, 10),
        (gradient, 2, 0, 10),
        (gradient, 2, 1, 10),
    ]


def test_two_ranks_and_three_micro_batches(pipeline):
    plan = pipeline(2, 3)
    assert text(lower(plan, 0)) == (
        "receive.1:0 F:0 send.0:0 F:1 send.0:1 "
        "receive.1:1 received.1:0 sent.0:0 B:0 "
        "F:2 send.0:2 "
        "receive.1:2 received.1:1 sent.0:1 B:1 "
        "received.1:2 sent.0:2 B:2 update:-1"
    )
    assert text(lower(plan, 1)) == (
        "receive.0:0 receive.0:1 received.0:0 F:0 B:0 send.1:0 "
        "receive.0:2 received.0:1 F:1 B:1 send.1:1 "
        "received.0:2 F:2 B:2 sent.1:0 send.1:2 "
        "sent.1:1 sent.1:2 update:-1"
    )


def test_receives_can_be_posted_further_ahead(pipeline):
    program = lower(pipeline(2, 3), 1, receive_ahead=2)
    assert text(program).startswith("receive.0:0 receive.0:1 receive.0:2 received.0:0 F:0")


def test_a_channel_within_a_rank_has_no_rows(pipeline):
    plan = pipeline(3, 2, schedule="gpipe", ranks=[0, 0, 1])
    channel = schedule.channels(plan).index
    local = [channel(item) for item in schedule.channels(plan) if item.is_local]
    used = {action.channel for rank in range(2) for action in lower(plan, rank).body}
    assert len(local) == 2
    assert used == {-1, 0, 1, 2, 3} - set(local)


def test_one_rank_only_computes(pipeline):
    program = lower(pipeline(2, 2, schedule="gpipe", ranks=[0, 0]), 0)
    assert text(program) == "F:0 F:0 F:1 F:1 B:0 B:0 B:1 B:1 update:-1"


def test_every_rank_updates_once_at_the_end(pipeline):
    plan = pipeline(3, 2, ranks=[0, 0, 2], node_of_rank=[0] * 4)
    last = [list(lower(plan, rank).body)[-1] for rank in range(4)]
    assert [(action.kind, action.stage) for action in last] == [
        (Kind.UPDATE, 0),
        (Kind.UPDATE, -1),
        (Kind.UPDATE, 2),
        (Kind.UPDATE, -1),
    ]
    assert len(lower(plan, 1).body) == 1


def test_a_backward_awaits_the_gradients_of_all_consumers(pipeline):
    uses_out_of_order = (2, 1)
    plan = pipeline(3, 1, skips=[(0, uses_out_of_order, True)])
    assert text(lower(plan, 0)).endswith(
        "received.3:0 received.4:0 sent.0:0 sent.1:0 B:0 update:-1"
    )


def test_evaluation_sends_forward_only():
    chain = [Channel(TransferKind.ACTIVATION, 0, 1, 0, 1, 8)]
    assert text(lower_evaluation(chain, [0], 0, 4)) == (
        "E:0 send.0:0 E:1 send.0:1 E:2 sent.0:0 send.0:2 E:3 sent.0:1 send.0:3 sent.0:2 sent.0:3"
    )
    assert text(lower_evaluation(chain, [1], 1, 2)) == (
        "receive.0:0 receive.0:1 received.0:0 E:0 received.0:1 E:1"
    )
    assert text(lower_evaluation(chain, [], 2, 2)) == ""


def test_program_hash_follows_what_the_programs_follow_from(pipeline):
    plan = pipeline(3, 6)
    other_route = Transfer(TransferKind.ACTIVATION, 0, 2, 8)
    changed = [
        dataclasses.replace(plan, warm_up=(5, 3, 1)),
        dataclasses.replace(plan, schedule="gpipe"),
        dataclasses.replace(plan, micro_batches=7),
        dataclasses.replace(plan, transfers=(*plan.transfers, other_route)),
        pipeline(3, 6, ranks=[0, 2, 1]),
    ]
    assert program_hash(dataclasses.replace(plan, name="same")) == program_hash(plan)
    assert len({program_hash(item) for item in [plan, *changed]}) == 1 + len(changed)
