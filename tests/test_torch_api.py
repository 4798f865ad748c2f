"""Every function of ``torch_api``, with the torch that is installed; and nothing goes past it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from pipectl import torch_api as api
from tests.docs.layers import PACKAGE

# Attributes with such names that Python has, and operators in lists of names of operators.
OF_PYTHON = {"_asdict", "_fields", "_getframe", "_make", "_replace"}
OF_OPERATORS = {"_log_softmax", "_softmax", "_to_copy", "_unsafe_view"}
NEW = {  # public, but not in all releases, or not the same in all
    "Muon", "child", "children_specs", "current_accelerator", "get_gradient_edge",
    "get_memory_info", "max_memory_allocated", "max_memory_reserved", "memory_allocated",
    "memory_reserved", "reset_peak_memory_stats",
}  # fmt: skip


def faults(source: str) -> list[str]:
    """Every place in a file that names what is private in torch or not in all its releases."""
    tree = ast.parse(source)
    texts = {id(s.value) for s in ast.walk(tree) if isinstance(s, ast.Expr)}  # docstrings
    own = {name for node in ast.walk(tree) for name in bound(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if "._" in name or name.split(".")[-1] in NEW]
            found += [name for name in names if name.startswith("torch.fx.experimental")]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("torch._")]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            is_own = node.attr in OF_PYTHON | own or name.startswith(("self._", "cls._"))
            is_new = node.attr in NEW and name.startswith(("torch.", "spec"))
            found += [name] if is_new or (re.match("_[^_]", node.attr) and not is_own) else []
        elif isinstance(node, ast.Constant) and id(node) not in texts:
            found += [node.value] if is_private_name(node.value) else []
    return found


def bound(node: ast.AST) -> Iterator[str]:
    """The names of attributes that a file gives to objects of its own."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr if ast.unparse(node.value) in ("self", "other") else ""
    elif isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, ast.FunctionDef):
                yield each.name
            elif isinstance(each, ast.AnnAssign):
                yield ast.unparse(each.target)
            elif isinstance(each, ast.Assign):
                yield from map(ast.unparse, each.targets)


def is_private_name(text: object) -> bool:
    if not isinstance(text, str) or text in OF_OPERATORS:
        return False
    if text.startswith("torch._"):
        return True
    is_private = text.startswith("_") and not text.startswith("__") and text.isidentifier()
    places = (torch, Tensor, nn.Module, torch._C, torch._VF, torch.autograd, torch.ops.aten)
    return is_private and any(hasattr(place, text) for place in places)


def test_no_other_file_names_what_is_private_in_torch() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    parts = ("capture", "profiler", "runtime")
    found = {
        name: faults(path.read_text(encoding="utf-8"))
        for name, path in files.items()
        if name.startswith(parts)
    }
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch._guards",
        "from torch.utils import _pytree",
        "from torch._ops import OpOverload",
        "from torch.fx.experimental.proxy_tensor import get_proxy_mode",
        "from torch.autograd.graph import get_gradient_edge",
        "x = torch._C._set_grad_enabled",
        "x = tensor._version",
        "x = torch.optim.Muon",
        "x = getattr(tensor, '_version', 0)",
        "x = module == 'torch._inductor'",
        "x = torch.accelerator.memory_allocated(0)",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert len(faults(source)) >= 1


def test_names_of_the_file_itself_are_not_found() -> None:
    source = "class A:\n    def f(self, other):\n        self._x = other._x._replace(a=1)"
    assert faults(source) == []


def test_tensors() -> None:
    tensor = torch.zeros(2)
    before = api.version_of(tensor)
    tensor.view(-1).add_(1)
    assert api.version_of(tensor) > before
    same, other = tensor.view(1, 2), tensor.clone()
    identities = [api.identity_of(each.untyped_storage()) for each in (tensor, same, other)]
    assert identities[0] == identities[1] != identities[2]
    first, second = torch.zeros(2), torch.zeros(2)
    identity = api.identity_of(first)
    first.data = torch.ones(3)
    assert api.identity_of(first) == identity
    torch.utils.swap_tensors(first, second)
    assert api.identity_of(first) != identity
    assert not api.is_zero_tensor(tensor)
    assert api.is_zero_tensor(torch._efficientzerotensor(2))
    kind = type("Kind", (Tensor,), {})
    assert type(api.make_subclass(kind, tensor)) is kind
    assert api.takes_data_of(tensor, other)
    other.fill_(7)
    api.swap(tensor, other)
    assert tensor.tolist() == [7, 7]


def test_modules_and_hooks() -> None:
    module = nn.BatchNorm1d(2)
    assert list(api.parameters_of(module)) == ["weight", "bias"]
    assert "running_mean" in api.buffers_of(module)
    assert api.forward_hooks_of(module) == []
    hooks = [lambda *_: None, lambda *_: None]
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1])
    assert api.forward_hooks_of(module) == hooks
    assert not api.has_backward_hooks(module)
    module.register_full_backward_hook(lambda *_: None)
    assert api.has_backward_hooks(module)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    parameters[1].register_hook(lambda _: None)
    parameters[2].register_post_accumulate_grad_hook(lambda _: None)
    assert [api.has_gradient_hooks(each) for each in parameters] == [False, True, True]
    assert isinstance(nn.BatchNorm2d(1), api.BatchNorm)
    assert isinstance(nn.Dropout(), api.Dropout)


def test_the_function_of_a_call_and_that_of_packing() -> None:
    module, seen = nn.Linear(1, 1), []

    class Packing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **kwargs or {})

    def fail(*_: object) -> None:
        raise ValueError("in a hook")

    module.register_forward_hook(fail)
    with pytest.raises(ValueError, match="in a hook") as raised:
        module(torch.zeros(1))
    frames = [entry.frame for entry in raised.traceback]
    holders = [f.f_locals["self"] for f in frames if f.code.name == api.CALL_OF_A_MODULE]
    assert holders == [module]
    with Packing():
        nn.utils.rnn.pack_padded_sequence(torch.zeros(2, 1, 1), [2])
    assert api.PACK_SEQUENCE in seen


class Twice(torch.autograd.Function):
    """In Python: its node lives as long as its value, or the edge that keeps it."""

    @staticmethod
    def forward(_ctx, x):
        return 2 * x

    @staticmethod
    def backward(_ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize("function", [Twice.apply, lambda x: 2 * x])
def test_an_edge_outlives_its_value(function) -> None:
    x = torch.ones(2, requires_grad=True)
    edge = api.edge_of(function(3 * x))
    (gradient,) = api.run_engine([edge], [torch.ones(2)], [x], keep_graph=True, accumulate=False)
    assert gradient is not None
    assert gradient.tolist() == [6, 6]
    assert x.grad is None
    api.run_engine([edge], [torch.ones(2)], keep_graph=False, accumulate=True)
    assert x.grad is not None
    assert x.grad.tolist() == [6, 6]


def test_the_gradient_of_a_function_in_python_arrives_at_its_edge() -> None:
    value = Twice.apply(torch.ones(2, requires_grad=True))
    root, ends = api.edge_of(5 * value), [api.edge_into(value)]
    (gradient,) = api.run_engine([root], [torch.ones(2)], ends, keep_graph=True, accumulate=False)
    assert gradient is not None
    assert gradient.tolist() == [5, 5]


def test_nodes_are_numbered_and_know_their_function() -> None:
    x = torch.ones(1, requires_grad=True)
    first = api.count_nodes()
    value = Twice.apply(x)
    assert first <= api.number_of(value.grad_fn) < api.count_nodes()
    assert api.function_of(value.grad_fn) is Twice
    assert api.function_of((x + 1).grad_fn) is None


def test_the_function_behind_a_custom_operator() -> None:
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    operator = torch.library.custom_op("tests_torch_api::twice", twice, mutates_args=())
    assert isinstance(operator, api.CustomOpDef)
    assert api.function_behind(operator) is twice


def test_a_backward_is_seen_and_can_be_refused() -> None:
    x, seen = torch.ones(1, requires_grad=True), []
    x.register_hook(lambda _: seen.append(api.is_in_backward()))
    (2 * x).backward()
    assert seen == [True]
    assert not api.is_in_backward()

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError

    with api.refused_gradients(refuse):
        for differentiate in (
            lambda: (2 * x).backward(),
            lambda: torch.autograd.grad(2 * x, x),
            lambda: torch.func.grad(torch.sum)(x),
            lambda: torch.func.jvp(torch.sin, (x.detach(),), (x.detach(),)),
        ):
            with pytest.raises(NotImplementedError):
                differentiate()


def test_hooks_on_saved_tensors_are_taken_off_if_they_are_the_innermost() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = torch.ones(1, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        with api.without_hooks(pack) as are_off:
            x.exp()
        assert (are_off, packed) == (True, [])
        with api.without_hooks(print) as are_off:
            x.exp()
        assert (are_off, len(packed)) == (False, 1)


def test_operators() -> None:
    assert str(api.COPY_TO) == "aten._to_copy.default"
    assert api.schema_of(api.COPY_TO).arguments[0].name == "self"
    assert all(isinstance(each, api.OpOverload) for each in api.CHECKS)
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([8.0])]
    assert [norm.item() for norm in api.norms(gradients)] == [5, 8]
    half = torch.tensor(0.5)
    assert api.unscale(gradients, half).item() == 0
    assert gradients[0].tolist() == [1.5, 2]
    assert api.unscale([torch.tensor([float("inf")])], half).item() == 1
    scale, steps = torch.tensor(4.0), torch.tensor(0, dtype=torch.int32)
    api.update_scale(scale, steps, torch.tensor(0.0), 2.0, 0.5, 1)
    assert scale.item() == 8
    mixed = [torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(1)]
    assert api.order_in_groups([mixed]) in ([0, 2, 1], [1, 0, 2])
    with api.untouched_by_modes(), api.without_modes():
        api.ASSERT_ASYNC(torch.ones(1, dtype=torch.bool))


class Regions(nn.Module):
    """An autocast, a part without gradients, and an LSTM whose last states are used."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.t()
        with torch.no_grad():
            z = x.sin()
        _, (h, c) = self.lstm(x.unsqueeze(0))
        assert h.shape == c.shape == (2, *x.shape)
        return y.sum() + z.sum() + h.sum() + c.sum()


def test_a_sample_is_read_as_by_a_loader() -> None:
    class Doubled(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [2 * index for index in indices]

    assert api.read_sample([3, 4], 1) == 4
    assert api.read_sample(Doubled(), 3) == 6


class Columns(dict[int, int]):
    """Has samples one by one, and columns of several."""

    def __getitems__(self, indices: list[int]) -> dict[str, list[int]]:
        return {"x": [self[index] for index in indices]}


def test_a_sample_is_no_column() -> None:
    assert api.read_sample(Columns({3: 5}), 3) == 5


def test_branches_under_a_mode_that_sees_operators_leave_later_ones_as_they_are() -> None:
    class Mode(api.TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def choose(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    x = torch.ones(3)
    expected = choose(x)  # loads the compiler
    with api.uncompiled(), Mode():
        assert torch.equal(choose(x), expected)
    assert torch.equal(choose(x), expected)


def test_nothing_is_compiled_even_if_the_compiler_is_not_loaded_yet() -> None:
    code = (
        "import torch; from pipectl.torch_api import uncompiled; seen = []\n"
        "def backend(graph, _): seen.append(graph); return graph.forward\n"
        "with uncompiled(): torch.compile(torch.sin, backend=backend)(torch.ones(2))\n"
        "print(len(seen))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_an_export_shows_regions_and_gives_the_states_of_lstms_their_sizes() -> None:
    marks: list[object] = []

    def replace(module: fx.GraphModule, signature: object, passes: list) -> tuple:
        known = {api.SET_GRADIENTS, api.ENTER_AUTOCAST, api.EXIT_AUTOCAST}
        marks.extend(known & {node.target for node in module.graph.nodes})
        for apply in reversed(passes):
            module, _ = apply(module, None)
        return module, signature

    model, x = Regions(), torch.ones(4, 3)
    sizes = {"x": {0: torch.export.Dim("batch", min=2, max=9)}}
    with api.replaced_region_passes(replace), api.states_of_lstms():
        program = torch.export.export(model, (x,), dynamic_shapes=sizes, strict=False)
    assert len(marks) == 3
    assert program.module()(x).item() == pytest.approx(model(x).item())
    spec = program.call_spec.in_spec
    assert str(api.part_of(spec, 0)) == str(api.pytree.tree_structure((x,)))


class Switching(nn.Module):
    """Switches gradients on and off within each other, and asks whether they are on."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            with torch.no_grad():
                y = x.sin()
            with torch.enable_grad():
                z = x.cos()
            u = x.neg() if torch.is_grad_enabled() else x.exp()
        return x.tan() * y * z * u


def test_gradients_are_off_in_a_trace_where_they_are_off_in_the_model() -> None:
    state: dict[object, bool] = {}

    def replace(module: fx.GraphModule, signature: object, _: list) -> tuple:
        gradients = True
        for node in module.graph.nodes:
            if node.target is api.SET_GRADIENTS:
                gradients = node.args[0]
            state[str(node.target)] = gradients
        return module, signature

    with api.replaced_region_passes(replace), api.switched_gradients():
        torch.export.export(Switching(), (torch.ones(3, requires_grad=True),), strict=False)
    assert torch.is_grad_enabled()
    names = ("sin", "cos", "neg", "exp", "tan")
    found = {name: state.get(f"aten.{name}.default") for name in names}
    assert found == {"sin": False, "cos": True, "neg": None, "exp": False, "tan": True}


def loss_of(x: Tensor) -> Tensor:
    return x.sin()


class OfAFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return loss_of(x)


def test_the_lines_of_operators_are_those_that_were_chosen() -> None:
    def choose(frames: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([f for f in frames if f.name == loss_of.__name__])

    with api.replaced_choice_of_lines(choose):
        program = torch.export.export(OfAFunction(), (torch.ones(3),), strict=False)
    (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert node.meta["stack_trace"].splitlines()[1:] == ["    return x.sin()"]


def test_the_choice_of_kernels_is_read_and_set() -> None:
    before = api.kernels()
    assert {"sdp_flash", "sdp_order", "mkldnn", "cudnn_tf32", "deterministic"} <= before.keys()
    changed = {"sdp_flash": False, "matmul": "medium", "deterministic": (True, True)}
    try:
        api.choose_kernels(changed)
        assert api.kernels() == {**before, **changed}
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        api.choose_kernels(before)
    assert api.kernels() == before


def test_a_node_is_named_after_its_target() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.sin, (graph.placeholder("x"),))
    node.target = torch.cos
    api.rename(node)
    assert node.name.startswith("cos")


def test_conditions_on_sizes_name_the_file_that_asked() -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.shape[0] > 3 else x

    sizes = {"x": {0: torch.export.Dim.AUTO}}
    program = torch.export.export(Asking(), (torch.ones(6, 3),), dynamic_shapes=sizes, strict=False)
    size = next(iter(program.graph.nodes)).meta["val"].shape[0]
    assert isinstance(size, torch.SymInt)
    places = [api.place_of_guard(guard) for guard in size.node.shape_env.guards]
    assert __file__ in places


def test_a_recomputed_part_is_called_by_two_functions_at_most() -> None:
    applied: list[type] = []
    apply = vars(torch.autograd.Function)["apply"]

    def watch(function, *args, **kwargs):
        applied.append(function)
        return apply.__get__(None, function)(*args, **kwargs)

    x = torch.ones(1, requires_grad=True)
    with mock.patch.object(torch.autograd.Function, "apply", classmethod(watch)):
        torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)
    assert [api.is_keeping_inputs(function) for function in applied] == [True] * len(applied)


@pytest.mark.parametrize("reentrant", [True, False])
def test_unused_checkpoints_compute_once_where_they_are_unused(reentrant: bool) -> None:
    """And they are swapped in no call, only asked: other threads may use them meanwhile."""
    checkpoint = torch.utils.checkpoint

    def calls() -> int:
        seen: list[Tensor] = []
        x = torch.ones(1, requires_grad=True)

        def part(x: Tensor) -> Tensor:
            seen.append(x)
            return x.square()

        checkpoint.checkpoint(part, x, use_reentrant=reentrant).backward()
        assert torch.equal(x.grad, torch.full((1,), 2.0))
        return len(seen)

    assert calls() == 2
    with api.unused_checkpoints():
        functions = {**vars(checkpoint), **vars(checkpoint.CheckpointFunction)}
        with api.unused_checkpoints():
            assert calls() == 1
        assert calls() == 1
        with ThreadPoolExecutor(1) as elsewhere:
            assert elsewhere.submit(calls).result() == 2
    assert calls() == 2
    assert {**vars(checkpoint), **vars(checkpoint.CheckpointFunction)} == functions


def test_masks_vmap_and_errors_of_the_compiler() -> None:
    layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4, batch_first=True), 1)
    seen: list[object] = []

    def check(*given: object, **named: object) -> bool:
        seen.append(given)
        return False

    with api.replaced_mask_check(check):
        layer(torch.zeros(1, 2, 4), mask=torch.zeros(2, 2))
    assert seen
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        torch.compile(lambda x: x + 1, backend=check_none)(torch.zeros(1))
    assert api.is_of_compiler(raised.value)
    assert not api.is_of_compiler(ValueError())
    assert not api.is_edge_of_vmap(torch.sin)


def test_a_process_is_told_of_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.utils.data.get_worker_info()
    with api.told_as_process([1]):
        info = torch.utils.data.get_worker_info()
        assert (info.id, info.num_workers, info.seed) == (0, 1, torch.initial_seed())
        assert info.dataset == [1]
    assert torch.utils.data.get_worker_info() is before is None
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", info)
    with api.told_as_process([2]):
        assert info.dataset == [2]
    assert torch.utils.data.get_worker_info().dataset == [2]


def check_none(*_: object) -> None:
    raise RuntimeError("no backend")


GPU = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")


def test_without_an_accelerator_there_is_none() -> None:
    found = api.current_accelerator()
    assert (found is not None) == torch.accelerator.is_available()
    assert (api.MUON is None) != hasattr(torch.optim, "Muon")


@pytest.mark.gpu
@GPU
def test_memory_and_streams_of_an_accelerator() -> None:
    device = api.current_accelerator()
    assert device is not None
    device = torch.device(device.type, 0)
    api.reset_peak(device)
    before = api.allocated_bytes(device)
    kept = torch.zeros(1 << 20, device=device)
    assert api.allocated_bytes(device) - before >= kept.nbytes
    assert api.peak_bytes(device) >= api.allocated_bytes(device)
    assert api.free_bytes(device) > 0
    stream, usual = torch.Stream(device), torch.accelerator.current_stream(device)
    with api.on_stream(stream):
        assert torch.accelerator.current_stream(device) == stream
    assert torch.accelerator.current_stream(device) == usual
