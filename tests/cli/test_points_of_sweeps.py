"""What the points of a sweep share before they are submitted: profiles, plans and links."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.errors import InvalidInputError
from pipectl.jobs.prepare import UNKNOWN_ROWS, cluster_file_key, plan_file_key, prepare
from pipectl.link import RowTimes
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.spec import SpecFile, profile_key


def prepared(scheduler, *changes):
    file = SpecFile.read(Path("job.yaml"), changes)
    return prepare(file.spec(), scheduler, points=file.points(file.spec()))


def test_on_this_machine_models_are_measured_and_planned_once_each(
    profile, profile_document, monkeypatch
):
    measured = []

    def measure(spec, path, _progress):
        assert path is None, "the job's own place is that of its own model"
        measured.append(spec.model.kwargs)
        return Profile.from_json(profile_document(key=profile_key(spec)))

    monkeypatch.setattr("pipectl.jobs.profiles.measure", measure)
    models = "model.kwargs: [{}, {width: 3}, {width: 4}]"
    found = prepared("local", f"sweep.grid={{{models}, training.seed: [0, 1]}}")
    assert measured == [{"width": 3}, {"width": 4}]
    plans = [id(inputs.plan) for inputs in found]
    assert plans == [plans[0]] * 2 + [plans[2]] * 2 + [plans[4]] * 2
    assert [inputs.profile is None for inputs in found] == [False] * 6


def test_an_error_in_the_script_of_a_point_names_it_before_its_model_is_measured(
    profile, monkeypatch
):
    def render(job):
        if job.spec.model.kwargs:
            raise InvalidInputError("launch.bind: cannot be written")
        return ""

    monkeypatch.setattr("pipectl.jobs.prepare.render", render)
    monkeypatch.setattr("pipectl.jobs.profiles.measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(InvalidInputError, match=r"^model.kwargs=.*width.*: launch.bind: cannot"):
        prepared("local", "sweep.grid={model.kwargs: [{}, {width: 3}]}")


def test_row_times_of_one_points_cluster_are_assumed_for_the_others(profile, profile_document):
    cluster = assumed_cluster("two nodes", [1, 1], 1, None)
    cluster.with_rows(RowTimes()).save(Path("timed.json"))
    cluster.save(Path("untimed.json"))
    assumed_cluster("of no point", [9], 1, None).save(Path("unused.json"))
    key = json.loads(profile.read_text())["key"]
    profile.write_text(json.dumps(profile_document(key=key, assumptions=[UNKNOWN_ROWS])))
    points = "sweep.points=[{cluster: timed.json}, {cluster: untimed.json}]"
    found = prepared("local", points, "cluster=unused.json")
    assert [UNKNOWN_ROWS in job.profile.assumptions for job in found] == [0, 1]


def test_points_with_other_links_have_plans_of_their_own(profile):
    """The links may be measured for one way to start the ranks, and not for another."""
    grid = "sweep.grid={launch.bind: [none, cores]}"
    file = SpecFile.read(Path("job.yaml"), [grid])
    key = cluster_file_key(file.points(file.spec())[1].spec, "slurm")
    cluster = assumed_cluster("measured", [1, 1], 1, None)
    replace(cluster, key=key).save(Path("runs/tiny.cluster.json"))
    found = prepared("slurm", grid)
    assert [job.cluster.key for job in found] == [None, key]
    keys = [plan_file_key(job.spec, job.profile, job.cluster) for job in found]
    assert [job.plan.key for job in found] == keys
    assert Plan.load(Path("runs/tiny.plan.json")).key == keys[0]


def test_all_points_keep_the_micro_batches_of_the_last_plan(profile):
    """As they do if they are planned in their allocations."""

    def changes(micro_batches):
        found = [f"pipeline.micro_batches={micro_batches}"]
        key = profile_key(SpecFile.read(Path("job.yaml"), found).spec())
        replace(Profile.load(profile), key=key).save(profile)
        return found

    prepared("slurm", *changes("2"), "sweep.points=[{training.seed: 1}]")
    for _ in range(2):
        grid = "sweep.grid={pipeline.schedule: [1f1b, gpipe]}"
        found = prepared("slurm", *changes("auto"), grid)
        assert [job.plan.micro_batches for job in found] == [2, 2]
