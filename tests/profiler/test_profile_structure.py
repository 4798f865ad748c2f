"""What a profile says of a graph: operators, edges, groups, parameters and bytes, by hand."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pipectl.capture import CapturedJob
from pipectl.errors import CaptureError
from pipectl.profile import Profile
from pipectl.profiler import measured_sizes, profile_job
from pipectl.profiler.effort import Effort
from pipectl.spec import profile_key

MODELS = Path(__file__).with_name("models.py")
CAPTURED = Path(__file__).parents[1] / "capture" / "models.py"
CORPUS = Path(__file__).parents[1] / "corpus" / "own.py"
BATCH, SLOW_S = 4, 0.02


@pytest.fixture(scope="module")
def counted(spec_of: Any) -> Profile:
    return profile_job(spec_of("Counted"))


def test_one_operator_per_node_of_the_graph(counted: Profile, spec_of: Any) -> None:
    graph = CapturedJob(spec_of("Counted")).training_graph(BATCH)
    assert [operator.id for operator in counted.operators] == [n.name for n in graph.operators]
    assert counted.edges == graph.edges
    assert counted.fingerprint == graph.fingerprint
    assert {o.id: o.signature for o in counted.operators} == graph.signatures
    assert {o.id: o.group for o in counted.operators if o.group} == graph.groups
    assert counted.micro_batch_size == BATCH


def test_names_parameters_bytes_and_operations_are_those_counted_by_hand(counted: Profile) -> None:
    """A product of matrices: 2 operations for each of its factors; backward two such products."""
    wide, narrow, scores = BATCH * 10 * 4, BATCH * 5 * 4, BATCH * 3 * 4
    first, last = 2 * BATCH * 6 * 10, 2 * BATCH * 5 * 3
    a, norm, b = (
        ((f"model.{name}.weight", weights * 4), (f"model.{name}.bias", biases * 4))
        for name, weights, biases in (("a", 60, 10), ("norm", 10, 10), ("b", 15, 3))
    )
    found = {o.id: (o.name, o.output_bytes, o.parameters, o.flops) for o in counted.operators}
    assert found == {
        "linear": ("a.linear", wide, a, 2 * first),  # its input has no gradient
        "relu_": ("relu_", wide, (), 0),
        "layer_norm": ("norm.layer_norm", wide, norm, 0),
        "dropout": ("drop.dropout", wide, (), 0),
        "view": ("view", wide, (), 0),
        "slice_1": ("slice_1", wide, (), 0),
        "select": ("select", narrow, (), 0),
        "linear_1": ("b.linear_1", scores, b, 3 * last),
        "cross_entropy_loss": ("loss.cross_entropy_loss", 4, (), 0),
    }
    for operator in counted.operators:
        assert operator.gradient_bytes == operator.output_bytes
        assert operator.parameter_bytes == sum(size for _, size in operator.parameters)


def test_times_are_positive(counted: Profile) -> None:
    """On a busy machine a small backward may take no longer than its hook, which is subtracted."""
    assert all(operator.forward_s >= 0 for operator in counted.operators)
    assert sum(operator.backward_s for operator in counted.operators) > 0


def test_operators_keep_each_storage_once_under_the_name_of_what_made_it(counted: Profile) -> None:
    saved = {operator.id: dict(operator.saved) for operator in counted.operators}
    wide = BATCH * 10 * 4
    assert list(saved["linear"].values()) == [BATCH * 6 * 4]  # its input, but no parameter
    assert saved["relu_"] == {"linear": wide}  # in place: the memory that it wrote
    assert saved["layer_norm"].pop("linear") == wide  # and the memory that relu_ keeps
    assert list(saved["layer_norm"].values()) == [BATCH * 4] * 2  # mean and deviation of each row
    ((mask, size),) = saved["dropout"].items()
    assert mask.startswith("dropout")
    assert size in (BATCH * 10, wide)  # one byte per element, or scaled float32
    assert saved["view"] == saved["select"] == {}
    assert saved["linear_1"] == {"dropout": wide}  # the whole storage that its view is in


@pytest.mark.parametrize(
    ("model", "operator", "saved"),
    [
        ("Filled", "tanh", (("tanh", BATCH * 6 * 4),)),  # needs a gradient since it was written
        ("WritesASlice", "linear", (("add", BATCH * 6 * 4),)),  # else its indices are none
    ],
)
def test_values_that_are_written_through_a_view_are_found_by_later_readers(
    spec_of: Any, model: str, operator: str, saved: Any
) -> None:
    profile = profile_job(spec_of(f"{CAPTURED}:{model}"), effort=Effort.FAST)
    assert profile.by_id[operator].saved == saved


def test_every_run_finds_the_batch_as_it_was(spec_of: Any) -> None:
    """This loss counts classes down to 0; in a second round they would be negative."""
    spec = spec_of(data="FromOne", loss="counted_from_one")
    assert profile_job(spec).operators


def test_integers_have_no_gradient_and_tied_parameters_one_name(spec_of: Any) -> None:
    by_id = profile_job(spec_of("Embedded", data="Tokens")).by_id
    for name in ("add", "remainder"):
        figures = by_id[name].output_bytes, by_id[name].gradient_bytes, by_id[name].backward_s
        assert figures == (BATCH * 5 * 8, 0, 0.0)
    assert by_id["embedding"].gradient_bytes > 0
    tied = (("model.tokens.weight", 8 * 4 * 4),)
    assert by_id["embedding"].parameters == by_id["linear"].parameters == tied


def test_an_optimizer_keeps_its_state_per_parameter(counted: Profile, spec_of: Any) -> None:
    """Adam two more values, and a step counter per tensor; SGD nothing."""
    sgd = {"factory": f"{MODELS}:NeedsGradients", "kwargs": {"lr": 0.1}}
    plain = profile_job(spec_of("Normed", optimizer=sgd)).optimizer
    tensors, parameter_bytes = 6, sum(operator.parameter_bytes for operator in counted.operators)
    expected = 2 + 4 * tensors / parameter_bytes
    assert counted.optimizer is not None
    assert plain is not None
    assert counted.optimizer.state_bytes_per_parameter_byte == pytest.approx(expected)
    assert counted.optimizer.step_s_per_byte > 0
    assert plain.state_bytes_per_parameter_byte == 0
    assert plain.step_s_per_byte > 0


def test_a_profile_survives_its_file_and_knows_what_it_was_made_from(
    counted: Profile, spec_of: Any, tmp_path: Path
) -> None:
    counted.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == counted
    assert counted.key == profile_key(spec_of("Counted"))
    assert counted.process_baseline_bytes is not None
    assert 50 << 20 < counted.process_baseline_bytes < 20 << 30


def test_progress_rises_to_the_total(spec_of: Any) -> None:
    told: list[tuple[int, int, str]] = []
    profile = profile_job(spec_of("Normed", pipeline={}), lambda *step: told.append(step))
    phases = [what for _, whole, what in told if not whole]
    assert (phases[0], phases[-1]) == ("capturing the model", "measuring")
    seen = told[len(phases) :]
    done = [done for done, _, _ in seen]
    (whole,) = {whole for _, whole, _ in seen}
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] == whole
    assert {operator.id for operator in profile.operators} < {name for _, _, name in seen}


def test_other_sizes_are_measured_where_the_planner_may_choose(spec_of: Any) -> None:
    chosen = {"pipeline": {"stages": 2}, "resources": {"tasks_per_node": 2}}
    spec = spec_of("Normed", training={"steps": 1, "batch_size": 16}, **chosen)
    profile = profile_job(spec, effort=Effort.FAST)
    assert profile.micro_batch_size == 4
    assert all(set(operator.timings) == {1} for operator in profile.operators)


@pytest.mark.parametrize(
    ("batch_size", "pipeline", "effort", "sizes"),
    [
        (24, {"stages": 2}, Effort.FAST, (6, 1)),
        (24, {"stages": 2}, Effort.NORMAL, (6, 1, 3, 12, 24)),
        (7, {"micro_batches": 3}, Effort.NORMAL, (3,)),
    ],
)
def test_sizes_reach_from_single_samples_to_the_batch_unless_the_spec_says_one(
    batch_size: int, pipeline: Any, effort: Effort, sizes: tuple[int, ...], spec_of: Any
) -> None:
    training = {"steps": 1, "batch_size": batch_size}
    spec = spec_of(training=training, pipeline=pipeline, resources={"tasks_per_node": 2})
    assert measured_sizes(spec, effort) == sizes


def test_values_in_mixed_precision_take_half_the_bytes(counted: Profile, spec_of: Any) -> None:
    training = {"steps": 1, "batch_size": 8, "precision": "bf16"}
    mixed = profile_job(spec_of("Counted", training=training))
    pairs = zip(counted.operators, mixed.operators, strict=True)
    ratios = {one.id: other.output_bytes / one.output_bytes for one, other in pairs}
    assert ratios["linear"] == 0.5
    assert ratios["cross_entropy_loss"] == 1
    assert mixed.operators[0].parameter_bytes == counted.operators[0].parameter_bytes


def test_a_group_that_matches_nothing_is_found_while_profiling(spec_of: Any) -> None:
    spec = spec_of("Counted", optimizer={"groups": [{"match": "nothing*", "lr": 1.0}]})
    with pytest.raises(CaptureError, match="'nothing\\*' matches no parameter"):
        profile_job(spec)


def test_the_operators_that_read_the_data_first_contain_the_time_to_load_it(spec_of: Any) -> None:
    profile = profile_job(spec_of(data="SlowVectors"), effort=Effort.FAST)
    assert profile.loading_s >= BATCH * SLOW_S
    by_id = profile.by_id
    assert by_id["linear"].forward_s >= profile.loading_s
    assert by_id["cross_entropy_loss"].forward_s >= profile.loading_s
    assert by_id["linear_1"].forward_s < profile.loading_s


def test_data_that_other_processes_load_take_a_rank_no_time(spec_of: Any) -> None:
    data = {"factory": f"{MODELS}:SlowVectors", "workers": 1}
    assert profile_job(spec_of(data=data), effort=Effort.FAST).loading_s == 0


def test_an_operator_without_a_kernel_for_float16_is_named(spec_of: Any) -> None:
    training = {"steps": 1, "batch_size": 2, "precision": "float16"}
    spec = spec_of(f"{CORPUS}:Lstm", data=f"{CORPUS}:Sequences", training=training)
    with pytest.raises(CaptureError, match="model: lstm cannot run in float16 on cpu") as raised:
        profile_job(spec)
    assert "bf16" in (raised.value.cure or "")


def test_a_batch_larger_than_the_data_is_an_assumption(spec_of: Any) -> None:
    training = {"steps": 1, "batch_size": 32}
    profile = profile_job(spec_of(training=training), effort=Effort.FAST)
    (said,) = [text for text in profile.assumptions if text.startswith("the data have")]
    assert "20 samples" in said
    assert "is for 32" in said


def test_the_peak_of_the_capture_includes_the_whole_model(spec_of: Any) -> None:
    profile = profile_job(spec_of("Large"), effort=Effort.FAST)
    assert profile.process_baseline_bytes is not None
    assert profile.capture_bytes > profile.process_baseline_bytes + 2**25


def test_a_size_that_the_model_refuses_is_left_out(spec_of: Any) -> None:
    profile = profile_job(spec_of("AtMostFour", pipeline={}))
    measured = {profile.micro_batch_size, *profile.operators[0].timings}
    assert max(measured) <= 4 < 8
    (said,) = [text for text in profile.assumptions if "were not measured" in text]
    assert said.startswith("micro-batches of 8 were not measured: ")


@pytest.mark.parametrize(
    ("factory", "fault"),
    [
        ("torch.optim:LBFGS", r"^optimizer: LBFGS\.step\(\) needs a closure"),
        (f"{MODELS}:KeepsSets", "/seen is a set, which a checkpoint cannot hold"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_named_before_anything_is_measured(
    spec_of: Any, factory: str, fault: str
) -> None:
    spec = spec_of(optimizer={"factory": factory})
    totals: list[int] = []
    with pytest.raises(CaptureError, match=fault):
        profile_job(spec, lambda _, total, *__: totals.append(total))
    assert set(totals) == {0}


def test_no_time_is_negative_if_the_clock_of_loading_goes_back(
    spec_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipectl.profiler.bench.loading_clock", count(0, -1).__next__)
    profile = profile_job(spec_of(), effort=Effort.FAST)
    assert profile.loading_s == 0
    assert all(operator.forward_s >= 0 for operator in profile.operators)
