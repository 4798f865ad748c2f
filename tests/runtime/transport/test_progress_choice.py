"""How messages travel: which help they get, and whether MPI reads an accelerator's memory."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from pipectl.cluster import Cluster, assumed_cluster
from pipectl.link import Observed
from pipectl.runtime.transport import gpu_aware
from pipectl.runtime.transport.choice import (
    HELPED,
    STAGED,
    Choice,
    Circumstances,
    choose_progress,
    decide,
)
from pipectl.runtime.transport.gpu_aware import Finding, find, judge, passes_self_test
from pipectl.runtime.transport.transfer import WHOLE

MIB = 2**20


def measured(within: tuple[float, float], between: tuple[float, float]) -> Cluster:
    """Small messages are always hidden; of large ones, the shares without and with polling."""
    cluster = assumed_cluster("measured", [2, 2], 2, None)

    def link(name: str, shares: tuple[float, float]) -> Any:
        rows = ((MIB, 1.0, 1.0), (16 * MIB, *shares))
        return replace(getattr(cluster, name), observed=Observed(overlap=rows))

    links = {
        "within_node": link("within_node", within),
        "between_nodes": link("between_nodes", between),
    }
    return replace(cluster, **links)


HARDWARE = measured((0.1, 0.2), (0.9, 1.0))
TCP = measured((0.1, 0.2), (0.0, 0.9))
COPIED_BY_OTHERS = measured((0.0, 0.8), (0.9, 1.0))


@pytest.mark.parametrize(
    ("known", "mode", "words"),
    [
        (Circumstances([1], 16 * MIB), "none", "a single rank"),
        (Circumstances([4], 16 * MIB), "none", "the receiving processor copies"),
        (Circumstances([1, 1], 16 * MIB), "thread", "within its calls alone"),
        (Circumstances([2, 2], 2**15), "none", "KiB, leaves at once"),
        (Circumstances([2, 2], 16 * MIB, cluster=HARDWARE), "none", "between nodes, 90%"),
        (Circumstances([2, 2], 16 * MIB, cluster=TCP), "thread", "0% of a message of 16"),
        (Circumstances([2, 2], 2 * MIB, cluster=TCP), "none", "100% of a message of 1"),
        (Circumstances([2], 16 * MIB, cluster=COPIED_BY_OTHERS), "thread", "and 80% with it"),
    ],
)
def test_help_follows_from_nodes_messages_and_measured_links(
    known: Circumstances, mode: str, words: str
) -> None:
    choice = decide("auto", known, {}, threads=True)
    assert choice.mode == mode, choice
    assert words in choice.why


@pytest.mark.parametrize(
    ("value", "threads", "mode", "words"),
    [
        ("1", True, "none", "by itself (I_MPI_ASYNC_PROGRESS)"),
        ("0", True, "thread", "within its calls alone"),
        ("0", False, "poll", "calls from several threads"),
    ],
)
def test_help_follows_from_what_mpi_does_and_allows(
    value: str, threads: bool, mode: str, words: str
) -> None:
    environment = {"I_MPI_ASYNC_PROGRESS": value}
    choice = decide("auto", Circumstances([1, 1], MIB), environment, threads=threads)
    assert choice.mode == mode
    assert words in choice.why


def test_a_core_is_left_to_a_thread_for_large_messages_alone() -> None:
    assert decide("core", Circumstances([2], 16 * MIB), {}, threads=True).mode == "thread"
    assert decide("core", Circumstances([2], 2**15), {}, threads=True).mode == "none"
    assert decide("core", Circumstances([2, 2], 16 * MIB), {}, threads=False).mode == "poll"


@pytest.mark.parametrize("mode", ["none", "poll", "thread"])
def test_the_job_may_force_a_choice(mode: str) -> None:
    choice = choose_progress(MPI.COMM_SELF, mode, Circumstances([1], 0))
    assert (choice.mode, choice.why) == (mode, "set in the job")


@pytest.mark.parametrize(
    ("mode", "staged", "pieces"),
    [
        ("none", False, WHOLE),
        ("none", True, STAGED),
        ("poll", False, HELPED),
        ("thread", True, HELPED),
    ],
)
def test_pieces_follow_from_the_choice(mode, staged, pieces) -> None:
    with Choice(mode, "").progress(staged=staged) as progress:
        assert (progress.mode, progress.pieces) == (mode, pieces)


def works(_: str) -> bool:
    return True


def fails(_: str) -> bool:
    return False


def never_asked(_: str) -> bool:
    raise AssertionError("there is no need for a test message")


def mpich(kind: Any, answer: Any) -> int:
    """MPIX_GPU_query_support: knows CUDA (0) alone."""
    if kind.value > 1:
        return 1
    ctypes.cast(answer, ctypes.POINTER(ctypes.c_int))[0] = int(kind.value == 0)
    return 0


ABLE, UNABLE = ({"MPIX_Query_cuda_support": lambda answer=answer: answer} for answer in (1, 0))
MPICH = {"MPIX_GPU_query_support": mpich}


@pytest.mark.parametrize(
    ("functions", "kinds", "device", "environment", "test", "able", "words"),
    [
        (ABLE, None, "cuda", {}, works, True, ""),
        (ABLE, None, "cuda", {}, fails, False, "can, but a test message does not arrive"),
        (UNABLE, None, "cuda", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, never_asked, False, ""),
        (MPICH, None, "cuda", {}, works, True, ""),
        (MPICH, None, "xpu", {}, never_asked, False, ""),
        (MPICH, None, "rocm", {"MV2_USE_ROCM": "1"}, works, True, "MV2_USE_ROCM says"),
        # Without a function, a list of kinds of memory counts, and then the environment.
        ({}, "mpi,system,cuda:device", "cuda", {}, works, True, ""),
        ({}, "mpi,system", "cuda", {"PSP_CUDA": "1"}, never_asked, False, ""),
        ({}, None, "cuda", {"PSP_CUDA": "1"}, works, True, ""),
        ({}, None, "cuda", {"MPICH_GPU_SUPPORT_ENABLED": "0"}, never_asked, False, ""),
        ({}, None, "cuda", {}, never_asked, False, ""),
    ],
)
def test_who_is_asked_and_believed(
    monkeypatch, functions, kinds, device, environment, test, able, words
) -> None:
    info = {} if kinds is None else {"mpi_memory_alloc_kinds": kinds}
    world = SimpleNamespace(Get_info=lambda: info)
    monkeypatch.setattr(gpu_aware, "_library", lambda: SimpleNamespace(**functions))
    monkeypatch.setattr(gpu_aware, "MPI", SimpleNamespace(COMM_WORLD=world))
    finding = judge(device, environment, test)
    assert finding.able is able
    assert words in finding.why


@pytest.mark.parametrize("wanted", ["always", "never"])
def test_the_job_may_decide(wanted: str) -> None:
    finding = find(MPI.COMM_SELF, wanted, asks=True)
    assert (finding.able, finding.why) == (wanted == "always", "set in the job")


@pytest.mark.parametrize(
    ("asks", "test", "other", "able"),
    [(True, works, False, False), (True, fails, True, False), (False, never_asked, True, True)],
)
def test_a_rank_that_cannot_decides_for_all_and_not_all_send_a_test_message(
    monkeypatch, asks, test, other, able
) -> None:
    monkeypatch.setattr(gpu_aware, "_library", lambda: SimpleNamespace(**ABLE))
    monkeypatch.setattr(gpu_aware, "_kind", lambda: "cuda")
    monkeypatch.setattr(gpu_aware, "passes_self_test", test)
    world: Any = SimpleNamespace(
        allgather=lambda mine: [mine, Finding(other, "there")],
        Ibarrier=lambda: MPI.Request(MPI.REQUEST_NULL),
    )
    assert find(world, "auto", asks=asks).able is able


def test_rocm_is_called_cuda_by_torch(monkeypatch) -> None:
    asked: list[str] = []
    library = SimpleNamespace(MPIX_Query_rocm_support=lambda: 1)
    monkeypatch.setattr(gpu_aware, "_library", lambda: library)
    judge("rocm", {}, lambda device: not asked.append(device))  # type: ignore[func-returns-value]
    assert asked == ["cuda"]


@pytest.mark.mpi
def test_the_test_message_is_sent_by_a_process_of_its_own(monkeypatch, warm_python) -> None:
    monkeypatch.setattr("sys.executable", warm_python)
    assert passes_self_test("cpu")
    assert not passes_self_test("a device that torch does not know")
    monkeypatch.setattr(gpu_aware, "_MODULE", "faulthandler_that_is_not_there")
    assert not passes_self_test("cpu")
