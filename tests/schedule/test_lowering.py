"""Where lowering puts the messages, and what programs follow from.

That programs are right is proved in test_random_plans.py.
"""

import dataclasses

import pytest

from pipectl import schedule
from pipectl.cluster import OffloadTarget
from pipectl.lanes import TransferKind
from pipectl.plan import Replication, Segments, Transfer
from pipectl.schedule import (
    Channel,
    Kind,
    lower,
    lower_evaluation,
    lower_renewal,
    plan_of_trial,
    program_hash,
)

SHORT = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.EVALUATE: "E",
    Kind.UPDATE: "update",
    Kind.SEND_START: "send",
    Kind.SEND_WAIT: "sent",
    Kind.RECEIVE_START: "receive",
    Kind.RECEIVE_WAIT: "received",
    Kind.RECOMPUTE: "R",
    Kind.REDUCE_START: "reduce",
    Kind.REDUCE_WAIT: "reduced",
    Kind.OFFLOAD_START: "offload",
    Kind.OFFLOAD_WAIT: "offloaded",
    Kind.FETCH_START: "fetch",
    Kind.FETCH_WAIT: "fetched",
}


def text(program):
    """One word an action: what, the channel of a transfer after a dot, the micro-batch."""
    words = []
    for action in program:
        channel = "" if action.channel < 0 else f".{action.channel}"
        words.append(f"{SHORT[action.kind]}{channel}:{action.micro_batch}")
    return " ".join(words)


def first_stage(plan, **changes):
    """The plan with another first stage."""
    first, *others = plan.stages
    return dataclasses.replace(plan, stages=(dataclasses.replace(first, **changes), *others))


def test_transfers_of_one_kind_between_two_stages_are_one_channel(pipeline):
    plan = pipeline(3, 2, size_bytes=10, skips=[(0, (1,), False), (0, (2,), True)])
    activation, gradient = TransferKind.ACTIVATION, TransferKind.GRADIENT
    assert [dataclasses.astuple(channel)[:6] for channel in schedule.channels(plan)] == [
        (activation, 0, 1, 0, 1, 20),
        (activation, 0, 2, 0, 2, 10),
        (activation, 1, 2, 1, 2, 10),
        (gradient, 1, 0, 1, 0, 10),
        (gradient, 2, 0, 2, 0, 10),
        (gradient, 2, 1, 2, 1, 10),
    ]


@pytest.mark.parametrize(
    ("shape", "first", "programs"),
    [
        pytest.param(
            {"stages": 2, "micro_batches": 3},
            {},
            [
                "receive.1:0 F:0 send.0:0 F:1 send.0:1 "
                "receive.1:1 received.1:0 sent.0:0 B:0 "
                "F:2 send.0:2 "
                "receive.1:2 received.1:1 sent.0:1 B:1 "
                "received.1:2 sent.0:2 B:2 update:-1",
                "receive.0:0 receive.0:1 received.0:0 F:0 B:0 send.1:0 "
                "receive.0:2 received.0:1 F:1 B:1 send.1:1 "
                "received.0:2 F:2 B:2 sent.1:0 send.1:2 "
                "sent.1:1 sent.1:2 update:-1",
            ],
            id="two messages are on the way",
        ),
        pytest.param(
            {"stages": 2, "micro_batches": 2, "warm_up": (1, 1)},
            {"recompute": True},
            [
                "receive.1:0 F:0 send.0:0 receive.1:1 R:0 received.1:0 B:0 "
                "F:1 send.0:1 R:1 received.1:1 B:1 sent.0:0 sent.0:1 update:-1",
            ],
            id="a backward recomputes while its gradient is on the way",
        ),
        pytest.param(
            {"stages": 1, "micro_batches": 5, "warm_up": (3,)},
            {"offload": True},
            [
                "F:0 F:1 offload:1 F:2 offloaded:1 offload:2 B:0 offloaded:2 fetch:1 "
                "F:3 offload:3 fetched:1 B:1 offloaded:3 fetch:2 "
                "F:4 fetch:3 fetched:2 B:2 fetched:3 B:3 B:4 update:-1",
            ],
            id="copies are beside one computation each",
        ),
        pytest.param(
            {"stages": 1, "micro_batches": 3, "warm_up": (2,)},
            {"offload": True},
            ["F:0 F:1 B:0 F:2 B:1 B:2 update:-1"],
            id="nothing is offloaded for less than a computation",
        ),
        pytest.param(
            {"stages": 1, "micro_batches": 3, "node_of_rank": [0, 0]},
            {"ranks": (0, 1)},
            [
                "F:0 B:0 F:2 B:2 reduce:-1 reduced:-1 update:-1",
                "F:1 B:1 reduce:-1 reduced:-1 update:-1",
            ],
            id="replicas take turns and sum behind their last backward",
        ),
        pytest.param(
            {"stages": 1, "micro_batches": 3, "warm_up": (2,), "node_of_rank": [0, 0]},
            {"backward_ranks": (1,)},
            [
                "receive.1:-1 received.1:-1 F:0 send.0:0 F:1 sent.0:0 send.0:1 "
                "F:2 sent.0:1 send.0:2 sent.0:2 update:-1",
                "receive.0:0 receive.0:1 send.1:-1 received.0:0 B:0 "
                "receive.0:2 received.0:1 B:1 received.0:2 B:2 sent.1:-1 update:-1",
            ],
            id="saved values go to the rank of the backward, and weights come back",
        ),
    ],
)
def test_where_messages_copies_and_sums_are(pipeline, shape, first, programs):
    plan = first_stage(pipeline(**shape), **first)
    assert [text(lower(plan, rank)) for rank in range(len(programs))] == programs


def test_evaluation_sends_forward_only():
    chain = [Channel(TransferKind.ACTIVATION, 0, 1, 0, 1, 8)]
    assert text(lower_evaluation(chain, [0], 0, 4)) == (
        "E:0 send.0:0 E:1 send.0:1 E:2 sent.0:0 send.0:2 E:3 sent.0:1 send.0:3 sent.0:2 sent.0:3"
    )
    assert text(lower_evaluation(chain, [1], 1, 2)) == (
        "receive.0:0 receive.0:1 received.0:0 E:0 received.0:1 E:1"
    )


def test_program_hash_follows_what_the_programs_follow_from(pipeline):
    plan = pipeline(3, 6)
    other_route = Transfer(TransferKind.ACTIVATION, 0, 2, 8)
    changed = [
        dataclasses.replace(plan, warm_up=(5, 3, 1)),
        dataclasses.replace(plan, schedule="gpipe"),
        dataclasses.replace(plan, actions=("0F0,0B0",)),
        dataclasses.replace(plan, micro_batches=7),
        dataclasses.replace(plan, transfers=(*plan.transfers, other_route)),
        pipeline(3, 6, ranks=[0, 2, 1]),
        dataclasses.replace(plan, replication=Replication.SPLIT),
        first_stage(plan, recompute=True),
        first_stage(plan, recompute=True, segments=Segments(("n",), 1.0, 1.0, 1.0, 0, 0)),
        first_stage(plan, offload=True),
        dataclasses.replace(plan, offload_to=OffloadTarget.DISK),
        dataclasses.replace(plan, shard_optimizer=True),
        first_stage(plan, backward_ranks=(1,)),
        first_stage(plan, nodes=("another",)),
    ]
    assert program_hash(dataclasses.replace(plan, name="same")) == program_hash(plan)
    assert len({program_hash(item) for item in [plan, *changed]}) == 1 + len(changed)


def test_the_trial_of_a_plan_uses_every_channel(pipeline):
    plan = pipeline(2, 12, node_of_rank=[0] * 5, micro_batch_size=4)
    first, second = plan.stages
    stages = dataclasses.replace(first, ranks=(0, 1)), dataclasses.replace(second, ranks=(2, 3, 4))
    plan = dataclasses.replace(plan, stages=stages, replication=Replication.WHOLE)
    trial = plan_of_trial(plan, 2)
    assert (trial.micro_batches, trial.micro_batch_size, trial.batch_size) == (6, 2, 12)
    used = {a.channel for rank in range(5) for a in lower(trial, rank)} - {-1}
    assert used == set(range(len(schedule.channels(plan))))


def test_weights_return_between_steps_where_backwards_are_elsewhere(pipeline):
    """All messages are started before any is awaited."""
    plan = pipeline(2, 4)
    assert len(lower_renewal(plan, 0)) == 0
    stages = tuple(dataclasses.replace(s, backward_ranks=(1 - s.ranks[0],)) for s in plan.stages)
    plan = dataclasses.replace(plan, stages=stages)
    weights = [c for c, item in enumerate(schedule.channels(plan)) if item.kind == "weight"]
    assert weights == [4, 5]
    assert [text(lower_renewal(plan, rank)) for rank in range(2)] == [
        "receive.4:-1 send.5:-1 received.4:-1 sent.5:-1",
        "send.4:-1 receive.5:-1 sent.4:-1 received.5:-1",
    ]
