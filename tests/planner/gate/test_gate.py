"""Plans are at least as good as they were; run_gate.py plans all requests, this every eighth, those
with an open schedule and a large batch, and those that are cut again for their memory."""

import json

import pytest

from tests.planner.gate.gate_corpus import cases
from tests.planner.gate.run_gate import GOLDEN, MAX_RATIO, run

pytestmark = pytest.mark.slow

EVERY = cases()
MORE = (case for case in EVERY if case.name.startswith(("auto", "tight")))
SOME = {case.name: case for case in (*EVERY[::8], *MORE)}.values()


def test_every_request_has_its_golden_step():
    assert {case.name for case in EVERY} == set(json.loads(GOLDEN.read_text()))


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_a_plan_is_as_good_as_it_was(case):
    (result,) = run([case])
    assert result.ratio <= MAX_RATIO
