"""Reading and writing ``plan.json``."""

import json
import re
from dataclasses import replace

import pytest

from pipectl.errors import DataFileError
from pipectl.plan import Plan, Replication, Search, Segments, StagePeaks

NEW = ("replication", "backward_ranks", "recompute", "offload", "input_bytes", "blocks")


def without(document, keys):
    """A JSON value without some keys of its objects."""
    if isinstance(document, dict):
        return {key: without(item, keys) for key, item in document.items() if key not in keys}
    return [without(item, keys) for item in document] if isinstance(document, list) else document


def written(plan):
    return json.loads(json.dumps(plan.to_json()))


def test_every_field_is_read_as_it_was_written_and_older_files_have_fewer(pipeline):
    plan = pipeline(2, 4, node_of_rank=[0, 0, 1, 1])
    first, second = plan.stages
    segments = Segments(("b", "c"), 1.0, 0.5, 2.5, 30, 10, StagePeaks(1, 2, 3, 4), 7)
    first = replace(first, nodes=("a", "b", "c"), recompute=True, segments=segments)
    assert (first.kept_bytes, first.running.saved_bytes) == (30, 40)
    more = {"ranks": (1, 2), "backward_ranks": (2, 3), "recompute": True, "offload": True}
    second = replace(second, **more, cost=replace(second.cost, input_bytes=7))
    full = replace(plan, stages=(first, second), replication=Replication.SPLIT)
    assert Plan.from_json(written(full)) == full
    assert Plan.from_json(without(written(plan), NEW)) == plan


def test_the_most_that_is_sent_at_once_is_a_message_or_a_sum_of_gradients(pipeline):
    plan = pipeline(2, 4, node_of_rank=[0, 0, 1])
    first, last = plan.stages
    message = replace(plan.transfers[0], size_bytes=50)
    assert replace(plan, transfers=()).most_sent_bytes == 0
    assert replace(plan, transfers=(message,)).most_sent_bytes == 50
    twice = replace(last, ranks=(1, 2), cost=replace(last.cost, parameter_bytes=70))
    assert replace(plan, stages=(first, twice), transfers=(message,)).most_sent_bytes == 70


BLOCKS = {"forward_s": 1, "recompute_s": 1, "backward_s": 2, "kept_bytes": 1, "last_bytes": 1}
RECOMPUTED = {"nodes": ["a", "b", "c"], "recompute": True, "blocks": {"firsts": ["b"], **BLOCKS}}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"ranks": [0, 9]}, "ranks: [0, 9] of 3 ranks"),
        ({"ranks": [1, 1]}, "ranks: [1, 1]"),
        ({"backward_ranks": [3]}, "backward_ranks: [3] of 3 ranks"),
        ({"backward_ranks": [0, 2]}, "backward_ranks: 2 for 1 replicas"),
        ({"recompute": "yes"}, "recompute: must be true or false"),
        (
            {**RECOMPUTED, "blocks": {"firsts": ["c", "b"], **BLOCKS}},
            "blocks: begin with ['c', 'b'], not in the stage's order",
        ),
        (
            {**RECOMPUTED, "blocks": {"firsts": ["z"], **BLOCKS}},
            "blocks: begin with ['z'], not in the stage's order",
        ),
        ({**RECOMPUTED, "recompute": False}, "blocks: of a stage that does not recompute where"),
        ({**RECOMPUTED, "backward_ranks": [2]}, "blocks: of a stage that does not recompute where"),
    ],
)
def test_faults_of_a_stage_are_named(pipeline, change, fault):
    document = written(pipeline(3, 4))
    document["stages"][1] |= change
    with pytest.raises(DataFileError, match=re.escape(f"stages[1].{fault}")):
        Plan.from_json(document)


def test_a_bound_that_rounding_lifts_above_the_step_leaves_no_gap():
    search = Search("any", planning_s=0.0)
    assert search.bounded(3.0, 2.0).gap == 0.5
    assert search.bounded(0.3, 0.1 + 0.2).gap == 0.0
    assert search.bounded(3.0, 0.0).gap is None
