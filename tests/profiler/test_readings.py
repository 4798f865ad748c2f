"""What a profile says of samples that differ from reading to reading."""

from __future__ import annotations

import json
import os
import sys
from multiprocessing import spawn
from pathlib import Path

import pytest
import torch

from pipectl.capture import CapturedJob
from pipectl.profile_parts import Readings
from pipectl.profiler.neighbours import Neighbours
from pipectl.profiler.readings import (
    find_redrawn,
    find_redrawn_samples,
    find_shared_samples,
    other_reader,
)
from pipectl.spec import load

ODD = Path(__file__).parents[1] / "runtime" / "odd_data.py"
SHARED = Path(__file__).with_name("held_out.py")
READINGS = {
    ("Stream", None): Readings.SAME,
    ("Named", "ByName"): Readings.BY_PROCESS,
    ("OwnGenerator", None): Readings.EACH,
    ("Buffered", None): Readings.EACH,
    ("Broken", None): None,
}


@pytest.mark.parametrize(("data", "held_out"), READINGS)
def test_a_second_process_reads_the_same_samples(
    spec_maker, monkeypatch, data: str, held_out: str | None
) -> None:
    """What cannot be read tells nothing; training may never come to it. Only a process that starts
    as a user's does hashes in another way."""
    if held_out:
        monkeypatch.setattr(spawn, "get_executable", lambda: os.fsencode(sys.executable))
    sections = {"evaluation": {"data": f"{ODD}:{held_out}"}} if held_out else {}
    spec = spec_maker(ODD)("Copy", loss="torch.nn:MSELoss", data=data, **sections)
    with other_reader(spec) as other:
        assert other.compare(CapturedJob(spec)) is READINGS[data, held_out]


LOADS_BESIDE = """
import torch
data = [(torch.ones(4) * i, torch.zeros(1)) for i in range(16)]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in torch.utils.data.DataLoader(data, 4, num_workers=1):
    (model(x) - y).pow(2).mean().backward()
    optimizer.step()
"""


def test_scripts_start_loading_processes_beside_the_measuring_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    (tmp_path / "script.py").write_text(LOADS_BESIDE)
    job = {
        "script": {"file": "script.py"},
        "training": {"batch_size": 4, "steps": 2},
        "resources": {"tasks_per_node": 2},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    spec = load(tmp_path / "job.yaml")
    with other_reader(spec) as other, Neighbours(spec, 4) as neighbours:
        assert other.compare(CapturedJob(spec)) is Readings.SAME
        neighbours.wait()
        assert neighbours.computing == 1


@pytest.mark.parametrize(("seed", "name"), [(None, "second.weight"), (1, None)])
def test_initial_values_that_no_seed_gives_are_found(
    spec_of, capsys, seed: int | None, name: str
) -> None:
    """What the model prints when it is built, it has printed before."""
    job = CapturedJob(spec_of("Drawn", kwargs={"seed": seed}))
    assert capsys.readouterr().out == "built\n"
    assert find_redrawn(job, 4) == name
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("read", "name"), [("tensor", "tensor"), ("array", "parts.array"), ("nothing", None)]
)
def test_so_are_those_of_tensors_in_plain_attributes(spec_of, read: str, name: str | None) -> None:
    job = CapturedJob(spec_of("Scaled", kwargs={"read": read}))
    assert find_redrawn(job, 4) == name


@pytest.mark.parametrize(
    ("data", "held_out", "shared"),
    [
        ("drawn", {"count": 20}, [(0, 0), (5, 5), (10, 10), (15, 15)]),
        ("drawn", {"count": 100}, [(0, 0), (16, 16), (32, 32), (48, 48)]),
        ("drawn", {"count": 20, "skip": 44}, [(0, 44), (5, 49), (10, 54), (15, 59)]),
        ("drawn", {"count": 20, "seed": 2}, []),
        ("drawn", {"count": 3}, []),
        ("split", {"part": 1}, []),
        ("constant", {}, []),
        ("few", {}, []),
    ],
)
def test_held_out_samples_that_are_also_trained_on_are_found(
    spec_maker, data: str, held_out: dict[str, int], shared: list[tuple[int, int]]
) -> None:
    """Equal factories have equal rows; parts of one split, and data of few values, tell nothing."""
    factory = {"factory": f"{SHARED}:{data}", "kwargs": held_out}
    spec = spec_maker(SHARED)("build", loss="torch.nn:MSELoss", data=data,
                              evaluation={"data": factory})  # fmt: skip
    assert find_shared_samples(CapturedJob(spec)) == tuple(shared)


def test_they_are_found_in_the_beginning_of_a_stream(spec_maker) -> None:
    for seed, count in ((1, 4), (None, 0)):
        factory = {"factory": f"{SHARED}:{'subset' if seed else 'drawn'}", "kwargs": {"seed": seed}}
        spec = spec_maker(SHARED)("build", loss="torch.nn:MSELoss", data="Stream",
                                  evaluation={"data": factory})  # fmt: skip
        assert len(find_shared_samples(CapturedJob(spec))) == count


@pytest.mark.parametrize(("data", "count"), [("split", 0), ("by_name", 0), ("by_process", 4)])
def test_splits_that_each_process_draws_anew_are_found(spec_maker, data: str, count: int) -> None:
    factory = {"factory": f"{SHARED}:{data}", "kwargs": {"part": 1}}
    spec = spec_maker(SHARED)("build", loss="torch.nn:MSELoss", data=data,
                              evaluation={"data": factory})  # fmt: skip
    job = CapturedJob(spec)
    with other_reader(spec) as other:
        other.compare(job)
        assert find_shared_samples(job) == ()
        assert len(find_redrawn_samples(job, other)) == count


def test_they_are_found_at_other_indices_too(spec_maker) -> None:
    """As when two factories split the same rows in two ways."""
    factory = {"factory": f"{SHARED}:subset", "kwargs": {"seed": 1, "share": 0.25}}
    spec = spec_maker(SHARED)("build", loss="torch.nn:MSELoss", data="subset",
                              evaluation={"data": factory})  # fmt: skip
    job = CapturedJob(spec)
    found = find_shared_samples(job)
    assert len(found) == 4
    for mine, theirs in found:
        held_out, trained = job.evaluation_loader.sample(mine), job.loader.sample(theirs)
        assert torch.equal(held_out[0], trained[0])
