"""The share of its cores that a rank gets, and who is said to have the rest."""

import errno
import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from mpi4py import MPI

from pipectl.runtime import processor
from pipectl.runtime.processor import (
    Limit,
    ProcessorMeter,
    ProcessorShare,
    Sample,
    make_meter,
    share_between,
)

GROUP = Path("/sys/fs/cgroup")
START = Sample(0.0, 0.0, {}, 0.0, 0.0, 0.0, {GROUP: Limit(1.5, 0.0)})
ALL = ProcessorShare(1.0)


def after(**counted):
    return replace(START, time_s=10.0, **counted)


CASES = {
    "a quiet machine": (after(own_s=8.0, used_s=8.2), 8.0, 8.0, 1, ALL),
    "another process computes on the rank's core": (
        after(main_delay_s=6.0, own_s=2.0, used_s=10.0), 8.0, 2.0, 1,
        ProcessorShare(0.25, "processes"),
    ),
    "it computes on another core of several": (
        after(main_delay_s=0.1, own_s=8.0, used_s=18.0), 8.0, 7.9, 1, ALL,
    ),
    "ranks that wait look for messages, and yield": (
        after(main_delay_s=6.0, own_s=4.0, used_s=10.0), 2.0, 2.0, 1, ALL,
    ),
    "ranks that wait sleep": (after(own_s=2.0, used_s=2.1), 2.0, 2.0, 1, ALL),
    "a forward waits for its data": (after(own_s=2.0, used_s=9.0), 8.0, 2.0, 1, ALL),
    "two ranks take turns on one core": (
        after(main_delay_s=4.0, own_s=10.0, used_s=10.2), 9.0, 5.0, 2, ALL,
    ),
    "and another process takes a third of it": (
        after(main_delay_s=6.0, own_s=6.67, used_s=10.0), 9.0, 3.0, 2,
        ProcessorShare(3.0 / 4.665, "processes"),
    ),
    "more threads than cores": (
        after(main_delay_s=5.0, threads={7: (5.0, 5.0)}, own_s=10.0, used_s=10.0), 10.0, 5.0, 1,
        ALL,
    ),
    "only the core of a further thread is taken, for which the rank spins": (
        after(threads={7: (5.0, 5.0)}, own_s=15.0, used_s=20.0), 10.0, 10.0, 1,
        ProcessorShare(0.75, "processes"),
    ),
    "a control group stops the rank": (
        after(main_delay_s=5.0, own_s=5.0, used_s=5.0, limits={GROUP: Limit(0.5, 5.0)}), 10.0, 5.0,
        1, ProcessorShare(0.5, "limit", 0.5),
    ),
    "a hypervisor takes a third of the core": (
        after(own_s=6.0, used_s=6.0, stolen_s=3.0), 9.0, 6.0, 1,
        ProcessorShare(6.0 / 9.0, "hypervisor"),
    ),
    "others took half of what little was to compute": (
        after(main_delay_s=0.1, own_s=0.1, used_s=10.0), 0.2, 0.1, 1, ALL,
    ),
}  # fmt: skip
"""What was counted in ten seconds, time in forwards and backwards, ranks on these cores, share."""


@pytest.mark.parametrize("case", CASES)
def test_only_what_others_took_while_the_rank_computed_counts(case):
    now, busy_s, busy_cpu_s, ranks, expected = CASES[case]
    found = share_between(START, now, busy_s, busy_cpu_s, ranks)
    assert found.share == pytest.approx(expected.share)
    assert found[1:] == expected[1:]


@pytest.fixture
def one_core():
    cores = os.sched_getaffinity(0)
    core = min(cores)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, cores)


HOG = f"exec {sys.executable} -c 'while True: pass' >&- 2>&- & echo $!"


def test_a_process_on_the_core_of_a_rank_is_found(one_core, monkeypatch):
    """It is no child of the rank: its parent has ended."""
    monkeypatch.setattr(processor, "INTERVAL_S", 0.3)
    started = subprocess.run(["sh", "-c", HOG], stdout=subprocess.PIPE, check=True)
    try:
        meter = make_meter(MPI.COMM_SELF)
        found = meter.measure(0.0, 0.0)
        assert found == ProcessorShare(), "not known yet"
        for _ in range(2):  # other tests may have started a child meanwhile
            begin, cpu = time.perf_counter(), time.thread_time()
            while time.perf_counter() < begin + 0.4:
                pass
            found = meter.measure(time.perf_counter() - begin, time.thread_time() - cpu)
            if found.lost_to is not None:
                break
    finally:
        os.kill(int(started.stdout), signal.SIGKILL)
    assert found.lost_to == "processes"
    assert 0.05 < found.share < 1


LINES = {
    2: ("0::/job/step", "30 1 0:9 /job {0}/cg rw - cgroup2 cgroup2 rw"),
    1: ("3:cpu,cpuacct:/job/step", "30 1 0:9 / {0}/cg rw - cgroup cgroup rw,cpu,cpuacct"),
}
GROUPS = {
    2: {"step/cpu.max": "max 100000", "cpu.max": "150000 100000", "cpu.stat": "throttled_usec 7e6"},
    1: {
        "job/cpu.cfs_quota_us": "150000", "job/cpu.cfs_period_us": "100000",
        "job/cpu.stat": "nr_throttled 9\nthrottled_time 7000000000", "cpu.cfs_quota_us": "-1",
        "cpu.cfs_period_us": "100000", "cpu.stat": "nr_throttled 0",
    },
}  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_both_kinds_of_control_groups_are_read(tmp_path, version):
    """The mount of one is of the whole tree, that of the other of the job, as in a container."""
    cores, thread = "cpu  9\ncpu0 100 0 50 900 9 1 1 300 0 0\ncpu1 1 1 1 1 1 1 1 1\n", os.getpid()
    group, mount = LINES[version]
    files = {
        "proc/stat": cores, f"proc/self/task/{thread}/schedstat": "4000000000 1500000000 7\n",
        "proc/self/task/1/schedstat": "1000000000 0 3\n", "proc/self/cgroup": group,
        "proc/self/mountinfo": f"29 1 0:8 / /proc rw - proc proc rw\n{mount.format('')}\n",
        **{f"cg/{name}": text.replace("7e6", "7000000") for name, text in GROUPS[version].items()},
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sample = ProcessorMeter([thread], {0}, tmp_path)._before
    assert sample is not None
    assert (sample.main_delay_s, sample.threads) == (1.5, {1: (1.0, 0.0)})
    assert (sample.used_s, sample.stolen_s) == (1.52, 3.0)
    assert list(sample.limits.values()) == [Limit(1.5, 7.0)]
    assert ProcessorMeter([thread], {0}, tmp_path / "none").measure(1, 1).share is None


def test_processes_that_end_while_they_are_looked_at_are_left_out(tmp_path, monkeypatch):
    """The kernel says of a file that was there: no such process."""
    for pid, parent in ((1, 0), (7, 1), (8, 1), (9, 8)):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/stat").write_text(f"{pid} (a) b) S {parent} 1 1")
    has_ended = {tmp_path / "proc/7/stat"}

    def unless_ended(call):
        def asked(path, *arguments, **options):
            if Path(path) in has_ended:
                raise ProcessLookupError(errno.ESRCH, "No such process", str(path))
            return call(path, *arguments, **options)

        return asked

    monkeypatch.setattr(os, "stat", unless_ended(os.stat))
    monkeypatch.setattr(io, "open", unless_ended(io.open))
    assert ProcessorMeter([1], {0}, tmp_path)._own_s.keys() == {1, 8, 9}
