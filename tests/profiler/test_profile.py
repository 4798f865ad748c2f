"""What a profile says of a job: operators, edges, groups, parameters and bytes, by hand."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.capture import CapturedJob
from pipectl.capture.regions import missing_kernels
from pipectl.errors import CaptureError
from pipectl.profile import Profile
from pipectl.profile_parts import MeasuredOn, Operator
from pipectl.profiler import job, operators, profile_job
from pipectl.profiler.effort import Effort, measured_sizes
from pipectl.spec import profile_key

MODELS = Path(__file__).with_name("models.py")
CAPTURED = Path(__file__).parents[1] / "capture" / "models.py"
CORPUS = Path(__file__).parents[1] / "corpus" / "own.py"
BATCH, SLOW_S = 4, 0.02
HERE = MeasuredOn("cpu")


@pytest.fixture(scope="module")
def counted(spec_of: Any) -> Profile:
    return profile_job(spec_of("Counted"), HERE)


@pytest.fixture(scope="session")
def profiled(spec_of: Any) -> Any:
    """``profiled(model, **sections)``: in little time."""
    return lambda *args, **more: profile_job(spec_of(*args, **more), HERE, effort=Effort.FAST)


def test_what_torch_func_saves_counts_as_if_a_backward_had_saved_it() -> None:
    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x.exp().sin().sum(), x, create_graph=True)[0]

    x, kept_bytes = torch.randn(1000, requires_grad=True), []
    for target in (slope, torch.func.grad(lambda x: x.exp().sin().sum())):
        _, pattern = operators.observe(operators.Call(target, (x,), {}, False), x.device, {})
        kept_bytes.append(sum(size for _, size in pattern.kept))
    assert kept_bytes[0] == kept_bytes[1] >= 2 * x.nbytes


def training(**more: Any) -> dict[str, Any]:
    return {"training": {"steps": 1, "batch_size": 8, **more}}


def test_one_operator_per_node_of_the_graph_and_the_file_says_it_all(
    counted: Profile, spec_of: Any, tmp_path: Path
) -> None:
    graph = CapturedJob(spec_of("Counted")).training_graph(BATCH)
    assert [operator.id for operator in counted.operators] == [n.name for n in graph.operators]
    assert counted.edges == graph.edges
    assert counted.fingerprint == graph.fingerprint
    assert {o.id: o.signature for o in counted.operators} == graph.signatures
    assert {o.id: o.group for o in counted.operators if o.group} == graph.groups
    assert counted.micro_batch_size == BATCH
    assert counted.key == profile_key(spec_of("Counted"))
    assert 50 << 20 < counted.process_baseline_bytes < 20 << 30
    # On a busy machine a small backward may take no longer than its hook, which is subtracted.
    assert all(operator.forward_s >= 0 for operator in counted.operators)
    assert sum(operator.backward_s for operator in counted.operators) > 0
    counted.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == counted


def test_names_parameters_bytes_and_operations_are_those_counted_by_hand(counted: Profile) -> None:
    """A product of matrices: 2 operations for each of its factors; backward two such products."""
    wide, narrow, scores = BATCH * 10 * 4, BATCH * 5 * 4, BATCH * 3 * 4
    first, last = 2 * BATCH * 6 * 10, 2 * BATCH * 5 * 3
    a, norm, b = (
        ((f"model.{name}.weight", weights * 4), (f"model.{name}.bias", biases * 4))
        for name, weights, biases in (("a", 60, 10), ("norm", 10, 10), ("b", 15, 3))
    )
    assert {o.id: (o.name, o.output_bytes, o.parameters, o.flops) for o in counted.operators} == {
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
    for each in counted.operators:
        assert each.gradient_bytes == each.output_bytes
        assert each.parameter_bytes == sum(size for _, size in each.parameters)


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
    profiled: Any, model: str, operator: str, saved: Any
) -> None:
    assert profiled(f"{CAPTURED}:{model}").by_id[operator].saved == saved


def test_every_run_finds_the_batch_as_it_was_and_no_time_is_negative_if_the_clock_goes_back(
    profiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This loss counts classes down to 0; in a second round they would be negative."""
    monkeypatch.setattr("pipectl.profiler.bench.loading_clock", count(0, -1).__next__)
    profile = profiled(data="FromOne", loss="counted_from_one")
    assert profile.loading_s == 0
    assert all(operator.forward_s >= 0 for operator in profile.operators)


def test_integers_have_no_gradient_and_tied_parameters_one_name(profiled: Any) -> None:
    found = profiled("tied").operators
    (positions,) = (o for o in found if o.id == "arange")
    figures = positions.output_bytes, positions.gradient_bytes, positions.backward_s
    assert figures == (12 * 8, 0, 0.0)
    both = [o.parameters for o in found if o.name.startswith(("tokens", "head"))]
    assert both == [(("model.tokens.weight", 37 * 24 * 4),)] * 2


def test_an_optimizer_keeps_its_state_per_parameter(counted: Profile, profiled: Any) -> None:
    """Adam two more values, and a step counter per tensor; SGD nothing."""
    sgd = {"factory": f"{MODELS}:NeedsGradients", "kwargs": {"lr": 0.1}}
    plain = profiled(optimizer=sgd).optimizer
    tensors, parameter_bytes = 6, sum(operator.parameter_bytes for operator in counted.operators)
    expected = 2 + 4 * tensors / parameter_bytes
    assert counted.optimizer.state_bytes_per_parameter_byte == pytest.approx(expected)
    assert plain.state_bytes_per_parameter_byte == 0
    assert counted.optimizer.step_s_per_byte > 0
    assert plain.step_s_per_byte > 0


def test_progress_rises_to_the_total(spec_of: Any) -> None:
    told: list[tuple[int, int, str]] = []
    profile = profile_job(spec_of(pipeline={}), HERE, lambda *step: told.append(step))
    phases = [what for _, whole, what in told if not whole]
    assert (phases[0], phases[-1]) == ("capturing the model", "measuring")
    seen = told[len(phases) :]
    done = [done for done, _, _ in seen]
    (whole,) = {whole for _, whole, _ in seen}
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] == whole
    assert {operator.id for operator in profile.operators} < {name for _, _, name in seen}


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
    chosen = {"pipeline": pipeline, "resources": {"tasks_per_node": 2}}
    assert measured_sizes(spec_of(**training(batch_size=batch_size), **chosen), effort) == sizes


def test_other_sizes_are_measured_but_one_that_the_model_refuses_is_left_out(spec_of: Any) -> None:
    profile = profile_job(spec_of("Large", kwargs={"most": 4}, pipeline={}), HERE)
    measured = {profile.micro_batch_size, *profile.operators[0].timings}
    assert len(measured) > 1
    assert max(measured) <= 4 < 8
    (said,) = [text for text in profile.assumptions if "were not measured" in text]
    assert said.startswith("micro-batches of 8 were not measured: ")


def test_sizes_are_those_that_all_norms_take(spec_of: Any) -> None:
    """Two stages and 4 samples: single samples would be measured."""
    normed = spec_of(
        "Normed", **training(batch_size=4), pipeline={}, resources={"tasks_per_node": 2}
    )
    profile = profile_job(normed, MeasuredOn("cpu", "a processor"), effort=Effort.FAST)
    assert profile.micro_batch_size == 2
    assert profile.smallest is not None
    assert profile.smallest.samples == 2
    assert profile.smallest.reason.startswith("model: a micro-batch of 1 sample is too small for b")
    assert profile.epoch == (20,)
    assert profile.device == MeasuredOn("cpu", "a processor", neighbours=1)
    with pytest.raises(CaptureError, match="a micro-batch of 1 sample is too small for batch_norm"):
        profile_job(
            spec_of("Normed", **training(batch_size=4), pipeline={"micro_batches": 4}), HERE
        )


def test_functions_that_keep_tensors_in_attributes_are_told(profiled: Any) -> None:
    """No other rank gets these: stages whose backward is elsewhere recompute."""
    profile = profiled("Hiding")
    functions = [each.id for each in profile.operators if each.id.startswith("squares")]
    assert len(functions) == 2
    assert profile.own_code == (functions[1], "square")


def test_a_submodule_that_checkpoints_with_backwards_of_its_own_is_measured(profiled: Any) -> None:
    """Kept whole, it runs as it is captured: without them."""
    profile = profiled("Checkpointed", opaque=["again"])
    (whole,) = (each for each in profile.operators if "again" in each.id)
    assert dict(whole.parameter_gradients) == {
        "model.again.layer.weight": 400,
        "model.again.layer.bias": 40,
    }


def test_values_in_mixed_precision_take_half_the_bytes(counted: Profile, profiled: Any) -> None:
    mixed = profiled("Counted", **training(precision="bf16"))
    pairs = zip(counted.operators, mixed.operators, strict=True)
    ratios = {one.id: other.output_bytes / one.output_bytes for one, other in pairs}
    assert ratios["linear"] == 0.5
    assert ratios["cross_entropy_loss"] == 1
    assert mixed.operators[0].parameters == counted.operators[0].parameters
    linear = mixed.by_id["linear"]
    assert [(f"{name}:bfloat16", size // 2) for name, size in linear.parameters] == [*linear.casts]
    assert not [name for name, size in linear.saved if linear.is_own(name) and size >= 6 * 10 * 2]
    assert not any(operator.casts for operator in counted.operators)


def test_converted_weights_are_shared_casts_and_gradients_stay_in_float32(
    counted: Profile, profiled: Any
) -> None:
    how = {"deterministic": True, "float32_matmul_precision": "high", "precision": "bf16-weights"}
    halved = profiled(**training(**how))
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.are_deterministic_algorithms_enabled()
    sizes = {name: operator.output_bytes for name, operator in halved.by_id.items()}
    ratios = {name: own.output_bytes / sizes[name] for name, own in counted.by_id.items()}
    assert ratios == {name: 2 - (name == "cross_entropy_loss") for name in counted.by_id}
    for name in ("linear", "layer_norm"):
        operator = halved.by_id[name]
        assert operator.parameters == counted.by_id[name].parameters
        pairs = [(f"{name}:bfloat16", size // 2) for name, size in operator.parameters]
        assert [*operator.casts] == pairs
        sizes = dict(operator.parameters)
        assert {n: g for n, g in operator.memory.gradients if n in sizes} == sizes


def test_the_operators_that_read_the_data_first_contain_the_time_to_load_it(profiled: Any) -> None:
    profile = profiled(data="SlowVectors")
    assert profile.loading_s >= BATCH * SLOW_S
    by_id = profile.by_id
    assert by_id["linear"].forward_s >= profile.loading_s
    assert by_id["cross_entropy_loss"].forward_s >= profile.loading_s
    assert by_id["linear_1"].forward_s < profile.loading_s
    elsewhere = {"factory": f"{MODELS}:SlowVectors", "workers": 1}
    assert profiled(data=elsewhere).loading_s == 0


def test_a_batch_larger_than_the_data_is_an_assumption_and_the_peak_has_the_whole_model(
    profiled: Any,
) -> None:
    profile = profiled("Large", kwargs={"most": 32}, **training(batch_size=32))
    (said,) = [text for text in profile.assumptions if text.startswith("the data have")]
    assert "20 samples" in said
    assert "is for 32" in said
    assert profile.capture_bytes > profile.process_baseline_bytes + 2**25


@pytest.mark.parametrize(
    ("optimizer", "fault"),
    [
        ({"groups": [{"match": "nothing*", "lr": 1.0}]}, "'nothing\\*' matches no parameter"),
        ({"factory": "torch.optim:LBFGS"}, r"^optimizer: LBFGS\.step\(\) needs a closure"),
        ({"factory": f"{MODELS}:KeepsSets"}, "/seen is a set, which a checkpoint cannot hold"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_named_before_anything_is_measured(
    spec_of: Any, optimizer: Any, fault: str
) -> None:
    totals: list[int] = []
    with pytest.raises(CaptureError, match=fault):
        profile_job(spec_of(optimizer=optimizer), HERE, lambda _, total, *__: totals.append(total))
    assert set(totals) == {0}


def test_parameters_stay_on_the_host_while_the_job_is_tried_and_leave_it_for_metrics(
    spec_of: Any, monkeypatch: Any
) -> None:
    """What captures a graph needs them there; what runs the model needs them on the device."""
    order: list[str] = []

    def note(name: str, *_: Any) -> str:
        order.append(name)
        return "not tried"

    for name in ("try_job", "move", "try_metrics", "compare_halves"):
        monkeypatch.setattr(job, name, partial(note, name))
    profile_job(spec_of("Counted"), HERE, effort=Effort.FAST)
    assert list(dict.fromkeys(order)) == ["try_job", "move", "try_metrics", "compare_halves"]


def test_an_operator_without_a_kernel_for_float16_is_named(profiled: Any) -> None:
    half = training(batch_size=2, precision="float16")
    with pytest.raises(CaptureError, match="model: lstm cannot run in float16 on cpu") as raised:
        profiled(f"{CORPUS}:Lstm", data=f"{CORPUS}:Sequences", **half)
    assert "bf16" in str(raised.value.hint)


def test_an_operator_without_a_deterministic_kernel_is_named(profiled: Any) -> None:
    fault = "raised RuntimeError: max_unpooling2d_forward_out does not have a deterministic impl"
    with pytest.raises(CaptureError, match=fault) as raised:
        profiled("Unpooled", **training(batch_size=2, deterministic=True))
    assert "training.deterministic: false" in str(raised.value.hint)
    zeros = torch.zeros(1, 1, 1)
    with (
        pytest.raises(CaptureError, match="model: unpool has no deterministic variant") as raised,
        missing_kernels("unpool", "float32", torch.device("cpu")),
    ):
        torch.nn.functional.max_unpool2d(zeros, zeros.long(), 1)
    assert "training.deterministic: false" in str(raised.value.hint)


# A model that no process holds is measured operator by operator, equal operators once


def all_but_times(operator: Operator) -> tuple[Any, ...]:
    """Values kept under names of their own count by size: how many there are is not fixed."""
    saved = [(n.split(":")[0], size) for n, size in operator.saved]
    sizes = operator.output_bytes, operator.gradient_bytes, operator.parameter_bytes
    parameters, signature = operator.parameters, operator.signature
    return operator.id, operator.name, sizes, parameters, saved, signature, operator.flops


@pytest.mark.parametrize("model", ["tied", "cnn", "dense"])
def test_everything_but_times_is_that_of_the_whole_model(
    profiled: Any, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    whole = profiled(model)
    measured: list[Any] = []
    measure = operators.time_alone

    def counting(call: Any, device: Any, budget_s: float) -> Any:
        measured.append(call.target)
        return measure(call, device, budget_s)

    monkeypatch.setattr(operators, "time_alone", counting)
    parts = profiled(model, materialize="per_rank")
    assert list(map(all_but_times, parts.operators)) == list(map(all_but_times, whole.operators))
    assert (parts.edges, parts.fingerprint) == (whole.edges, whole.fingerprint)
    assert all(operator.forward_s > 0 for operator in parts.operators)
    assert any("not scaled" in assumption for assumption in parts.assumptions)
    assert parts.optimizer.state_bytes_per_parameter_byte == pytest.approx(
        whole.optimizer.state_bytes_per_parameter_byte, rel=0.02
    )
    if model == "tied":  # its two blocks are equal
        assert len(measured) < 0.7 * len(parts.operators)
        linear = {o.forward_s for o in parts.operators if "qkv" in o.name}
        assert len(linear) == 1
