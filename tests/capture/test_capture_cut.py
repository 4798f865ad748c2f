"""What crosses a cut, by which way gradients return, and which cuts are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipectl.capture import Cut, Lane, Slot, evaluation_stages
from pipectl.errors import CaptureError, MismatchError
from pipectl.graph import TransferKind

MODELS = Path(__file__).with_name("models.py")
ACTIVATION, GRADIENT = TransferKind.ACTIVATION, TransferKind.GRADIENT


def stages(graph, *starts: str) -> dict[str, int]:
    """Stage 0 up to the first named operator, 1 from there to the next, and so on."""
    found, stage = {}, 0
    for node in graph.operators:
        stage += node.name in starts
        found[node.name] = stage
    return found


@pytest.mark.parametrize(
    ("model", "stage_of", "lanes"),
    [
        ("mlp", (), {}),
        ("mlp", ("linear_1",), {(ACTIVATION, 0, 1): ["relu"], (GRADIENT, 1, 0): ["relu"]}),
        (
            "Skip",  # stage 2 hands the gradient of tanh to 1, and 1 to 0
            ("linear_1", "linear_2"),
            {
                (ACTIVATION, 0, 1): ["tanh"],
                (ACTIVATION, 0, 2): ["tanh"],
                (ACTIVATION, 1, 2): ["linear_1"],
                (GRADIENT, 2, 1): ["tanh", "linear_1"],
                (GRADIENT, 1, 0): ["tanh"],
            },
        ),
        ("TwoHeads", ("linear_1",), {(ACTIVATION, 0, 1): ["tanh"], (GRADIENT, 1, 0): ["tanh"]}),
    ],
    ids=["one stage", "chain", "skip", "several uses"],
)
@pytest.mark.parametrize("training", [True, False])
def test_values_are_sent_once_and_gradients_from_the_last_use_to_the_first(
    graph_of, model: str, stage_of, lanes, training: bool
) -> None:
    cut = Cut(graph_of(model), stages(graph_of(model), *stage_of), training)
    assert cut.lanes == {
        Lane(*lane): list(map(Slot, values))
        for lane, values in lanes.items()
        if training or lane[0] is ACTIVATION
    }
    assert cut.split_uses == set()


def test_gradients_return_use_by_use_where_uses_are_not_in_stage_order(graph_of) -> None:
    """tanh is used by linear_1 (in stage 2 here), then by linear_2 (in stage 1)."""
    graph = graph_of("TwoHeads")
    late = {"linear_1": 2, "linear_2": 1, "sigmoid": 1, "add": 2, "cross_entropy_loss": 2}
    cut = Cut(graph, {"linear": 0, "tanh": 0, **late}, training=True)
    assert (cut.split_uses, cut.forked(0)) == ({"tanh"}, ["tanh"])
    assert cut.lanes[Lane(ACTIVATION, 0, 2)] == [Slot("tanh")]
    assert cut.lanes[Lane(GRADIENT, 2, 0)] == [Slot("tanh", "linear_1")]
    assert cut.lanes[Lane(GRADIENT, 1, 0)] == [Slot("tanh", "linear_2")]
    assert cut.received(2) == [Slot("tanh", "linear_1"), Slot("sigmoid")]


@pytest.mark.parametrize(
    ("model", "stage_of", "message"),
    [
        ("mlp", {"linear": 0, "linear_1": 0}, "has no stage for operator 'relu'"),
        (
            "mlp",
            {"linear": 0, "relu": 1, "linear_1": 0, "cross_entropy_loss": 1},
            "'linear_1' (stage 0) reads 'relu', which a later stage (1) computes",
        ),
        ("Inplace", "relu_", "'relu_' shares memory with 'linear' but is in another stage"),
    ],
    ids=["without a stage", "not convex", "through a group"],
)
def test_a_plan_that_is_no_cut_is_refused(graph_of, model: str, stage_of, message: str) -> None:
    graph = graph_of(model)
    stage_of = stages(graph, stage_of) if isinstance(stage_of, str) else stage_of
    with pytest.raises(MismatchError) as raised:
        Cut(graph, stage_of, training=True)
    assert raised.value.message == f"plan: {message}"


def test_outputs_travel_to_the_loss_of_an_evaluation_which_waits_for_them(make_job) -> None:
    evaluation = {"data": f"{MODELS}:Vectors", "metrics": {"m": "builtins:max"}}
    job = make_job("WithEmbedding", loss="loss_of_y", evaluation=evaluation)
    training, graph = job.training_graph(4), job.evaluation_graph(4)
    found = evaluation_stages(graph, training, stages(training, "linear_2"))
    cut = Cut(graph, found, training=False)
    assert (found["linear_1"], found["linear_2"], cut.loss_stage) == (0, 1, 1)
    assert cut.result_names == {graph.loss, *graph.outputs}
    assert list(cut.lanes) == [Lane(ACTIVATION, 0, 1)]
    assert Slot("linear_1") not in cut.received(0)


@pytest.mark.parametrize("name", ["gpt", "tied", "cnn", "dense", "Inplace"])
def test_evaluation_can_follow_every_cut_of_training(job_of, name: str) -> None:
    job = job_of(name)
    training, graph = job.training_graph(4), job.evaluation_graph(4)
    for operator in training.operators[1:]:
        plan = stages(training, operator.name)
        try:
            Cut(training, plan, training=True)
        except MismatchError:
            continue
        found = evaluation_stages(graph, training, plan)
        cut = Cut(graph, found, training=False)
        holders: dict[str, set[int]] = {}
        for placeholder, users in training.users.items():
            state = training.states.get(placeholder)
            if state is not None and state.kind != "constant":
                holders[state.name] = {plan[user] for user in users}
        for placeholder, state in graph.states.items():
            for user in graph.users.get(placeholder, ()):
                assert found[user] in holders.get(state.name, {found[user]})
        assert cut.loss_stage == max(found.values())


def test_evaluation_in_another_order_of_layers_is_refused(make_job) -> None:
    job = make_job("Reordered")
    training, graph = job.training_graph(4), job.evaluation_graph(4)
    with pytest.raises(CaptureError) as raised:
        evaluation_stages(graph, training, stages(training, "linear_1"))
    assert raised.value.message == (
        "model: in evaluation 'linear_1' needs 'model.a.weight' after its stage"
    )
