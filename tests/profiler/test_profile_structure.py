"""What a profile says of a graph: operators, edges, groups, parameters and bytes, by hand."""

from __future__ import annotations

from functools import cache
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
CORPUS = Path(__file__).parents[1] / "corpus" / "own.py"
BATCH, SLOW_S = 4, 0.02


@pytest.fixture(scope="session")
def profile_of(spec_of: Any) -> Any:
    return cache(lambda *args: profile_job(spec_of(*args)))


@pytest.fixture(scope="session")
def counted(profile_of: Any) -> Profile:
    return profile_of("Counted")


def test_one_operator_per_node_of_the_graph(counted: Profile, spec_of: Any) -> None:
    graph = CapturedJob(spec_of("Counted")).training_graph(BATCH)
    assert [operator.id for operator in counted.operators] == [n.name for n in graph.operators]
    assert counted.edges == graph.edges
    assert counted.fingerprint == graph.fingerprint
    assert {o.id: o.signature for o in counted.operators} == graph.signatures
    assert {o.id: o.group for o in counted.operators if o.group} == graph.groups
    assert counted.micro_batch_size == BATCH


def test_names_say_where_in_the_model(counted: Profile) -> None:
    assert counted.by_id["linear"].name == "a.linear"
    assert counted.by_id["layer_norm"].name == "norm.layer_norm"


def test_times_are_positive(counted: Profile) -> None:
    """On a busy machine a small backward may take no longer than its hook, which is subtracted."""
    assert all(operator.forward_s >= 0 for operator in counted.operators)
    with_backward = {"linear", "layer_norm", "dropout", "linear_1", "cross_entropy_loss"}
    assert sum(counted.by_id[name].backward_s for name in with_backward) > 0


def test_output_and_gradient_bytes(counted: Profile) -> None:
    sizes = {o.id: (o.output_bytes, o.gradient_bytes) for o in counted.operators}
    wide, narrow = BATCH * 10 * 4, BATCH * 5 * 4
    assert sizes["linear"] == sizes["relu_"] == sizes["layer_norm"] == (wide, wide)
    assert sizes["dropout"] == sizes["view"] == (wide, wide)
    assert sizes["select"] == (narrow, narrow)
    assert sizes["linear_1"] == (BATCH * 3 * 4,) * 2
    assert sizes["cross_entropy_loss"] == (4, 4)


def test_parameters_by_name(counted: Profile) -> None:
    assert counted.by_id["linear"].parameters == (
        ("model.a.weight", 6 * 10 * 4),
        ("model.a.bias", 10 * 4),
    )
    assert counted.by_id["linear"].parameter_bytes == 6 * 10 * 4 + 10 * 4
    assert counted.by_id["relu_"].parameters == ()


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


def test_products_count_operations_in_both_directions(counted: Profile) -> None:
    """A product of matrices: 2 for each of its factors; backward two such products."""
    first, last = counted.by_id["linear"], counted.by_id["linear_1"]
    assert first.flops == 2 * 2 * BATCH * 6 * 10  # the input has no gradient
    assert last.flops == 3 * 2 * BATCH * 5 * 3
    assert counted.by_id["relu_"].flops == 0


def test_integer_values_have_no_gradient(profile_of: Any) -> None:
    profile = profile_of("Embedded", "Tokens")
    for name in ("add", "remainder"):
        assert profile.by_id[name].output_bytes == BATCH * 5 * 8
        assert profile.by_id[name].gradient_bytes == 0
        assert profile.by_id[name].backward_s == 0.0
    assert profile.by_id["add"].gradient_bytes == 0
    assert profile.by_id["embedding"].gradient_bytes > 0


def test_a_tied_parameter_has_one_name_at_both_ends(profile_of: Any) -> None:
    profile = profile_of("Embedded", "Tokens")
    both = profile.by_id["embedding"].parameters, profile.by_id["linear"].parameters
    assert both[0] == both[1] == (("model.tokens.weight", 8 * 4 * 4),)


def test_adam_keeps_two_more_values_per_parameter(counted: Profile) -> None:
    assert counted.optimizer is not None
    tensors = 6
    parameter_bytes = sum(size for _, size in _parameters(counted))
    expected = 2 + 4 * tensors / parameter_bytes  # and one step counter per parameter
    assert counted.optimizer.state_bytes_per_parameter_byte == pytest.approx(expected)
    assert counted.optimizer.step_s_per_byte > 0


def _parameters(profile: Profile) -> set[tuple[str, int]]:
    return {pair for operator in profile.operators for pair in operator.parameters}


def test_sgd_keeps_nothing(spec_of: Any) -> None:
    spec = spec_of("Normed", optimizer={"factory": "torch.optim:SGD", "kwargs": {"lr": 0.1}})
    profile = profile_job(spec)
    assert profile.optimizer is not None
    assert profile.optimizer.state_bytes_per_parameter_byte == 0


def test_a_profile_survives_its_file(counted: Profile, tmp_path: Path) -> None:
    counted.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == counted


def test_a_profile_knows_what_it_was_made_from(counted: Profile, spec_of: Any) -> None:
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
    resources = {"tasks_per_node": 2}
    training = {"steps": 1, "batch_size": 16}
    spec = spec_of("Normed", training=training, pipeline={"stages": 2}, resources=resources)
    profile = profile_job(spec, effort=Effort.FAST)
    assert profile.micro_batch_size == 4
    assert all(set(operator.timings) == {1} for operator in profile.operators)


@pytest.mark.parametrize(
    ("effort", "sizes"),
    [
        (Effort.FAST, (6, 1)),
        (Effort.NORMAL, (6, 1, 3, 12, 24)),
    ],
)
def test_sizes_reach_from_single_samples_to_the_batch(
    effort: Effort, sizes: tuple[int, ...], spec_of: Any
) -> None:
    training = {"steps": 1, "batch_size": 24}
    resources = {"tasks_per_node": 2}
    spec = spec_of("Normed", training=training, pipeline={"stages": 2}, resources=resources)
    assert measured_sizes(spec, effort) == sizes


def test_one_size_is_measured_where_the_spec_says_it(spec_of: Any) -> None:
    spec = spec_of("Normed", training={"steps": 1, "batch_size": 7}, pipeline={"micro_batches": 3})
    assert measured_sizes(spec) == (3,)


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
    profile = profile_job(spec_of("Counted", "SlowVectors"), effort=Effort.FAST)
    assert profile.loading_s >= BATCH * SLOW_S
    by_id = profile.by_id
    assert by_id["linear"].forward_s >= profile.loading_s
    assert by_id["cross_entropy_loss"].forward_s >= profile.loading_s
    assert by_id["linear_1"].forward_s < profile.loading_s


def test_data_that_other_processes_load_take_a_rank_no_time(spec_of: Any) -> None:
    data = {"factory": f"{MODELS}:SlowVectors", "workers": 1}
    assert profile_job(spec_of("Counted", data), effort=Effort.FAST).loading_s == 0


def test_an_operator_without_a_kernel_for_float16_is_named(spec_of: Any) -> None:
    training = {"steps": 1, "batch_size": 2, "precision": "float16"}
    spec = spec_of(f"{CORPUS}:Lstm", f"{CORPUS}:Sequences", training=training)
    with pytest.raises(CaptureError, match="model: lstm cannot run in float16 on cpu") as raised:
        profile_job(spec)
    assert "bf16" in (raised.value.cure or "")
