"""How messages travel: which help they get, and whether MPI reads an accelerator's memory."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI

from pipectl.cluster import Cluster, assumed_cluster
from pipectl.link import Observed
from pipectl.runtime import before_mpi
from pipectl.runtime.transport import gpu_aware
from pipectl.runtime.transport.choice import HELPED, STAGED_BYTES, Circumstances, decide
from pipectl.runtime.transport.gpu_aware import Finding, find, judge, passes_self_test
from pipectl.runtime.transport.transfer import WHOLE

MIB = 2**20


def measured(within: tuple[float, float], between: tuple[float, float]) -> Cluster:
    """Small messages are always hidden; of large ones, the shares without and with calls of MPI."""
    cluster = assumed_cluster("measured", [2, 2], 2, None)
    inner, outer = (
        replace(link, observed=Observed(overlap=((MIB, 1.0, 1.0), (16 * MIB, *shares))))
        for link, shares in ((cluster.within_node, within), (cluster.between_nodes, between))
    )
    return replace(cluster, within_node=inner, between_nodes=outer)


HARDWARE = measured((0.1, 0.2), (0.9, 1.0))
TCP = measured((0.1, 0.2), (0.0, 0.9))
COPIED_BY_OTHERS = measured((0.0, 0.8), (0.9, 1.0))
NO_THREADS = "calls from several threads"


@pytest.mark.parametrize(
    ("wanted", "ranks_per_node", "kib", "cluster", "own", "threads", "mode", "words"),
    [
        ("auto", [1], 16384, None, "0", True, "none", "a single rank"),
        ("auto", [4], 16384, None, "0", True, "none", "the receiving processor copies"),
        ("auto", [1, 1], 16384, None, "0", True, "thread", "within its calls alone"),
        ("auto", [1, 1], 16384, None, "0", False, "none", NO_THREADS),
        ("auto", [1, 1], 16384, None, "1", True, "none", "by itself (I_MPI_ASYNC_PROGRESS)"),
        ("auto", [2, 2], 32, None, "0", True, "none", "KiB, leaves at once"),
        ("auto", [2, 2], 16384, HARDWARE, "0", True, "none", "between nodes, 90%"),
        ("auto", [2, 2], 16384, TCP, "0", True, "thread", "0% of a message of 16"),
        ("auto", [2, 2], 2048, TCP, "0", True, "none", "100% of a message of 1"),
        ("auto", [2], 16384, COPIED_BY_OTHERS, "0", True, "thread", "and 80% with it"),
        # A core is left to a thread for large messages alone.
        ("core", [2], 16384, None, "0", True, "thread", "leaves it a core"),
        ("core", [2], 32, None, "0", True, "none", "leaves at once"),
        ("core", [2, 2], 16384, None, "0", False, "none", NO_THREADS),
        ("none", [1, 1], 16384, None, "0", True, "none", "set in the job"),
        ("thread", [1], 0, None, "1", True, "thread", "set in the job"),
        ("thread", [1], 0, None, "1", False, "none", NO_THREADS),
    ],
)
def test_help_and_pieces_follow_from_the_job_its_machines_and_what_mpi_does_and_allows(
    wanted, ranks_per_node, kib, cluster, own, threads, mode, words
) -> None:
    known = Circumstances(ranks_per_node, 1024 * kib, cluster)
    choice = decide(wanted, known, {"I_MPI_ASYNC_PROGRESS": own}, threads=threads)
    assert choice.mode == mode, choice
    assert words in choice.why
    usual = WHOLE if mode == "none" else HELPED
    for staged, pieces in ((False, usual), (True, replace(usual, size_bytes=STAGED_BYTES))):
        with choice.progress(staged=staged) as progress:
            assert progress.mode == mode
            assert progress.pieces == pieces


def mpich(kind: Any, answer: Any) -> int:
    """MPIX_GPU_query_support: knows CUDA (0) alone."""
    if kind.value > 1:
        return 1
    ctypes.cast(answer, ctypes.POINTER(ctypes.c_int))[0] = int(kind.value == 0)
    return 0


ABLE, UNABLE = ({"MPIX_Query_cuda_support": lambda answer=answer: answer} for answer in (1, 0))
MPICH = {"MPIX_GPU_query_support": mpich}
ROCM = {"MPIX_Query_rocm_support": lambda: 1}
ON, OFF = {"PSP_CUDA": "1"}, {"MPICH_GPU_SUPPORT_ENABLED": "0"}


@pytest.mark.parametrize(
    ("functions", "kinds", "device", "environment", "arrives", "able", "words"),
    [
        (ABLE, None, "cuda", {}, True, True, ""),
        (ABLE, None, "cuda", {}, False, False, "can, but a test message does not arrive"),
        (UNABLE, None, "cuda", ON, None, False, ""),
        (MPICH, None, "cuda", {}, True, True, ""),
        (MPICH, None, "xpu", {}, None, False, ""),
        (MPICH, None, "rocm", {"MV2_USE_ROCM": "1"}, True, True, "MV2_USE_ROCM says"),
        (ROCM, None, "rocm", {}, True, True, ""),
        # Without a function, a list of kinds of memory counts, and then the environment.
        ({}, "mpi,system,cuda:device", "cuda", {}, True, True, ""),
        ({}, "mpi,system", "cuda", ON, None, False, ""),
        ({}, None, "cuda", ON, True, True, ""),
        ({}, None, "cuda", OFF, None, False, ""),
        ({}, None, "cuda", {}, None, False, ""),
    ],
)
def test_who_is_asked_and_believed(
    monkeypatch, functions, kinds, device, environment, arrives, able, words
) -> None:
    """Only a yes needs a test message, whose device torch calls CUDA also if it is of ROCm."""
    info = {"mpi_memory_alloc_kinds": kinds} if kinds else {}
    world = SimpleNamespace(Get_info=lambda: info)
    monkeypatch.setattr(gpu_aware, "_library", lambda: SimpleNamespace(**functions))
    monkeypatch.setattr(gpu_aware, "MPI", SimpleNamespace(COMM_WORLD=world))
    asked: list[str] = []

    def test(device: str) -> bool:
        asked.append(device)
        return arrives

    finding = judge(device, environment, test)
    assert finding.able is able
    assert words in finding.why
    assert asked == ([] if arrives is None else ["cuda"])


@pytest.mark.parametrize(
    ("wanted", "asks", "arrives", "other", "able"),
    [
        ("auto", True, True, False, False),
        ("auto", True, False, True, False),
        ("auto", False, None, True, True),
        ("always", True, None, False, True),
        ("never", True, None, True, False),
    ],
)
def test_the_job_or_a_rank_that_cannot_decides_for_all_and_not_all_send_a_test_message(
    monkeypatch, wanted, asks, arrives, other, able
) -> None:
    monkeypatch.setattr(gpu_aware, "_library", lambda: SimpleNamespace(**ABLE))
    monkeypatch.setattr(gpu_aware, "_kind", lambda: "cuda")
    tests = iter([] if arrives is None else [arrives])  # none if there is no need for a message
    monkeypatch.setattr(gpu_aware, "passes_self_test", lambda _: next(tests))
    there = Finding(other, "there")
    monkeypatch.setattr(gpu_aware, "gather_all", lambda _, mine: [mine, there])
    found = find(MPI.COMM_SELF, wanted, asks=asks)
    assert found.able is able
    assert (found.why == "set in the job") is (wanted != "auto")


@pytest.mark.mpi
def test_the_test_message_is_sent_by_a_process_of_its_own(monkeypatch, warm_python) -> None:
    monkeypatch.setattr("sys.executable", warm_python)
    assert passes_self_test("cpu")
    assert not passes_self_test("a device that torch does not know")
    monkeypatch.setattr(gpu_aware, "_MODULE", "faulthandler_that_is_not_there")
    assert not passes_self_test("cpu")


def test_ranks_try_messages_between_each_other(monkeypatch) -> None:
    """What a device can send to itself may arrive damaged elsewhere."""
    finding, cpu = Finding(True, "MPI says so"), torch.device("cpu")
    assert gpu_aware.confirm(MPI.COMM_SELF, finding, [(0, 0)], cpu) == finding
    values = count()
    monkeypatch.setattr(
        gpu_aware, "_random", lambda size, _: torch.full((size,), next(values), dtype=torch.uint8)
    )
    changed = gpu_aware.confirm(MPI.COMM_SELF, finding, [(0, 0)], cpu)
    assert not changed.able
    assert changed.why.endswith("a test message from rank 0 to rank 0 arrives with other bytes")


@pytest.mark.parametrize(
    ("environment", "local_rank"),
    [
        ({"SLURM_LOCALID": "3"}, 3),
        ({"SLURM_LOCALID": "0", "MPI_LOCALRANKID": "2"}, 2),  # mpiexec within a step
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "x", "PALS_LOCAL_RANKID": "1"}, 1),
        ({}, None),
    ],
)
def test_launchers_say_which_rank_of_its_node_a_process_is(environment, local_rank) -> None:
    assert before_mpi.local_rank(environment) == local_rank


def test_a_rank_chooses_its_accelerator_before_mpi_begins(monkeypatch) -> None:
    chosen = list[int]()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(os, "environ", {"MPI_LOCALRANKID": "5", "FI_EFA_FORK_SAFE": "0"})
    for accelerators, workers in ((0, 0), (2, 0), (8, 2)):
        data, resources = (
            {"workers": workers, "is_of_script": False},
            {"gpus_per_node": accelerators},
        )
        spec = SimpleNamespace(data=SimpleNamespace(**data), resources=SimpleNamespace(**resources))
        monkeypatch.setattr(before_mpi, "load", lambda _, spec=spec: spec)
        before_mpi.prepare(["worker", "--run", "run"])
    assert chosen == [1, 1]
    assert os.environ["RDMAV_FORK_SAFE"] == "1"
    assert os.environ["FI_EFA_FORK_SAFE"] == "0"  # what the user sets stays


def test_errors_of_files_wait_until_the_ranks_have_met(tmp_path) -> None:
    before_mpi.prepare(["worker", "--run", str(tmp_path)])
    before_mpi.prepare(["worker", "--run"])
    before_mpi.prepare(["worker"])
