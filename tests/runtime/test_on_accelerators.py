"""Ranks on a real accelerator, which they share: the same training as on one rank, and on the CPU.

Kernels of accelerators add in other orders than the CPU's, so results agree within rounding; SGD
does not magnify what is tiny.
"""

from __future__ import annotations

import math
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

from pipectl.capture import CapturedJob, Cut, Slot
from pipectl.capture.slices import Span
from pipectl.profile import Profile
from pipectl.runs import read_errors, read_heartbeat
from pipectl.runtime import checkpoint
from pipectl.runtime.checkpoint import Keep, Saver, take_snapshot
from pipectl.runtime.device import AcceleratorDevice
from pipectl.runtime.manifest import Manifest
from pipectl.runtime.optimizer import Updater
from pipectl.runtime.stage import Stage
from pipectl.runtime.staging import CopyStream, Staging
from pipectl.runtime.vote import Origins

MODELS = Path(__file__).parents[1] / "equality" / "models.py"
PARTS = Path(__file__).with_name("job_parts.py")
TOKENS = {"loss": f"{MODELS}:token_loss", "data": {"factory": f"{MODELS}:Tokens"}}
IMAGES = {"loss": "torch.nn:CrossEntropyLoss", "data": {"factory": f"{MODELS}:Images"}}
TIED, GPT = ({"model": f"{MODELS}:{name}", **TOKENS} for name in ("tied", "gpt"))
CNN = {"model": f"{MODELS}:cnn", **IMAGES}
HELD = 1 << 20
HOLDING = {"model": {"factory": f"{PARTS}:Holding", "kwargs": {"count": HELD}}}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here"),
]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("usual_gpus", "ranks", "gpus", "pipeline", "job", "precision"),
    [
        pytest.param(0, 1, 1, {}, {}, "float32", id="as on the CPU"),
        pytest.param(1, 2, 1, {"schedule": "gpipe"}, {}, "float32", id="shared"),
        pytest.param(1, 2, 1, {"schedule": "zb-h1"}, {}, "float32", id="shared, zb-h1"),
        # Models that make tensors, drop out (the same: masks follow from the seed on any device)
        # and keep statistics.
        pytest.param(1, 2, 2, {"offload": "host"}, TIED, "bf16-weights", id="tied"),
        pytest.param(1, 2, 2, {"recompute": "all"}, CNN, "float32", id="cnn"),
        pytest.param(1, 2, 2, {}, GPT, "float16", id="gpt"),
    ],
)
def test_ranks_train_what_one_rank_does(
    make_run, train, usual_gpus, ranks, gpus, pipeline, job, precision
) -> None:
    weights = []
    for count, on, more in ((1, usual_gpus, {}), (ranks, gpus, pipeline)):
        run = make_run(
            count,
            resources={"tasks_per_node": count, "gpus_per_node": on},
            pipeline={"micro_batches": 2, "stages": count, **more},
            training={"steps": 5, "batch_size": 4, "precision": precision},
            **job,
        )
        train(run)
        assert read_errors(run.start) == []
        assert len(read_heartbeat(run.start).ranks) == count
        weights.append(checkpoint.load(run.checkpoints / "step-000005"))
    one, other = weights
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_messages_go_through_host_memory_and_back(dtype: torch.dtype, piece_bytes: int) -> None:
    device = torch.accelerator.current_accelerator()
    sent = torch.arange(1000, device=device).to(dtype)
    staging = Staging(device, CopyStream(device), CopyStream(device))
    there = staging.outgoing(sent, piece_bytes)
    assert len(there.free) == -(-sent.nbytes // piece_bytes)
    for event in there.free:
        event.synchronize()
    back = staging.buffer(sent.numel(), dtype)
    back.buffer.copy_(there.buffer)
    assert back.landing is not None
    back.landing.take(sent.nbytes // 2)
    received = back.landing.finish()
    assert received.device.type == device.type
    assert torch.equal(received.cpu(), sent.cpu())


@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam", "Adafactor", "ASGD"])
@pytest.mark.parametrize("dimensions", [0, 1])
def test_optimizers_go_on_with_their_numbers_where_they_were(
    tmp_path: Path, name: str, dimensions: int
) -> None:
    """What they remember of a parameter without dimensions is a number, as a count of steps is."""
    device = torch.accelerator.current_accelerator()
    options = {"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}
    parameters = [nn.Parameter(torch.ones((3,) * dimensions, device=device)) for _ in range(2)]
    first, second = (getattr(torch.optim, name)([each], **options) for each in parameters)
    update(first)
    saver = Saver(MPI.COMM_SELF, tmp_path, Keep(1), 1, print)
    named = {"model.scale": parameters[0]}
    saver.start(
        Manifest(1, 1, {}), take_snapshot(named, {n: n for n in named}, Updater(first, None), named)
    )
    saver.finish()
    stored, named = checkpoint.load(tmp_path / "step-000001"), {"model.scale": parameters[1]}
    stored.restore_states(named)
    stored.restore_optimizer(second, named)
    assert places(second) == places(first)
    update(first)
    update(second)
    assert torch.equal(*parameters)


def update(optimizer: torch.optim.Optimizer) -> None:
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()


def places(optimizer: torch.optim.Optimizer) -> dict[str, torch.device]:
    """Where what an optimizer remembers of its one parameter is."""
    (state,) = optimizer.state.values()
    return {key: value.device for key, value in state.items() if isinstance(value, Tensor)}


@pytest.mark.mpi
@pytest.mark.skipif(not hasattr(torch.ops.pretended, "counts"), reason="only the pretended counts")
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_a_rank_waits_for_its_accelerator_at_the_end_of_a_step_only(
    make_run, train, micro_batches
) -> None:
    run = make_run(
        1,
        resources={"tasks_per_node": 1, "gpus_per_node": 1},
        pipeline={"micro_batches": micro_batches, "stages": 1},
        training={"steps": 5, "batch_size": 4, "clip_grad_norm": 1.0},
        callbacks={"waits": {"factory": f"{PARTS}:count_waits"}},
        trace={"steps": []},
        **GPT,
    )
    train(run)
    counts = [[int(word) for word in line.split()] for line in (run.path / "waits.txt").open()]
    (waits, unpinned) = (
        {later - before for before, later in pairwise(column)}
        for column in zip(*counts, strict=True)
    )
    assert max(waits) <= 6
    assert max(unpinned) <= 3  # norms and losses, which the step ends with


@pytest.mark.mpi
def test_a_rank_out_of_memory_leaves_a_snapshot_of_what_the_accelerator_holds(
    make_run, work
) -> None:
    run = make_run(
        1,
        data={"factory": f"{PARTS}:Marked", "kwargs": {"first": 16}},
        model={"factory": f"{PARTS}:Hungry"},
        resources={"tasks_per_node": 1, "gpus_per_node": 1},
    )
    device = Profile.load(run.profile).device
    assert device.memory_bytes > 2**28
    assert work(1, run).returncode == 1
    (error,) = read_errors(run.start)
    assert "out of memory" in error.message
    assert error.step == 5
    file = run.start.memory_of(0)
    assert str(file) in error.hint
    assert "pipeline.memory_limit" in error.hint
    assert pickle.loads(file.read_bytes())


@pytest.mark.skipif(not hasattr(torch.ops.pretended, "counts"), reason="only the pretended counts")
def test_numbers_of_outputs_are_read_at_the_end_of_a_step_only() -> None:
    """Whether what stages send is finite: no forward waits for it."""
    device = torch.accelerator.current_accelerator()
    origins, sent, loss = Origins({"sent"}, "loss"), Slot("sent"), Slot("loss")
    outputs = [torch.full((8,), value, device=device) for value in (1.0, 2.0, math.nan, 3.0)]
    waits, _ = torch.ops.pretended.counts()
    for number, output in enumerate(outputs):
        origins.note(number, 1, {sent: output, loss: output[0]}, lambda: pytest.fail("searched"))
    assert torch.ops.pretended.counts()[0] == waits
    assert origins.take_first(4) == (2, 1)
    assert torch.ops.pretended.counts()[0] <= waits + 2


def test_numbers_that_graphs_hold_are_on_the_accelerator_once(make_spec) -> None:
    """Training and evaluation have a constant in common, and one of their own each."""
    held_out = {"data": f"{PARTS}:Samples", "every": 1}
    resources = {"tasks_per_node": 1, "gpus_per_node": 1}
    job = CapturedJob(make_spec(1, **HOLDING, evaluation=held_out, resources=resources))
    cuts = {}
    for trains, graph in ((True, job.training_graph(2)), (False, job.evaluation_graph(2))):
        stage_of = dict.fromkeys((node.name for node in graph.operators), 0)
        cuts[trains, Span.of(2)] = Cut(graph, stage_of, training=trains)
    device = AcceleratorDevice(0)
    before = torch.accelerator.memory_allocated()
    stage = Stage(0, cuts, job.states, device)
    added = torch.accelerator.memory_allocated() - before
    assert len(stage.parameters) == 6
    assert 3 * 4 * HELD <= added < 3.5 * 4 * HELD
