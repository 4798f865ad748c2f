"""Where lowering puts the messages."""

import dataclasses

from pipectl import schedule
from pipectl.cluster import OffloadTarget
from pipectl.graph import TransferKind
from pipectl.plan import Blocks, Replication, Transfer
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
        samples = "" if action.start < 0 else f"[{action.start},{action.stop})"
        words.append(f"{SHORT[action.kind]}{channel}:{action.micro_batch}{samples}")
    return " ".join(words)


def first_stage(plan, **changes):
    """The plan with another first stage."""
    first, *others = plan.stages
    return dataclasses.replace(plan, stages=(dataclasses.replace(first, **changes), *others))


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


def test_a_backward_recomputes_while_its_gradient_is_on_the_way(pipeline):
    plan = first_stage(pipeline(2, 2, warm_up=(1, 1)), recompute=True)
    assert text(lower(plan, 0)) == (
        "receive.1:0 F:0 send.0:0 receive.1:1 R:0 received.1:0 B:0 "
        "F:1 send.0:1 R:1 received.1:1 B:1 sent.0:0 sent.0:1 update:-1"
    )


def test_what_waits_long_is_offloaded_beside_one_computation_and_fetched_beside_one(pipeline):
    plan = first_stage(pipeline(1, 5, warm_up=(3,)), offload=True)
    assert text(lower(plan, 0)) == (
        "F:0 F:1 offload:1 F:2 offloaded:1 offload:2 B:0 offloaded:2 fetch:1 F:3 offload:3 "
        "fetched:1 B:1 offloaded:3 fetch:2 F:4 fetch:3 fetched:2 B:2 fetched:3 B:3 B:4 update:-1"
    )


def test_nothing_is_offloaded_for_less_than_a_computation(pipeline):
    plan = first_stage(pipeline(1, 5, warm_up=(2,)), offload=True)
    assert lower(plan, 0) == lower(pipeline(1, 5, warm_up=(2,)), 0)


def test_replicas_take_turns_and_sum_behind_their_last_backward(pipeline):
    plan = first_stage(pipeline(1, 3, node_of_rank=[0, 0]), ranks=(0, 1))
    assert text(lower(plan, 0)) == "F:0 B:0 F:2 B:2 reduce:-1 reduced:-1 update:-1"
    assert text(lower(plan, 1)) == "F:1 B:1 reduce:-1 reduced:-1 update:-1"
    assert text(lower(plan, 1, 1)) == "reduce:-1 reduced:-1 update:-1"


def test_unequal_replicas_have_channels_where_they_share_a_micro_batch(pipeline):
    plan = pipeline(2, 6, node_of_rank=[0] * 5, size_bytes=6)
    counts = ((0, 1), (2, 3, 4))
    stages = [
        dataclasses.replace(stage, ranks=ranks)
        for stage, ranks in zip(plan.stages, counts, strict=True)
    ]
    plan = dataclasses.replace(plan, stages=tuple(stages))
    forward = [c for c in schedule.channels(plan) if c.kind is TransferKind.ACTIVATION]
    ends = [(c.source_rank, c.target_rank) for c in forward]
    carried = [schedule.messages(plan, c, 6).micro_batches.tolist() for c in forward]
    assert ends == [(0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4)]
    assert carried == [[0], [4], [2], [3], [1], [5]]


def test_samples_of_a_micro_batch_go_to_the_replicas_that_take_them(pipeline):
    plan = first_stage(pipeline(2, 1, node_of_rank=[0] * 3, micro_batch_size=4), ranks=(0, 2))
    plan = dataclasses.replace(plan, replication=Replication.SPLIT)
    assert text(lower(plan, 2)) == (
        "receive.3:0[2,4) F:0[2,4) send.1:0[2,4) received.3:0[2,4) sent.1:0[2,4) B:0[2,4) "
        "reduce:-1 reduced:-1 update:-1"
    )
    assert text(lower(plan, 1)) == (
        "receive.0:0[0,2) receive.1:0[2,4) received.0:0[0,2) received.1:0[2,4) F:0 B:0 "
        "send.2:0[0,2) send.3:0[2,4) sent.2:0[0,2) sent.3:0[2,4) update:-1"
    )


def test_saved_values_go_to_the_rank_of_the_backward_and_weights_come_back(pipeline):
    plan = pipeline(1, 3, warm_up=[2], node_of_rank=[0, 0])
    plan = first_stage(plan, backward_ranks=(1,))
    assert text(lower(plan, 0)) == (
        "receive.1:-1 received.1:-1 F:0 send.0:0 F:1 sent.0:0 send.0:1 F:2 sent.0:1 send.0:2 "
        "sent.0:2 update:-1"
    )
    assert text(lower(plan, 1)) == (
        "receive.0:0 receive.0:1 send.1:-1 received.0:0 B:0 receive.0:2 received.0:1 B:1 "
        "received.0:2 B:2 sent.1:-1 update:-1"
    )


def test_what_a_backward_elsewhere_gets_early_is_offloaded_there(pipeline):
    plan = pipeline(2, 7, warm_up=(6, 1), node_of_rank=[0, 0, 0])
    plan = first_stage(plan, backward_ranks=(2,), offload=True)
    assert Kind.OFFLOAD_START not in lower(plan, 0).column("kind")
    assert text(lower(plan, 2)) == (
        "receive.1:0 receive.1:1 receive.2:0 send.3:-1 receive.2:1 receive.2:2 receive.2:3 "
        "receive.2:4 received.2:3 offload:3 receive.2:5 received.2:4 offload:4 offloaded:3 "
        "offloaded:4 received.2:0 received.1:0 B:0 received.2:5 offload:5 receive.1:2 receive.2:6 "
        "received.2:1 received.1:1 B:1 offloaded:5 received.2:6 offload:6 receive.1:3 fetch:3 "
        "received.2:2 received.1:2 B:2 offloaded:6 receive.1:4 fetch:4 fetched:3 received.1:3 B:3 "
        "receive.1:5 fetch:5 fetched:4 received.1:4 B:4 receive.1:6 fetch:6 fetched:5 "
        "received.1:5 B:5 fetched:6 received.1:6 B:6 sent.3:-1 update:-1"
    )


def test_program_hash_follows_what_the_programs_follow_from(pipeline):
    plan = pipeline(3, 6)
    other_route = Transfer(TransferKind.ACTIVATION, 0, 2, 8)
    changed = [
        dataclasses.replace(plan, warm_up=(5, 3, 1)),
        dataclasses.replace(plan, schedule="gpipe"),
        dataclasses.replace(plan, micro_batches=7),
        dataclasses.replace(plan, transfers=(*plan.transfers, other_route)),
        pipeline(3, 6, ranks=[0, 2, 1]),
        dataclasses.replace(plan, replication=Replication.SPLIT),
        first_stage(plan, recompute=True),
        first_stage(plan, recompute=True, blocks=Blocks(("n",), 1.0, 1.0, 1.0, 0, 0)),
        first_stage(plan, offload=True),
        dataclasses.replace(plan, offload_to=OffloadTarget.DISK),
        dataclasses.replace(plan, shard_optimizer=True),
        first_stage(plan, backward_ranks=(1,)),
        first_stage(plan, nodes=("another",)),
    ]
    assert program_hash(dataclasses.replace(plan, name="same")) == program_hash(plan)
    assert len({program_hash(item) for item in [plan, *changed]}) == 1 + len(changed)


def test_the_trial_of_a_plan_uses_every_channel(pipeline):
    plan = pipeline(2, 12, ranks=[0, 2], node_of_rank=[0] * 5, micro_batch_size=4)
    held = [{"ranks": (0, 1)}, {"ranks": (2, 3, 4)}]
    stages = tuple(dataclasses.replace(s, **h) for s, h in zip(plan.stages, held, strict=True))
    plan = dataclasses.replace(plan, stages=stages, replication=Replication.WHOLE)
    trial = plan_of_trial(plan, 2)
    assert (trial.micro_batches, trial.micro_batch_size, trial.batch_size) == (6, 2, 12)
    used = {a.channel for rank in range(5) for a in lower(trial, rank)} - {-1}
    assert used == set(range(len(schedule.channels(plan))))


def test_weights_return_between_steps_where_backwards_are_elsewhere(pipeline):
    """All messages are started before any is awaited."""
    assert len(lower_renewal(pipeline(2, 4), 0)) == 0
    plan = pipeline(2, 4)
    stages = tuple(dataclasses.replace(s, backward_ranks=(1 - s.ranks[0],)) for s in plan.stages)
    plan = dataclasses.replace(plan, stages=stages)
    weights = [c for c, item in enumerate(schedule.channels(plan)) if item.kind == "weight"]
    one, other = weights
    assert text(lower_renewal(plan, 0)) == (
        f"receive.{one}:-1 send.{other}:-1 received.{one}:-1 sent.{other}:-1"
    )
    assert text(lower_renewal(plan, 1)) == (
        f"send.{one}:-1 receive.{other}:-1 sent.{one}:-1 received.{other}:-1"
    )
