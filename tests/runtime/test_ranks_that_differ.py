"""Ranks that were started with other versions, files or models than each other end before training.

Each rank gets a run directory of its own, as on nodes that do not see the same file system.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl import __version__
from pipectl.plan import Plan
from pipectl.runs import RunDirectory, read_errors, read_metrics

pytestmark = pytest.mark.mpi
HERE = Path(__file__).parent
PROGRAM = HERE / "rank_of_its_own.py"


@pytest.fixture
def two(make_spec: Any, make_run: Any) -> tuple[RunDirectory, RunDirectory]:
    """The same run twice: what rank 0 sees, and what rank 1 does."""
    run = make_run(make_spec(2))
    copy = run.path.with_name("copy")
    shutil.copytree(run.path, copy)
    return run, RunDirectory(copy)


@pytest.fixture
def refused(launch: Any, two: Any) -> Any:
    """``refused(words)``: both ranks end with code 3 and the words, and neither has trained."""

    def check(words: str, *change: str) -> None:
        done = launch(2, PROGRAM, *(run.path for run in two), *change)
        assert done.returncode == 3, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        reports = [report for run in two for report in read_errors(run)]
        assert reports
        assert {report.type for report in reports} == {"MismatchError"}
        assert all(words in report.message and report.cure for report in reports)
        for run in two:
            assert read_metrics(run) == []
            for file in run.errors.iterdir():
                file.unlink()

    return check


def test_what_differs_is_named_with_both_sides(two: Any, refused: Any) -> None:
    versions = [("pipectl", __version__), ("torch", torch.__version__)]
    told = "; ".join(f"{name} 0.0.7, not {mine}" for name, mine in versions)
    refused(f" has {told}, as rank 0 on ", "pipectl", "torch")
    refused("rank 1 runs another pipectl than rank 0", "stranger")
    refused(
        "has a different model from the other ranks and plan.json: "
        "operator 4, 'linear_2', has other arguments here than there",
        "deeper",
    )
    move_an_operator(two[1])
    text = two[1].job.read_text()
    assert "steps: 5" in text
    two[1].job.write_text(text.replace("steps: 5", "steps: 6"))
    refused(" has another job.yaml; another plan.json, as rank 0 on ")


def move_an_operator(run: RunDirectory) -> None:
    """To the other stage, while all messages keep their sizes."""
    plan = Plan.load(run.plan)
    first, second = plan.stages
    moved = (
        replace(first, nodes=first.nodes[:-2]),
        replace(second, nodes=(*first.nodes[-2:], *second.nodes)),
    )
    replace(plan, stages=moved).save(run.plan)


def test_an_accelerator_that_only_some_ranks_see_is_named(two: Any, refused: Any) -> None:
    for run in two:
        text = run.job.read_text()
        assert "gpus_per_node: 0" in text
        run.job.write_text(text.replace("gpus_per_node: 0", "gpus_per_node: 1"))
    refused("sees an accelerator of type cuda, but rank 0 on ", "accelerator")
