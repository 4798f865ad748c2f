"""Reading and writing ``plan.json``."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from pipectl.errors import DataFileError
from pipectl.plan import Blocks, Plan, Replication, Search, StagePeaks

NEW = ("replication", "backward_ranks", "recompute", "offload", "input_bytes", "blocks")


def without(document, keys):
    """A JSON value without some keys of its objects."""
    if isinstance(document, dict):
        return {key: without(item, keys) for key, item in document.items() if key not in keys}
    return [without(item, keys) for item in document] if isinstance(document, list) else document


def written(plan):
    return json.loads(json.dumps(plan.to_json()))


def test_every_field_is_read_as_it_was_written(pipeline):
    plan = pipeline(2, 4, node_of_rank=[0, 0, 1, 1])
    stage = replace(
        plan.stages[1],
        ranks=(1, 2),
        backward_ranks=(2, 3),
        recompute=True,
        offload=True,
        cost=replace(plan.stages[1].cost, input_bytes=7),
    )
    plan = replace(plan, stages=(plan.stages[0], stage), replication=Replication.SPLIT)
    assert Plan.from_json(written(plan)) == plan


def test_the_most_that_is_sent_at_once_is_a_message_or_a_sum_of_gradients(pipeline):
    plan = pipeline(2, 4, node_of_rank=[0, 0, 1])
    first, last = plan.stages
    message = replace(plan.transfers[0], size_bytes=50)
    assert replace(plan, transfers=()).most_sent_bytes == 0
    assert replace(plan, transfers=(message,)).most_sent_bytes == 50
    twice = replace(last, ranks=(1, 2), cost=replace(last.cost, parameter_bytes=70))
    assert replace(plan, stages=(first, twice), transfers=(message,)).most_sent_bytes == 70


def test_blocks_are_read_as_they_were_written(pipeline):
    plan = pipeline(1, 4)
    firsts = tuple(f"n{index}" for index in range(3))
    peaks = StagePeaks(1, 2, 3, 4)
    blocks = Blocks(firsts[1:], 1.0, 0.5, 2.5, 30, 10, peaks, 7)
    stage = replace(plan.stages[0], nodes=firsts, recompute=True, blocks=blocks)
    plan = replace(plan, stages=(stage,))
    assert Plan.from_json(written(plan)) == plan
    assert stage.kept_bytes == 30
    assert stage.running.saved_bytes == 40


@pytest.mark.parametrize(
    ("firsts", "more", "fault"),
    [
        (["b", "c"], {}, None),
        (["c", "b"], {}, r"stages\[0\].blocks: begin with \['c', 'b'\], not in the stage's order"),
        (["z"], {}, "not in the stage's order"),
        (["b"], {"recompute": False}, "blocks: of a stage that does not recompute where"),
        (["b"], {"backward_ranks": [1]}, "blocks: of a stage that does not recompute where"),
    ],
)
def test_faults_of_blocks_are_named(pipeline, firsts, more, fault):
    document = written(pipeline(2, 4))
    figures = {"forward_s": 1, "recompute_s": 1, "backward_s": 2, "kept_bytes": 1, "last_bytes": 1}
    blocks = {"firsts": firsts, **figures}
    document["stages"][0] |= {"nodes": ["a", "b", "c"], "recompute": True, "blocks": blocks, **more}
    with nullcontext() if fault is None else pytest.raises(DataFileError, match=fault):
        Plan.from_json(document)


def test_a_plan_without_the_newer_fields_is_one_without_what_they_say(pipeline):
    plan = pipeline(3, 4)
    assert Plan.from_json(without(written(plan), NEW)) == plan


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"ranks": [0, 9]}, r"stages\[1\].ranks: \[0, 9\] of 3 ranks"),
        ({"ranks": [1, 1]}, r"stages\[1\].ranks: \[1, 1\]"),
        ({"backward_ranks": [3]}, r"stages\[1\].backward_ranks: \[3\] of 3 ranks"),
        ({"backward_ranks": [0, 2]}, r"stages\[1\].backward_ranks: 2 for 1 replicas"),
        ({"recompute": "yes"}, r"stages\[1\].recompute: must be true or false"),
    ],
)
def test_faults_of_a_stage_are_named(pipeline, change, fault):
    document = written(pipeline(3, 4))
    document["stages"][1] |= change
    with pytest.raises(DataFileError, match=fault):
        Plan.from_json(document)


def test_a_bound_that_rounding_lifts_above_the_step_leaves_no_gap():
    search = Search("any", planning_s=0.0)
    assert search.bounded(3.0, 2.0).gap == 0.5
    assert search.bounded(0.3, 0.1 + 0.2).gap == 0.0
    assert search.bounded(3.0, 0.0).gap is None
