"""Neighbours, the cache of the processor, and partitions for measuring."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pipectl.capture import CapturedJob
from pipectl.errors import CaptureError
from pipectl.profile import Operator
from pipectl.profiler import profile_job
from pipectl.profiler.bench import Bench, Cost, Subject, random_stages, single_stage, windows
from pipectl.profiler.effort import Effort
from pipectl.profiler.journal import Journal
from pipectl.profiler.machine import last_level_bytes, loading_clock
from pipectl.profiler.neighbours import Neighbours, _compute, has_room, neighbour_count
from pipectl.profiler.operators import Walk
from pipectl.profiler.optimizer import optimizer_cost
from pipectl.runtime.device import CpuDevice
from pipectl.spec import dump

MODELS = Path(__file__).with_name("models.py")
CAPTURED = Path(__file__).parents[1] / "capture" / "models.py"


@pytest.mark.parametrize(
    ("resources", "cores", "scheduler", "count"),
    [
        ({"tasks_per_node": 4}, 8, "local", 3),
        ({"tasks_per_node": 4}, 2, "local", 3),
        ({"tasks_per_node": 64}, 2, "local", 3),
        ({"tasks_per_node": 4}, 2, "slurm", 1),
        ({"tasks_per_node": 4, "cpus_per_task": 2}, 8, "local", 3),
        ({"tasks_per_node": 4, "cpus_per_task": 2}, 4, "local", 1),
        ({"tasks_per_node": 4, "cpus_per_task": 4}, 8, "local", 1),
        ({"tasks_per_node": 1}, 8, "local", 0),
        ({"tasks_per_node": 4, "gpus_per_node": 4}, 8, "local", 0),
        ({"tasks_per_node": 2, "cpus_per_task": 4}, 2, "local", 0),
    ],
)
def test_as_many_neighbours_as_other_ranks_of_the_node(
    resources: dict[str, int], cores: int, scheduler: str, count: int, spec_of: Any
) -> None:
    assert neighbour_count(spec_of(resources=resources), cores, scheduler) == count


def test_neighbours_say_nothing_when_they_fail(
    spec_of: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    noise = "import multiprocessing\nif multiprocessing.parent_process(): print('beside')\n"
    fails = "def fails():\n    raise RuntimeError('no weights here')\n"
    (tmp_path / "noisy.py").write_text(noise + fails)
    context = multiprocessing.get_context("spawn")
    events = context.Event(), context.Event()
    spec = spec_of(f"{tmp_path}/noisy.py:fails")
    process = context.Process(target=_compute, args=(spec, 2, 0, *events))
    process.start()
    process.join()
    assert process.exitcode
    assert capfd.readouterr() == ("", "")


def test_neighbours_compute_until_the_measurement_is_over(
    spec_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    with Neighbours(spec_of(resources={"tasks_per_node": 3}), 4) as neighbours:
        neighbours.wait()
        assert neighbours.computing == 2
        assert neighbours.assumptions == ()
        started = [process.pid for process in psutil.Process().children()]
    assert len(started) >= 2
    left = [process.pid for process in psutil.Process().children()]
    assert len(set(started) - set(left)) == 2
    # They were not killed, so that what the user's libraries tidy up at exit is tidied up.
    assert [process.exitcode for process in neighbours._processes] == [0, 0]


KILLED_AT_ONCE = """
import os, signal, sys
from pathlib import Path
from pipectl.profiler.neighbours import Neighbours
from pipectl.spec import load

if __name__ == "__main__":
    os.sched_getaffinity = lambda _: {0, 1}
    neighbours = Neighbours(load(Path(sys.argv[1])), 4).__enter__()
    print(neighbours._processes[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_neighbour_outlives_a_measuring_process_that_is_killed_while_it_starts(
    spec_of: Any,
    tmp_path: Path,
) -> None:
    spec = spec_of(resources={"tasks_per_node": 2})
    (tmp_path / "killed.py").write_text(KILLED_AT_ONCE)
    (tmp_path / "job.yaml").write_text(dump(spec))
    command = [sys.executable, str(tmp_path / "killed.py"), str(tmp_path / "job.yaml")]
    started = int(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(started)
        assert psutil.wait_procs([process], timeout=120)[1] == []


def test_a_profile_says_that_a_neighbour_failed(spec_of: Any) -> None:
    spec = spec_of(resources={"tasks_per_node": 2}, data=f"{MODELS}:Missing")
    neighbours = Neighbours(spec, 4)
    if neighbours.count:
        with neighbours:
            neighbours.wait()
            assert neighbours.computing == 0
            (assumption,) = neighbours.assumptions
        assert "failed to start" in assumption


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count waiting"
)
def test_loading_takes_no_longer_while_others_use_the_core_but_waits_for_a_disk() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        started, begin = time.thread_time(), loading_clock()
        while time.thread_time() - started < 0.3:
            pass
        computing_s = loading_clock() - begin
        time.sleep(0.2)
        assert computing_s < 0.4
        assert loading_clock() - begin > computing_s + 0.15
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    for index, size in enumerate(["32K", "1024K", "16384K"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_level_bytes(tmp_path) == 16 << 20


def test_a_machine_that_does_not_say_has_some_cache(tmp_path: Path) -> None:
    assert last_level_bytes(tmp_path / "missing") > 1 << 20


def test_windows_hold_no_more_than_they_may_and_part_no_group(spec_of: Any) -> None:
    graph = CapturedJob(spec_of()).training_graph(4)
    names = [node.name for node in graph.operators]
    stage_of = windows(graph, dict.fromkeys(names, 1.0), 2.0)
    assert list(stage_of.values()) == sorted(stage_of.values())
    groups = {name: graph.groups.get(name, name) for name in names}
    for stage in set(stage_of.values()):
        inside = [name for name in names if stage_of[name] == stage]
        assert len(inside) <= 2 or len({groups[name] for name in inside}) < len(inside)
    for group in set(graph.groups.values()):
        assert len({stage_of[name] for name in names if groups[name] == group}) == 1


def test_random_stages_are_runs_and_depend_on_the_seed(spec_of: Any) -> None:
    graph = CapturedJob(spec_of()).training_graph(4)
    found = [random_stages(graph, seed) for seed in range(6)]
    assert found[0] == random_stages(graph, 0)
    assert len({tuple(cut.values()) for cut in found}) > 1
    for cut in found:
        assert list(cut.values()) == sorted(cut.values())
        assert 2 <= len(set(cut.values())) <= 6
    assert set(single_stage(graph).values()) == {0}


def test_neighbours_leave_room_for_those_before_them(
    spec_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = CapturedJob(spec_of())
    gradients = sum(parameter.nbytes for parameter in job.step.parameters())
    memory = psutil.virtual_memory()._replace(available=3 * gradients)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert [has_room(job, place) for place in range(3)] == [True, True, False]


def test_gradients_do_not_stay_between_the_rounds_of_cuts(spec_of: Any) -> None:
    job = CapturedJob(spec_of())
    subject = Subject.of(job, 4, CpuDevice())
    stages = Bench(subject, single_stage(subject.graph))
    stages.run(0)
    assert all(parameter.grad is not None for parameter in job.step.parameters())
    stages.forget()
    assert all(parameter.grad is None for parameter in job.step.parameters())


def test_every_run_finds_the_batch_as_it_was(spec_of: Any) -> None:
    spec = spec_of(data=f"{MODELS}:FromOne", loss=f"{MODELS}:counted_from_one")
    job = CapturedJob(spec)
    subject = Subject.of(job, 4, CpuDevice())
    before = {name: tensor.clone() for name, tensor in subject.batch.items()}
    stages = Bench(subject, random_stages(subject.graph, 0))
    for index in range(len(stages)):
        stages.run(index)
        stages.run_marked(index, Cost(0.0, 0.0))
    assert all(torch.equal(before[name], tensor) for name, tensor in subject.batch.items())


def test_an_optimizer_that_cannot_step_is_named_before_anything_is_measured(
    spec_of: Any,
) -> None:
    spec = spec_of(optimizer={"factory": "torch.optim:LBFGS"})
    totals: list[int] = []
    with pytest.raises(CaptureError, match=r"^optimizer: LBFGS\.step\(\) needs a closure"):
        profile_job(spec, lambda _, total, *__: totals.append(total))
    assert set(totals) == {0}


def walked(spec_of: Any, model: str) -> dict[str, Operator]:
    job = CapturedJob(spec_of(f"{CAPTURED}:{model}"))
    subject = Subject.of(job, 4, CpuDevice())
    return Walk(job, subject, Journal(), None).measure(lambda _: None)


def test_what_is_written_through_a_view_is_found_by_later_readers(spec_of: Any) -> None:
    assert "embedding" in walked(spec_of, "WritesASlice")


def test_what_is_filled_through_a_view_is_kept_for_the_backward(spec_of: Any) -> None:
    saved = walked(spec_of, "Filled")["tanh"].saved
    assert saved == (("tanh", 4 * 6 * 4),)


def test_steps_of_the_optimizer_are_timed_with_gradients(spec_of: Any) -> None:
    optimizer = {"factory": f"{MODELS}:NeedsGradients", "kwargs": {"lr": 0.1}}
    cost = optimizer_cost(CapturedJob(spec_of(optimizer=optimizer)), CpuDevice())
    assert cost.step_s_per_byte > 0


def test_an_optimizer_whose_state_cannot_be_saved_gets_no_profile(spec_of: Any) -> None:
    optimizer = {"factory": f"{MODELS}:KeepsSets", "kwargs": {"lr": 0.1}}
    with pytest.raises(CaptureError, match="/seen is a set, which a checkpoint cannot hold"):
        optimizer_cost(CapturedJob(spec_of(optimizer=optimizer)), CpuDevice())


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
    profile = profile_job(spec_of(f"{MODELS}:AtMostFour", pipeline={}))
    measured = {profile.micro_batch_size, *profile.operators[0].timings}
    assert max(measured) <= 4 < 8
    (said,) = [text for text in profile.assumptions if "were not measured" in text]
    assert said.startswith("micro-batches of 8 were not measured: ")
