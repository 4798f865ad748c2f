"""Which help messages get: by rule, the same in every run of a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from mpi4py import MPI

from pipectl.cluster import Cluster, assumed_cluster
from pipectl.link import Observed
from pipectl.runtime.transport.choice import (
    HELPED,
    STAGED,
    Choice,
    Circumstances,
    choose_progress,
    decide,
)
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
        (Circumstances([2, 2], 16 * MIB, threads=False), "poll", "calls from several threads"),
        (Circumstances([2, 2], 2**15), "none", "KiB, leaves at once"),
        (
            Circumstances([1, 1], MIB, environment={"I_MPI_ASYNC_PROGRESS": "1"}),
            "none",
            "by itself (I_MPI_ASYNC_PROGRESS)",
        ),
        (Circumstances([1, 1], MIB, environment={"I_MPI_ASYNC_PROGRESS": "0"}), "thread", "calls"),
        (Circumstances([2, 2], 16 * MIB, cluster=HARDWARE), "none", "between nodes, 90%"),
        (Circumstances([2, 2], 16 * MIB, cluster=TCP), "thread", "0% of a message of 16"),
        (Circumstances([2, 2], 2 * MIB, cluster=TCP), "none", "100% of a message of 1"),
        (Circumstances([2], 16 * MIB, cluster=COPIED_BY_OTHERS), "thread", "and 80% with it"),
    ],
)
def test_help_follows_from_nodes_messages_and_measured_links(
    known: Circumstances, mode: str, words: str
) -> None:
    choice = decide("auto", known)
    assert choice.mode == mode, choice
    assert words in choice.why


def test_a_core_is_left_to_a_thread_for_large_messages_alone() -> None:
    assert decide("core", Circumstances([2], 16 * MIB)).mode == "thread"
    assert decide("core", Circumstances([2], 2**15)).mode == "none"
    assert decide("core", Circumstances([2, 2], 16 * MIB, threads=False)).mode == "poll"


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
