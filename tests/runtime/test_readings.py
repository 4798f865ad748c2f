"""Inputs and targets of a step come from one reading, or ranks prove that theirs agree."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pipectl.plan import Plan, Replication
from pipectl.profile import Profile
from pipectl.profile_parts import Readings
from pipectl.runs import read_errors, read_metrics
from pipectl.runtime import parcels
from pipectl.runtime.checkpoint import load

pytestmark = pytest.mark.mpi
ODD = Path(__file__).with_name("odd_data.py")
SGD = {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.1}}


def copying(data: str, **sections: Any) -> dict[str, Any]:
    """Sections of a job that copies its inputs: the loss is 0 if the targets belong to them."""
    return {
        "model": {"factory": f"{ODD}:{sections.pop('model', 'Copy')}"},
        "loss": {"factory": "torch.nn:MSELoss"},
        "data": {"factory": f"{ODD}:{data}", "shuffle": True, **sections.pop("reading", {})},
        "optimizer": SGD,
        "training": {"steps": 3, "batch_size": 4},
        "checkpoint": {"every": 1, "keep": 3},
        **sections,
    }


REPLICAS = {"micro_batches": 2, "stages": 2, "replicas": 2}
APART = {"micro_batches": 2, "stages": 2, "backward": "apart"}
CHUNKS = {"micro_batches": 2, "stages": 4, "schedule": "zb-v"}
PIPEDREAM = {"micro_batches": 2, "stages": 2, "schedule": "pipedream-2bw"}
HELD_OUT = {"evaluation": {"data": f"{ODD}:ByProcess"}}
EVERYWHERE = {"reading": {"read": "everywhere", "shuffle": False}}
ONCE = {"reading": {"read": "once"}}
WEIGHED = {"loss": {"factory": "torch.nn:MSELoss", "weight": f"{ODD}:weight"}}
DIFFERING: dict[str, tuple[int, dict[str, Any], str]] = {
    "a generator of its own": (2, copying("OwnGenerator", **WEIGHED), "OwnGenerator: sample "),
    "an iterable with a buffer": (2, copying("Buffered", **EVERYWHERE), "Buffered: sample "),
    "held-out data": (2, copying("Copies", **HELD_OUT), "ByProcess: sample "),
    "steps that overlap": (2, copying("ByProcess", pipeline=PIPEDREAM, **WEIGHED), "ByProcess: s"),
    "backwards on other ranks": (4, copying("ByTime", pipeline=APART), "ByTime: sample "),
    "one sample": (4, copying("OneOff", pipeline=REPLICAS, **EVERYWHERE), "OneOff: sample 9 "),
}
"""Ranks, job, and how the error begins."""
APART_TOO = "backwards on other ranks"
"""Every run of the tests compares those with what one rank reads for all, below."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[pytest.mark.product] if k == APART_TOO else []) for k in DIFFERING],
)
def test_samples_that_differ_between_ranks_end_the_step_before_an_update(
    make_run, work, kind: str
) -> None:
    """The weights of the last checkpoint, if there is one, are those of samples that agree."""
    ranks, sections, beginning = DIFFERING[kind]
    run = make_run(ranks, **sections)
    if kind == "one sample":
        replace(Plan.load(run.plan), replication=Replication.SPLIT).save(run.plan)
    done = work(ranks, run)
    assert done.returncode != 0
    error, *others = read_errors(run.start)
    assert not others
    assert (error.type, error.exit_code) == ("WorkerError", 1)
    part = "evaluation.data" if "evaluation" in sections else "data"
    assert re.match(rf"{part}\.factory: .*odd_data\.py:{beginning}", error.message)
    assert re.search(r"is not the same on ranks \d and \d", error.message)
    assert "data.read: once" in done.stderr
    assert all(line.loss == 0 for line in read_metrics(run) if line.loss is not None)
    for checkpoint in run.checkpoints.glob("step-*"):
        loaded = load(checkpoint).values()
        assert {value for each in loaded for value in each.flatten().tolist()} == {0.0, 1.0}


FRESH: dict[str, tuple[int, dict[str, Any]]] = {
    "a generator of its own": (2, copying("OwnGenerator", **ONCE, **WEIGHED)),
    "an iterable, by itself": (2, copying("Buffered", reading={"workers": 2})),
    "held-out data": (2, copying("ByProcess", **ONCE, **HELD_OUT)),
    "steps that overlap": (2, copying("ByTime", pipeline=PIPEDREAM, **ONCE, **WEIGHED)),
    "backwards on other ranks": (4, copying("ByProcess", pipeline=APART, **ONCE)),
    "replicas": (4, copying("OwnCollate", pipeline=REPLICAS, **ONCE)),
    "chunks": (2, copying("ByTime", pipeline=CHUNKS, **ONCE)),
}
"""Ranks and job."""


@pytest.mark.parametrize(
    "kinds",
    [[kind for kind in FRESH if kind != APART_TOO], pytest.param(FRESH, marks=pytest.mark.product)],
    ids=["most", "all"],
)
def test_what_one_rank_reads_for_all_is_of_one_reading(make_run, train, kinds) -> None:
    runs = {kind: make_run(FRESH[kind][0], **FRESH[kind][1]) for kind in kinds}
    train(*runs.values())
    for kind, run in runs.items():
        lines = read_metrics(run)
        losses = [line.loss for line in lines if line.loss is not None]
        assert losses == [0.0] * 3, kind
        held_out = [line.evaluation["loss"] for line in lines if line.evaluation]
        assert held_out == [0.0] * ("evaluation" in FRESH[kind][1]), kind


def test_tensors_of_all_layouts_have_their_values_when_a_batch_arrives(monkeypatch) -> None:
    """Those with gaps between their elements, too, such as every second column."""
    sent = list[Any]()
    late = Mock()
    late.Isend.side_effect = lambda part, _: sent.append(part.copy())
    late.Irecv.side_effect = lambda part, _: (part, sent.pop(0))

    def arrive(requests: list[Any]) -> None:
        for part, content in requests:
            part[:] = content

    monkeypatch.setattr(parcels, "wait", arrive)
    rows = torch.arange(48.0).view(4, 12)
    parts = {
        "whole": rows, "columns": rows[:, ::2], "row": rows[1:2, ::2], "turned": rows.t()[1:3],
        "expanded": rows[:, :1].expand(4, 5), "windows": rows[0].unfold(0, 4, 1),
        "scalar": rows[0, 5], "empty": rows[:0], "bits": rows > 7, "half": rows[:, ::3].bfloat16(),
    }  # fmt: skip
    batch = (
        parts,
        {
            "same": rows,
            "texts": ["a", None],
            "complex": torch.view_as_complex(rows.view(4, 6, 2))[:, ::2].conj(),
        },
    )
    post = parcels.Post(late)  # which sends one batch, and asks for nothing that was sent before
    post.send(parcels.Parcel(batch, "data"), 1)
    found, others = post.receive(0)
    assert found["whole"] is others["same"]
    for name, tensor in parts.items():
        assert torch.equal(found[name], tensor), name
        assert name == "windows" or found[name].stride() == tensor.stride(), name
    assert torch.equal(others["complex"], batch[1]["complex"])
    assert others["texts"] == ["a", None]


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "weighed by targets": (2, WEIGHED),
    "steps that overlap": (2, {"pipeline": PIPEDREAM, **WEIGHED}),
    "backwards on other ranks": (4, {"pipeline": APART, **WEIGHED}),
    "replicas": (4, {"pipeline": REPLICAS, **WEIGHED}),
}


def skewed(data: str, read: str, **sections: Any) -> dict[str, Any]:
    """A job whose weights change."""
    return copying(data, model="Skewed", reading={"read": read}, **sections)


def test_one_rank_that_reads_for_all_changes_no_bit(make_run, train, launch, different) -> None:
    """Neither does the end of a run in between, nor a sample that contains more than tensors."""
    pairs = {}
    for kind, (ranks, sections) in PLANS.items():
        held_out = {"evaluation": {"data": f"{ODD}:Named", "every": 1}}
        data, more = ("NamedStream", {}) if kind == "replicas" else ("Named", held_out)
        pairs[kind] = [
            make_run(ranks, **skewed(data, read, **more, **sections))
            for read in ("everywhere", "once")
        ]
    train(*(run for pair in pairs.values() for run in pair))
    for kind, pair in pairs.items():
        assert different(*pair) == [], kind
        everywhere, once = (
            [(line.loss, line.evaluation) for line in read_metrics(r)] for r in pair
        )
        assert everywhere == once, kind
    whole = pairs["weighed by targets"][1]
    ranks, sections = PLANS["weighed by targets"]
    rest = make_run(ranks, **skewed("Named", "once", **held_out, **sections))
    program = Path(__file__).with_name("ranks_in_turn.py")
    done = launch(ranks, program, f"{whole.path}:1:{rest.path}")
    assert done.returncode == 0, done.stderr
    assert different(whole, rest) == []


def test_a_start_that_reads_other_samples_than_the_first_says_so(
    make_run, work, tmp_path: Path
) -> None:
    file = tmp_path / "shift"
    file.write_text("1")
    data = {"factory": f"{ODD}:Shifted", "kwargs": {"file": str(file)}}
    run = make_run(1, **{**copying("Copies"), "data": data})
    same = {"readings": Readings.SAME, "redrawn_samples": ((0, 1),)}
    replace(Profile.load(run.profile), **same).save(run.profile)
    said = []
    for shift in ("1", "1", "2"):
        file.write_text(shift)
        done = work(0, run)
        assert done.returncode == 0, done.stderr
        words = "the data have changed since the run began", "this start holds out other samples"
        said.append([each in done.stderr for each in words])
    assert said == [[False, False], [False, True], [True, True]]


def test_samples_of_earlier_steps_are_read_in_a_phase_that_may_take_any_time(
    make_run, work, tmp_path: Path
) -> None:
    file, phase = tmp_path / "actions", "reading the samples of earlier steps"
    data = {"factory": f"{ODD}:Phased", "kwargs": {"file": str(file)}}
    run = make_run(1, **{**copying("Copies"), "data": data})
    for steps in (0, 2):
        done = work(0, run)
        assert done.returncode == 0, done.stderr
        actions = file.read_text().splitlines()
        assert actions.count(phase) == 4 * steps
        assert actions[-1] == "FORWARD micro-batch 1"
        file.write_text("")
        shutil.rmtree(run.checkpoints / "step-000003")


@pytest.mark.parametrize("data", ["ByRank", "StreamByRank"])
def test_data_that_divide_themselves_by_rank_are_refused(make_run, work, data: str) -> None:
    """One rank would read a part of the iterable for all, and replicas each their own part."""
    alone = {"pipeline": {"micro_batches": 2, "stages": 1, "replicas": 2}}
    run = make_run(2, **copying(data, **alone, reading={"shuffle": False}))
    replace(Profile.load(run.profile), readings=Readings.SAME).save(run.profile)
    done = work(2, run)
    assert done.returncode != 0
    error = read_errors(run.start)[0]
    assert error.exit_code == 3
    assert re.match(r"data: rank 1 on .* reads other samples than rank 0$", error.message)
    assert "divides the data by rank" in done.stderr


def test_one_rank_reads_where_the_profile_found_other_samples(make_run, train) -> None:
    run = make_run(2, **copying("OwnGenerator"))
    replace(Profile.load(run.profile), readings=Readings.EACH).save(run.profile)
    train(run)
    assert [line.loss for line in read_metrics(run)] == [0.0] * 3
