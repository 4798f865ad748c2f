"""What measures: marks in a stage's code, neighbours on the node, clocks and partitions."""

from __future__ import annotations

import itertools
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
from torch import fx

from pipectl.capture import CapturedJob, Cut
from pipectl.capture.randomness import seed_operator
from pipectl.capture.stage import StageCode
from pipectl.profiler.bench import (
    Bench,
    Cost,
    MarkedCode,
    Subject,
    cost_of_measuring,
    fit_clocks,
    random_stages,
    single_stage,
    windows,
)
from pipectl.profiler.machine import clock_for, last_level_bytes, loading_clock
from pipectl.profiler.neighbours import Neighbours, has_room, neighbour_count
from pipectl.runtime.device import CpuDevice
from pipectl.spec import dump
from tests.profiler import models


def ticking() -> Any:
    """A clock that shows one second more at every look."""
    count = itertools.count()
    return lambda: float(next(count))


def measured(x: torch.Tensor, cost: Cost) -> tuple[torch.Tensor, MarkedCode]:
    """The result of a chain of operators, after its backward if it has one."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    doubled = graph.call_function(torch.mul, (given, 2.0), name="double")
    graph.call_function(seed_operator, (1, 2))
    squared = graph.call_function(torch.square, (doubled,), name="square")
    graph.output((graph.call_function(torch.add, (squared, doubled), name="add"),))
    code = StageCode(fx.GraphModule({}, graph), (), (), (), ())
    marked = MarkedCode(code, {"double", "square", "add"}, ticking(), cost)
    (result,) = marked(x)
    marked.watch_backward()
    if result.requires_grad:
        result.backward()
    return result, marked


THREE = torch.tensor(3.0)
LEAF = THREE.clone().requires_grad_()


@pytest.mark.parametrize(
    ("x", "cost", "forward_s", "backward_s"),
    [
        # The last backward lasts up to the end; a node is one look at the clock.
        pytest.param(LEAF, Cost(0.0, 0.0), 1.0, [94.0, 1.0, 1.0], id="a leaf"),
        pytest.param(LEAF.exp(), Cost(0.0, 0.0), 1.0, [1.0] * 3, id="what was before is nobody's"),
        pytest.param(LEAF, Cost(0.25, 5.0), 0.75, [89.0, 0.0, 0.0], id="costs are taken off"),
        pytest.param(THREE, Cost(0.0, 0.0), 1.0, [0.0] * 3, id="no gradients"),
    ],
)
def test_marked_code_gives_the_same_and_the_times_of_its_parts(
    x: Any, cost: Cost, forward_s: float, backward_s: list[float]
) -> None:
    LEAF.grad = None
    result, marked = measured(x, cost)
    assert x is not LEAF or (result.item(), x.grad.item()) == (42.0, 26.0)
    expected = zip(("double", "square", "add"), backward_s, strict=True)
    assert marked.spent(100.0) == {name: (forward_s, found_s) for name, found_s in expected}


def test_marks_and_hooks_cost_as_much_as_a_look_at_the_clock() -> None:
    cost = cost_of_measuring(ticking())
    assert (cost.mark_s, cost.hook_s) == pytest.approx((1.0, 1.0), rel=0.1)


@pytest.mark.parametrize(
    ("resources", "cores", "scheduler", "count"),
    [
        ({"tasks_per_node": 4}, 8, "local", 3),
        ({"tasks_per_node": 64}, 2, "local", 3),
        ({"tasks_per_node": 4}, 2, "slurm", 1),
        ({"tasks_per_node": 4, "cpus_per_task": 2}, 8, "local", 3),
        ({"tasks_per_node": 4, "cpus_per_task": 2}, 4, "local", 1),
        ({"tasks_per_node": 1}, 8, "local", 0),
        ({"tasks_per_node": 4, "gpus_per_node": 4}, 8, "local", 0),
        ({"tasks_per_node": 2, "cpus_per_task": 4}, 2, "local", 0),
    ],
)
def test_as_many_neighbours_as_other_ranks_of_the_node(
    resources: dict[str, int], cores: int, scheduler: str, count: int, spec_of: Any
) -> None:
    assert neighbour_count(spec_of(resources=resources), cores, scheduler) == count


def test_a_profile_says_that_a_neighbour_failed_which_says_nothing_itself(
    spec_of: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    noise = "import multiprocessing\nif multiprocessing.parent_process(): print('beside')\n"
    fails = "def fails():\n    raise RuntimeError('no weights here')\n"
    (tmp_path / "noisy.py").write_text(noise + fails)
    spec = spec_of(f"{tmp_path}/noisy.py:fails", resources={"tasks_per_node": 2})
    with Neighbours(spec, 4) as neighbours:
        neighbours.wait()
        assert neighbours.computing == 0
        (assumption,) = neighbours.assumptions
    assert "failed to start" in assumption
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


@pytest.mark.torture
def test_no_neighbour_outlives_a_measuring_process_that_is_killed_while_it_starts(
    spec_of: Any, tmp_path: Path
) -> None:
    (tmp_path / "killed.py").write_text(KILLED_AT_ONCE)
    (tmp_path / "job.yaml").write_text(dump(spec_of(resources={"tasks_per_node": 2})))
    command = [sys.executable, str(tmp_path / "killed.py"), str(tmp_path / "job.yaml")]
    started = int(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(started)
        assert psutil.wait_procs([process], timeout=120)[1] == []


def test_neighbours_leave_room_for_those_before_them(
    spec_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = CapturedJob(spec_of())
    gradients = sum(parameter.nbytes for parameter in job.wrapper.parameters())
    memory = psutil.virtual_memory()._replace(available=3 * gradients)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert [has_room(job, place) for place in range(3)] == [True, True, False]


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count waiting"
)
def test_loading_takes_no_longer_while_others_use_the_core_but_waits_for_a_disk() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        started, begin, wall = time.thread_time(), loading_clock(), time.monotonic()
        passed_s = computed_s = 0.0
        while computed_s < 0.3 or passed_s < 1.5 * computed_s:  # until the other had its share
            computed_s, passed_s = time.thread_time() - started, time.monotonic() - wall
        loading_s = loading_clock() - begin
        assert loading_s < 0.8 * passed_s
        time.sleep(0.2)
        assert loading_clock() - begin > loading_s + 0.15
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)


def test_the_largest_cache_counts_and_a_machine_that_does_not_say_has_some(tmp_path: Path) -> None:
    for index, size in enumerate(["32K", "1024K", "16384K"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_level_bytes(tmp_path) == 16 << 20
    assert last_level_bytes(tmp_path / "missing") > 1 << 20


def test_partitions_for_measuring_part_no_group_and_leave_no_gradients(spec_of: Any) -> None:
    job = CapturedJob(spec_of())
    subject = Subject.of(job, 4, CpuDevice())
    graph = subject.graph
    at_random = [random_stages(graph, seed) for seed in range(6)]
    in_windows = windows(graph, dict.fromkeys(graph.position, 1.0), 2.0)
    for stage_of in (*at_random, in_windows):
        Cut(graph, stage_of, training=True)  # it refuses any other
    assert all(2 <= len(set(stage_of.values())) <= 6 for stage_of in at_random)
    assert at_random[0] == random_stages(graph, 0)
    assert len({tuple(stage_of.values()) for stage_of in at_random}) > 1
    for members in map(list(in_windows.values()).count, set(in_windows.values())):
        assert members <= 2
    bench = Bench(subject, single_stage(graph))
    bench.run(0)
    assert all(parameter.grad is not None for parameter in job.wrapper.parameters())
    bench.forget()
    assert all(parameter.grad is None for parameter in job.wrapper.parameters())


def test_operators_that_wait_or_have_threads_of_their_own_take_that_time(spec_of: Any) -> None:
    """On a CPU with one thread, the processor time of the calling thread would leave it out."""
    torch.set_num_threads(1)
    device = CpuDevice()
    subject = Subject.of(CapturedJob(spec_of("Waits")), 4, device)
    bench = Bench(subject, single_stage(subject.graph))
    fit_clocks(device, [bench])
    forward_s, backward_s, _ = bench.run(0)
    assert min(forward_s, backward_s) >= models.WAITS_S
    (name,) = (name for name in subject.graph.position if "wait" in name)
    assert min(bench.run_marked(0, Cost(0.0, 0.0))[name]) >= models.WAITS_S
    x = torch.randn(256, 256)
    assert clock_for(device, lambda: [x @ x for _ in range(9)]) is time.thread_time
