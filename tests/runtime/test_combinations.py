"""Every two settings of a job, and every setting with every schedule: trained, or refused.

What goes together trains to the weights of one rank; what does not is refused by ``check``, and
each of the hints that it names leads to a job that it accepts. Every run of the tests trains jobs
with as many settings each as go together; ``product`` trains jobs that together have all pairs of
settings and all schedules with them, and every pair by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from pipectl.errors import SpecError
from pipectl.plan import Plan
from pipectl.runs import RunDirectory, read_errors, read_metrics
from pipectl.runtime.nodes import unsupported
from pipectl.schedule import NAMES, SCHEDULES
from pipectl.schedule import combinations as known
from pipectl.schedule.combinations import Clash, Feature, clashes, markdown, traits_of
from pipectl.schedule.order import Placement
from pipectl.spec import JobSpec
from tests.equality.outcome import different, weights

PARTS = Path(__file__).with_name("job_parts.py")
PAGE = PARTS.parents[2] / "docs" / "schedules.md"
BEGIN, END = "<!-- combinations: made by make golden -->\n", "<!-- end of combinations -->\n"
OWN = "mine.csv"
LISTED = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
SAMPLES = {"factory": f"{PARTS}:Samples", "kwargs": {"count": 6}}
ON: dict[Feature, Any] = {
    known.APART: "apart",
    known.RECOMPUTE: "all",
    known.SEGMENTS: "blocks",
    known.OFFLOAD: "disk",
    known.WARM_UP: [2, 1],
    known.REPLICAS: 2,
    known.SHARD: True,
    known.MICRO_BATCHES: 2,
    known.COMPILE: True,
    known.CLIP: 0.1,
    known.FLOAT16: "float16",
    known.BF16_WEIGHTS: "bf16-weights",
    known.REPRODUCIBLE: True,
    known.SKIP: "skip",
    known.EVALUATION: {"data": SAMPLES, "every": 2},
    known.EARLY_STOPPING: {"data": SAMPLES, "every": 2, "early_stopping": {"patience": 9}},
    known.TIED: {"factory": f"{PARTS}:Tied"},
}
"""Values that turn the features on."""
OFF = {"true": True, "false": False, "1": 1}
"""Values of hints that are no text."""
Settings = frozenset[Feature]
Job = tuple[str, Settings]


def fit(schedule: str, settings: Iterable[Feature]) -> list[Clash]:
    """What clashes; a value that takes the place of another one counts as a clash of neither."""
    return list(clashes({*settings, *traits_of(SCHEDULES.get(schedule))}))


def are_one_key(settings: Iterable[Feature]) -> bool:
    keys = [feature.key for feature in settings]
    return any(key in other for key, other in combinations(sorted(keys), 2))


def pairs(schedule: str) -> list[Settings]:
    """Every setting, and every two of different keys."""
    single = [frozenset((feature,)) for feature in ON]
    double = [frozenset(two) for two in combinations(ON, 2)]
    return [each for each in (*single, *double) if not are_one_key(each)]


def sections_of(schedule: str, settings: Iterable[Feature]) -> tuple[int, dict[str, Any]]:
    """Ranks and sections of a job with two ranks, or four if each stage takes two."""
    sections: dict[str, Any] = {
        "model": {"factory": f"{PARTS}:Model", "kwargs": {"depth": 6}},
        "training": {"steps": 4, "batch_size": 4},
        "pipeline": {"schedule": schedule, "stages": 2, "replicas": 1, "offload": "none"},
    }
    listed = schedule.endswith(OWN)
    placement = Placement.STRAIGHT if listed else SCHEDULES[schedule].placement
    if placement is not Placement.STRAIGHT:
        sections["pipeline"]["stages"] = 4
    if schedule != "pipedream":
        sections["pipeline"]["micro_batches"] = 2
    for feature in sorted(settings, key=list(ON).index):
        section, _, key = feature.key.partition(".")
        if section in ("evaluation", "model"):
            sections[section] = ON[feature]
        else:
            sections[section][key] = ON[feature]
    return 4 if {known.APART, known.REPLICAS} & {*settings} else 2, sections


def reference_of(job: Job) -> tuple[int, dict[str, Any]]:
    """What a job equals: one rank; if the results depend on the cut, the same cut."""
    schedule, settings = job
    kept = {s for s in settings if s.key.startswith(("training", "evaluation", "model"))}
    kept -= {known.COMPILE}
    if schedule == "pipedream":
        return sections_of(schedule, kept | ({known.APART} & settings))
    _, sections = sections_of("pipedream-2bw" if "2bw" in schedule else "gpipe", kept)
    sections["pipeline"]["stages"] = 1
    return 1, sections


@pytest.fixture(scope="module")
def trained(
    make_run: Callable[..., RunDirectory], train: Callable[..., None], tmp_path_factory: Any
) -> Callable[[Iterable[Job]], None]:
    """``trained(jobs)``: trains them and what they equal, and compares."""
    mine = tmp_path_factory.mktemp("lists") / OWN
    mine.write_text(LISTED)
    references: dict[str, RunDirectory] = {}

    def compare(jobs: Iterable[Job]) -> None:
        found = []
        for job in jobs:
            ranks, sections = sections_of(str(mine) if job[0] == OWN else job[0], job[1])
            run = make_run(ranks, **sections)
            assert_planned(Plan.load(run.plan), job)
            alone, expected = reference_of(job)
            key = repr((alone, expected))
            if key not in references:
                references[key] = make_run(alone, **expected)
            found.append((job, run, references[key]))
        new = {reference.path: reference for _, _, reference in found}
        done = (path for path, run in new.items() if not any(run.checkpoints.glob("step-*")))
        train(*(new[path] for path in done), *(run for _, run, _ in found))
        for job, run, reference in found:
            assert_equal(job, run, reference)

    return compare


def assert_planned(plan: Plan, job: Job) -> None:
    """The plan has what the job asks for."""
    schedule, settings = job
    assert unsupported(plan) == []
    assert plan.schedule == schedule
    for stage in plan.stages:
        assert bool(stage.backward_ranks) == (known.APART in settings)
        assert stage.offload == (known.OFFLOAD in settings)
        assert stage.recompute or not {known.RECOMPUTE, known.SEGMENTS} & settings
        assert stage.replicas == (2 if known.REPLICAS in settings else 1)


def assert_equal(job: Job, run: RunDirectory, reference: RunDirectory) -> None:
    _, settings = job
    found, expected = weights(run.path), weights(reference.path)
    half = bool({known.FLOAT16, known.BF16_WEIGHTS} & settings)
    in_turn = known.REPLICAS in settings and known.REPRODUCIBLE not in settings
    if in_turn or known.COMPILE in settings:  # they round in another way than one rank
        for name, tensor in expected.items():
            assert float((found[name] - tensor).abs().max()) <= (2e-3 if half else 2e-5), job
    else:
        assert different(expected, found) == [], job
    lines = read_metrics(run)
    assert [line.step for line in lines if line.is_step] == [1, 2, 3, 4], job
    evaluates = bool({known.EVALUATION, known.EARLY_STOPPING} & settings)
    assert any(line.evaluation for line in lines) == evaluates, job


PLAIN = ("gpipe", "1f1b", "pipedream", "pipedream-2bw", OWN)
"""Schedules that differ in what goes with them; the others have these traits, too."""


def covering(schedules: Iterable[str]) -> list[Job]:
    """Jobs that together have all settings that go with the schedules, and all pairs of these."""
    schedules = list(schedules)
    slow = {known.COMPILE}
    missing = {
        (schedule, settings) if len(settings) == 1 else ("", settings)
        for schedule in schedules
        for settings in pairs(schedule)
        if not fit(schedule, settings) and not slow & settings
    }
    jobs = []
    for schedule in schedules:
        while True:
            open_ = {s for name, s in missing if name in (schedule, "") and not fit(schedule, s)}
            own = {s for name, s in missing if name == schedule}
            if not own and not (schedule == "1f1b" and open_):
                break
            chosen: Settings = frozenset()
            order = {s: (s not in own, sorted(map(list(ON).index, s))) for s in open_}
            for settings in sorted(open_, key=order.__getitem__):
                more = chosen | settings
                if not are_one_key(more) and not fit(schedule, more):
                    chosen = more
            jobs.append((schedule, chosen))
            missing -= {(n, s) for n, s in missing if n in (schedule, "") and s <= chosen}
    return jobs


@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_jobs_with_all_that_goes_together_train_to_the_weights_of_one_rank(trained: Any) -> None:
    """Of every second schedule the job with the most settings, and one in blocks with replicas."""
    jobs = covering(PLAIN)
    most = {schedule: (schedule, settings) for schedule, settings in reversed(jobs)}
    trained([*[*most.values()][::2], next(job for job in jobs if known.SEGMENTS in job[1])])


@pytest.mark.product
@pytest.mark.mpi
@pytest.mark.timeout(3000)
def test_every_schedule_goes_with_all_that_the_table_allows(trained: Any) -> None:
    trained(covering((*NAMES, OWN)))


@pytest.mark.product
@pytest.mark.mpi
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("schedule", [*NAMES, OWN])
def test_every_pair_trains_to_the_weights_of_one_rank(trained: Any, schedule: str) -> None:
    trained((schedule, each) for each in pairs(schedule) if not fit(schedule, each))


def refused(schedules: Iterable[str]) -> list[Job]:
    """Every pair that does not go together, with a schedule that is not to blame if possible."""
    found: dict[Job, None] = {}
    for schedule in schedules:
        for settings in pairs(schedule):
            if any(clash.feature is not known.TIED for clash in fit(schedule, settings)):
                found[schedule, settings] = None
    return list(found)


@pytest.mark.parametrize(
    "schedules",
    [PLAIN, pytest.param([n for n in NAMES if n not in PLAIN], marks=pytest.mark.product)],
    ids=["plain", "others"],
)
def test_what_does_not_go_together_is_refused_and_the_hints_work(
    make_spec: Callable[..., JobSpec], tmp_path: Path, schedules: Iterable[str]
) -> None:
    """With a hint for each fault, the job is accepted."""
    mine = tmp_path / OWN
    mine.write_text(LISTED)
    for schedule, settings in refused(schedules):
        ranks, sections = sections_of(str(mine) if schedule == OWN else schedule, settings)
        sections["pipeline"]["stages"] = 2
        faults = [c for c in fit(schedule, settings) if c.feature is not known.TIED]
        with pytest.raises(SpecError) as error:
            make_spec(ranks, **sections)
        for clash in faults:
            said = f"{clash.feature.key}: {clash.fault(schedule)}; {clash.hint()}"
            assert said in str(error.value.message), (schedule, settings)
        for choose in (lambda clash: [clash.feature], lambda clash: [clash.other]):
            hinted = {name: dict(section) for name, section in sections.items()}
            for part in (part for clash in faults for part in choose(clash)):
                key, value = ("pipeline.schedule", "1f1b")
                if isinstance(part, Feature):
                    key, value = part.key, OFF.get(part.off, part.off)
                else:  # `pipedream` has one micro-batch, others may need their number
                    hinted["pipeline"].setdefault("micro_batches", 2)
                section, _, name = key.partition(".")
                hinted[section].pop(name, None)
                if value != "":
                    hinted[section][name] = value
            make_spec(ranks, **hinted)


@pytest.mark.mpi
def test_a_weight_of_several_operators_is_refused_by_ranks_whose_steps_overlap(
    make_run: Callable[..., RunDirectory], work: Callable[..., Any]
) -> None:
    """Only the ranks know the model."""
    ranks, sections = sections_of("pipedream", [known.TIED])
    run = make_run(ranks, **sections)
    assert work(ranks, run).returncode != 0
    error = read_errors(run.start)[0]
    assert error.exit_code == 3
    assert "is used by several operators" in error.message


def test_the_page_has_the_table_of_what_does_not_go_together(
    snapshot: Callable[[Path, str], None],
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    snapshot(PAGE, f"{before}{BEGIN}\n{markdown()}\n{END}{rest.split(END)[1]}")
