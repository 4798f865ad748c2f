"""Backwards on another rank give the same bits as on the rank of their forward."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pipectl.capture.slices import Rows
from pipectl.errors import MismatchError
from pipectl.runtime import pipefb
from pipectl.runtime.pipefb import Agreement, check_operators
from pipectl.runtime.stage import MicroBatch


def assert_equal(whole, apart):
    expected, found = whole.gradients(), apart.gradients()
    assert expected
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    buffers = apart.buffers()
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in whole.buffers().items())


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("model", ["attention", "normed", "patched", "tied", "own_function"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_and_buffers_are_those_of_whole_stages(steps, model, stages, recompute):
    assert_equal(*steps(model, stages, recompute=recompute))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("versions", [False, True])
def test_gradients_that_left_a_stage_stay_as_they_are(steps, recompute, versions):
    """Autograd would add to them in the next backward: a parameter's gradient is a view of them."""
    for step in steps("placed", 3, recompute=recompute, versions=versions):
        assert len(step.returned) == 4
        assert all(torch.equal(left, copy) for left, copy in step.returned)


@pytest.mark.parametrize("model", ["attention", "normed_after_linear"])
def test_half_precision_too(steps, model):
    """Norms keep statistics in float32 if their values are in bfloat16 and their weights not."""
    assert_equal(*steps(model, 2, "bf16"))


def test_each_memory_travels_once_and_weights_do_not(steps):
    _, apart = steps("attention")
    agreed = apart.forwards[0]._agreed[Rows.of(2)]
    states = [view for view in agreed.views if view.number < 0]
    assert len(agreed.sizes) < len(agreed.views) - len(states)
    code = apart.forwards[0].segments[0].codes[Rows.of(2)].stage
    assert {~view.number for view in states} >= {
        index for index, slot in enumerate(code.states)
        if "out_weight" in slot.value or "qkv_weight" in slot.value
    }  # fmt: skip


def test_recomputation_sends_what_a_forward_starts_from(steps):
    _, kept = steps("attention", 3)
    _, again = steps("attention", 3, recompute=True)
    assert bytes_of(again) < bytes_of(kept) / 2


def test_nothing_of_a_forward_outlives_its_message(steps, monkeypatch):
    monkeypatch.setattr(pipefb, "BUNDLED_BYTES", 0)  # small tensors would be copied
    _, apart = steps("attention")
    (front,) = apart.forwards
    first, *others = front.inputs(True, Rows.of(2))
    inputs = {first: torch.zeros(2, 6, 24), **{name: torch.zeros(2) for name in others}}
    front.forward(MicroBatch(0, Rows.of(2), 7), inputs, {})
    message = front.leaving(0)
    sent = [StorageWeakRef(t.untyped_storage()) for t in message.values() if t is not None]
    inputs.clear()
    assert sent
    assert not any(memory.expired() for memory in sent)
    message.clear()
    assert all(memory.expired() for memory in sent)


def bytes_of(step):
    return sum(t.nbytes for message in step.messages for t in message.values() if t is not None)


def test_a_function_that_hides_a_tensor_is_refused(steps):
    with pytest.raises(MismatchError, match=r"stages\[0\].*keeps more than numbers"):
        steps("hidden_function")


def test_code_that_no_graph_holds_is_refused(capture):
    from pipectl.capture import Cut

    graph = capture("around_numpy").training_graph(2)
    cut = Cut(graph, {node.name: 0 for node in graph.operators}, training=True)
    with pytest.raises(MismatchError, match=r"stages\[0\].*inside \(Numpy\) runs code of its own"):
        check_operators(cut, 0)


def test_a_forward_that_makes_another_graph_is_told(steps, monkeypatch):
    check = Agreement.check

    def other(self, stage, graph):
        graph.saved[3] = (torch.float64, (1,))
        check(self, stage, graph)

    monkeypatch.setattr(Agreement, "check", other)
    with pytest.raises(MismatchError, match=r"saved tensor 3 is .* instead of"):
        steps("attention")
