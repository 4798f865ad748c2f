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


def test_one_stage_sends_nothing(graph_of) -> None:
    cut = Cut(graph_of("mlp"), stages(graph_of("mlp")), training=True)
    assert cut.lanes == {}
    assert cut.loss_stage == 0


def test_a_chain_sends_one_value_on_and_its_gradient_back(graph_of) -> None:
    cut = Cut(graph_of("mlp"), stages(graph_of("mlp"), "linear_1"), training=True)
    assert cut.lanes == {
        Lane(ACTIVATION, 0, 1): [Slot("relu")],
        Lane(GRADIENT, 1, 0): [Slot("relu")],
    }
    assert cut.received(1) == [Slot("relu")]
    assert cut.forked(0) == []


def test_evaluation_sends_no_gradient(job_of) -> None:
    graph = job_of("mlp").evaluation_graph(4)
    cut = Cut(graph, stages(graph, "linear_1"), training=False)
    assert list(cut.lanes) == [Lane(ACTIVATION, 0, 1)]


def test_the_gradient_of_a_skip_is_chained_through_its_consumers(graph_of) -> None:
    """relu_ is made in stage 0 and used in 1 and 2: 2 hands its gradient to 1, 1 to 0."""
    graph = graph_of("Skip")
    cut = Cut(graph, stages(graph, "linear_1", "linear_2"), training=True)
    skipped = Slot("tanh")
    assert skipped in cut.lanes[Lane(ACTIVATION, 0, 1)]
    assert skipped in cut.lanes[Lane(ACTIVATION, 0, 2)]
    assert skipped in cut.lanes[Lane(GRADIENT, 2, 1)]
    assert skipped in cut.lanes[Lane(GRADIENT, 1, 0)]
    assert Lane(GRADIENT, 2, 0) not in cut.lanes
    assert cut.split_uses == set()


def test_gradients_return_use_by_use_where_uses_are_not_in_stage_order(graph_of) -> None:
    """tanh is used by linear_1 (in stage 2 here), then by linear_2 (in stage 1)."""
    graph = graph_of("TwoHeads")
    stage_of = {
        "linear": 0, "tanh": 0, "linear_1": 2, "linear_2": 1, "sigmoid": 1, "add": 2,
        "cross_entropy_loss": 2,
    }  # fmt: skip
    cut = Cut(graph, stage_of, training=True)
    assert cut.split_uses == {"tanh"}
    assert cut.forked(0) == ["tanh"]
    assert cut.lanes[Lane(ACTIVATION, 0, 2)] == [Slot("tanh")]
    assert cut.lanes[Lane(GRADIENT, 2, 0)] == [Slot("tanh", "linear_1")]
    assert cut.lanes[Lane(GRADIENT, 1, 0)] == [Slot("tanh", "linear_2")]
    assert cut.received(2) == [Slot("tanh", "linear_1"), Slot("sigmoid")]


def test_a_value_is_sent_once_however_often_a_stage_uses_it(graph_of) -> None:
    graph = graph_of("TwoHeads")
    cut = Cut(graph, stages(graph, "linear_1"), training=True)
    assert cut.lanes[Lane(ACTIVATION, 0, 1)] == [Slot("tanh")]


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


def test_evaluation_goes_where_the_parameters_are(job_of) -> None:
    job = job_of("SharedNorm")
    training, graph = job.training_graph(4), job.evaluation_graph(4)
    plan = stages(training, "linear_2")
    found = evaluation_stages(graph, training, plan)
    assert {name for name, stage in found.items() if stage == 1} == {
        "linear_2",
        "cross_entropy_loss",
    }


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


@pytest.mark.parametrize("name", ["gpt", "tied", "cnn", "dense"])
def test_evaluation_can_follow_every_cut_of_training(real_job, name: str) -> None:
    job = real_job(name)
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
            if placeholder in training.states:
                state = training.states[placeholder].name
                holders[state] = {plan[user] for user in users}
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
