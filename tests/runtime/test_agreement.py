"""Ranks agree on what they are, where they are and what they run, or end before training."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from pipectl import __version__
from pipectl.errors import MismatchError
from pipectl.plan import Plan
from pipectl.runs import RunDirectory, read_errors, read_metrics
from pipectl.runtime import device
from pipectl.runtime.agreement import check_accelerators, misplaced, sharing_ranks

PROGRAM = Path(__file__).with_name("changed_ranks.py")


@pytest.mark.mpi
def test_what_differs_is_named_with_both_sides_before_training(make_run, launch) -> None:
    """Rank 1 sees a copy of the run, which does not stay one."""
    mine = make_run(2)
    theirs = RunDirectory(mine.path.with_name("copy"))
    shutil.copytree(mine.path, theirs.path)
    runs = (mine, theirs)

    def refused(words: str, change: str = "") -> None:
        done = launch(2, PROGRAM, change, *(run.path for run in runs))
        assert done.returncode != 0, done.stderr  # the launcher may kill the second rank to end
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        reports = [report for run in runs for report in read_errors(run.start)]
        assert {(report.type, report.exit_code) for report in reports} == {("MismatchError", 3)}
        assert all(words in report.message and report.hint for report in reports)
        for run in runs:
            assert read_metrics(run) == []
            for file in run.start.errors.iterdir():
                file.unlink()

    versions = [("pipectl", __version__), ("torch", torch.__version__)]
    told = "; ".join(f"{name} 0.0.7, not {version}" for name, version in versions)
    refused(f" has {told}, as rank 0 on ", "pipectl,pytorch")
    refused("rank 1 runs another pipectl than rank 0", "stranger")
    refused(
        "has a different model from the other ranks and plan.json: "
        "operator 4, 'linear_2', has other arguments here than there",
        "deeper",
    )
    job = mine.job.read_text().replace("gpus_per_node: 0", "gpus_per_node: 1")
    for run in runs:
        run.job.write_text(job)
    refused("sees an accelerator of type cuda, but rank 0 on ", "accelerator")
    plan = Plan.load(theirs.plan)
    first, second = plan.stages  # an operator moves, while all messages keep their sizes
    less = replace(first, nodes=first.nodes[:-2])
    more = replace(second, nodes=(*first.nodes[-2:], *second.nodes))
    replace(plan, stages=(less, more)).save(theirs.plan)
    theirs.job.write_text(job.replace("steps: 5", "steps: 6"))
    refused(" has another job.yaml; another plan.json, as rank 0 on ")
    runs = (make_run(2, pipeline={"micro_batches": 2, "stages": 1, "replicas": 2}),)
    refused(
        "model: the initial value of 'layers.0.0.weight' is another on rank 1 than on rank 0, "
        "which both hold it",
        "reseeded",
    )
    parts = Path(__file__).with_name("job_parts.py")
    replicas = {"pipeline": {"micro_batches": 2, "stages": 1, "replicas": 2}}
    runs = (make_run(2, model={"factory": f"{parts}:Unseeded"}, **replicas),)
    refused(f"model: the tensor 'scale' (at {parts}:")


@pytest.mark.parametrize(
    ("nodes", "node_of_rank", "words"),
    [
        ([[0, 1], [2, 3]], (0, 0, 1, 1), ""),
        ([[0, 1, 2], [3]], (5, 5, 5, 7), ""),
        ([[0, 2], [1, 3]], (0, 0, 1, 1), "has the ranks 0, 2, where the plan counts on 0-1"),
        ([[0, 1, 2, 3]], (0, 0, 1, 1), "has the ranks 0-3, where the plan counts on 0-1"),
        ([[0, 1], [2], [3]], (0, 0, 1, 1), "has the ranks 2, where the plan counts on 2-3"),
    ],
)
def test_the_first_node_that_differs_from_the_plan_is_named(nodes, node_of_rank, words) -> None:
    said = misplaced(nodes, node_of_rank)
    assert words in said
    assert bool(said) == bool(words)


@pytest.mark.parametrize(
    ("asked", "seen", "taken"),
    [
        (4, 4, [0, 1, 2, 3]),
        (2, 2, [0, 1, 0, 1]),
        (8, 8, [0, 1, 2, 3]),
        (4, 1, [0, 0, 0, 0]),  # each rank is shown its own, always under the number 0
        (2, 4, [0, 1, 0, 1]),
    ],
)
def test_ranks_of_a_node_take_turns(monkeypatch, asked, seen, taken) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: seen)
    monkeypatch.setattr(device, "AcceleratorDevice", lambda index, in_place: index)
    assert [device.choose_device(asked, local) for local in range(4)] == taken


def test_accelerators_that_lack_or_are_shared_are_named(monkeypatch) -> None:
    """A job for accelerators does not fall back to the CPU."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(MismatchError, match="torch finds none on"):  # where it is profiled
        device.choose_device(1, 0)
    with pytest.raises(MismatchError, match="no rank sees an accelerator"):
        check_accelerators(MPI.COMM_SELF)
    places = [("a", "x"), None, ("a", "y"), ("b", "x"), None, ("a", "y"), ("a", "x")]
    assert sharing_ranks(places) == (2, 5)
    assert sharing_ranks(places[:5]) is None
