"""Measuring through the cache, with a profiler that only counts; and what rows take."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipectl.batch import process
from pipectl.files import user_cache
from pipectl.jobs import profiles
from pipectl.jobs.prepare import is_fresh
from pipectl.jobs.profiles import Interrupted, measure, measure_rows
from pipectl.link import RowTimes
from pipectl.profile import Operator, OperatorMemory, OptimizerCost, Profile
from pipectl.profiler.effort import Effort
from pipectl.profiler.journal import Journal
from pipectl.spec import JobSpec, load, profile_key


@dataclass
class Profiler:
    """Measures three operators; stops before one of them if told to."""

    measured: list[str] = field(default_factory=list)
    efforts: list[Effort] = field(default_factory=list)
    stop_at: int | None = None

    def __call__(
        self, spec: JobSpec, progress: Any, *, effort: Effort, journal: Journal
    ) -> Profile:
        self.efforts.append(effort)
        journal.match("abc")
        for index in range(3):
            if index == self.stop_at:
                raise KeyboardInterrupt
            if journal.find(f"op{index}") is None:
                self.measured.append(f"op{index}")
                journal.note(f"op{index}", {"forward_s": 0.01})
        memory = OperatorMemory(0, "op0", 0, 0)
        operators = tuple(
            Operator(f"op{i}", f"op{i}", 0.01, 0.02, 0, 0, 0, memory=memory) for i in range(3)
        )
        cost = OptimizerCost(2.0, 1e-9)
        return Profile(spec.name, "test", 2, operators, (), "abc", cost, key=profile_key(spec))

    def measures(self, call: Callable[[], Profile]) -> bool:
        """Whether ``call`` measures anything."""
        before = len(self.efforts)
        call()
        return len(self.efforts) > before


def resumed(profile: Profile) -> int:
    assert profile.device is not None
    return profile.device.resumed


@pytest.fixture
def profiler(monkeypatch):
    counting = Profiler()
    monkeypatch.setattr("pipectl.profiler.profile_job", counting)
    return counting


@pytest.fixture
def spec_of(tmp_path, write_job, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = write_job("resources: {nodes: 2}")
    Path("model.py").write_text("import layers\n")
    Path("layers.py").write_text("")
    return lambda *overrides: load(job, ["model.factory=./model.py:build", *overrides])


PLACE = Path("runs/tiny.profile.json")


def test_the_second_time_nothing_is_measured(profiler, spec_of):
    first = measure(spec_of(), PLACE)
    PLACE.unlink()
    assert measure(spec_of(), PLACE) == Profile.load(PLACE) == first
    assert profiler.measured == ["op0", "op1", "op2"]
    entries = [path for path in Path("runs/.cache").iterdir() if "rows-" not in path.name]
    assert [path.suffix for path in entries] == [".json"]


def test_the_profile_says_on_what_it_was_measured(profiler, spec_of):
    plain = measure(spec_of("resources.cpus_per_task=3"), PLACE).device
    assert plain is not None
    assert (plain.kind, plain.threads, plain.neighbours) == ("cpu", 3, 0)
    assert plain.model
    less = spec_of("resources.cpus_per_task=3", "launch.progress=core")
    device = measure(less, PLACE).device
    assert device is not None
    assert device.threads == 2


@pytest.mark.parametrize(
    ("overrides", "options", "measured"),
    [
        ((), {}, 0),
        (("training.steps=7", "pipeline.schedule=gpipe", "name=other"), {}, 0),
        ((), {"again": True}, 3),
        ((), {"effort": "fast"}, 3),
        (("training.batch_size=16",), {}, 3),
        (("pipeline.micro_batches=2",), {}, 3),
        (("pipeline.stages=2",), {}, 3),
        (("resources.tasks_per_node=2",), {}, 3),
        (("resources.cpus_per_task=2",), {}, 3),
    ],
)
def test_what_makes_a_measurement_another(profiler, spec_of, overrides, options, measured):
    measure(spec_of(), PLACE)
    profiler.measured.clear()
    spec = spec_of(*overrides)
    assert measure(spec, PLACE, **options).name == spec.name
    assert len(profiler.measured) == measured


def test_code_processor_and_versions_make_it_another(profiler, spec_of, monkeypatch):
    def measured_twice():
        return [profiler.measures(lambda: measure(spec_of(), PLACE)) for _ in range(2)]

    assert measured_twice() == [True, False]
    Path("layers.py").write_text("width = 2\n")
    assert measured_twice() == [True, False]
    monkeypatch.setattr(profiles, "processor", lambda: "another")
    assert measured_twice() == [True, False]
    monkeypatch.setattr(profiles, "version", lambda _package: "9.9")
    assert measured_twice() == [True, False]
    monkeypatch.setattr(profiles, "_hash_of_measuring_code", lambda: "changed")
    assert measured_twice() == [True, False]


def test_damaged_entries_are_measured_anew(profiler, spec_of):
    measure(spec_of(), PLACE)
    (path,) = Path("runs/.cache").glob("[!r]*.json")
    good = path.read_text()
    others = ({"version": 2}, {"nodes": []}, {"edges": None})
    changed = (json.dumps({**json.loads(good), **other}) for other in others)
    for text in ("", "null", good[:-30], "\0" * 100, *changed):
        path.write_text(text)
        assert profiler.measures(lambda: measure(spec_of(), PLACE))
        assert not profiler.measures(lambda: measure(spec_of(), PLACE))


def test_an_interrupted_one_goes_on_where_it_was(profiler, spec_of):
    PLACE.parent.mkdir()
    PLACE.write_text("good")
    profiler.stop_at = 2
    with pytest.raises(Interrupted) as stopped:
        measure(spec_of(), PLACE)
    assert stopped.value.kept == 2
    assert PLACE.read_text() == "good"
    profiler.stop_at = None
    found = measure(spec_of(), PLACE)
    assert resumed(found) == 2
    assert profiler.measured == ["op0", "op1", "op2"]
    assert Profile.load(PLACE) == found
    assert is_fresh(spec_of(), found)


def test_measuring_again_may_be_interrupted_too(profiler, spec_of):
    measure(spec_of(), PLACE)
    profiler.stop_at = 1
    with pytest.raises(Interrupted):
        measure(spec_of(), PLACE, again=True)
    profiler.stop_at = None
    assert not profiler.measures(lambda: measure(spec_of(), PLACE))
    assert resumed(measure(spec_of(), PLACE, again=True)) == 1


def test_what_changed_since_the_interruption_is_not_mixed(profiler, spec_of):
    profiler.stop_at = 2
    with pytest.raises(Interrupted):
        measure(spec_of(), PLACE)
    profiler.stop_at = None
    Path("layers.py").write_text("width = 2\n")
    assert resumed(measure(spec_of(), PLACE)) == 0
    assert profiler.measured == ["op0", "op1", "op0", "op1", "op2"]


def test_the_effort_reaches_the_profiler(profiler, spec_of):
    for effort in ("fast", "normal", "thorough"):
        measure(spec_of(), PLACE, effort=effort)
    assert profiler.efforts == [Effort.FAST, Effort.NORMAL, Effort.THOROUGH]


def test_the_cache_of_another_output_directory(profiler, spec_of):
    measure(spec_of("output.directory=elsewhere"))
    assert list(Path("elsewhere/.cache").iterdir())
    assert not Path("runs/.cache").exists()


def test_old_files_make_room(profiler, spec_of, monkeypatch):
    monkeypatch.setattr(profiles, "_MAX_CACHED", 2)
    for batch in (8, 16, 32):
        measure(spec_of(f"training.batch_size={batch}"), PLACE)
    assert len(list(Path("runs/.cache").iterdir())) == 2
    assert not profiler.measures(lambda: measure(spec_of("training.batch_size=32"), PLACE))


@pytest.mark.mpi
@pytest.mark.usefixtures("measured_rows")
def test_two_ranks_of_this_machine_measure_rows(write_job, monkeypatch, warm_python):
    monkeypatch.setattr("pipectl.jobs.profiles._ROW_PATIENCE_S", 500.0)  # the machine may be busy
    monkeypatch.setattr(sys, "executable", warm_python)
    spec = load(write_job("resources: {tasks_per_node: 2}"), check_files=False)
    reports: list[tuple[int, int, str]] = []
    rows, assumption = measure_rows(spec, "local", "fast", lambda *each: reports.append(each))
    assert (rows is not None, assumption) == (True, "")
    assert rows is not None
    for table in (rows.send_start, rows.send_wait, rows.receive_start, rows.receive_wait):
        assert [size for size, _ in table] == [4096, 65536, 262144, 1048576]
        assert all(0 < seconds < 1 for _, seconds in table)
    assert all(0 < seconds < 1 for seconds in (rows.compute, rows.begin, rows.end))
    assert reports == [(0, 0, "messages between ranks")]


def test_two_ranks_under_srun_have_as_many_cores_as_ranks_of_the_job(write_job, monkeypatch):
    commands: list[Sequence[str]] = []

    def run(argv, **_options):
        commands.append(argv)
        return process.Completed(1, "", "no")

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    lines = "launch: {launcher: srun}", "resources: {tasks_per_node: 2, cpus_per_task: 2}"
    rows, _ = measure_rows(load(write_job(*lines), check_files=False), "slurm")
    assert (rows, "--cpus-per-task=2" in commands[-1]) == (None, True)


def test_output_directories_of_a_user_share_the_times_of_rows(write_job, tmp_path, monkeypatch):
    monkeypatch.setattr("pipectl.jobs.profiles.user_cache", user_cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = load(write_job(), check_files=False)
    asked: list[Any] = []
    places: list[Path] = []

    def count(*given):
        asked.append(given)
        return RowTimes(compute=float(len(asked))), ""

    monkeypatch.setattr("pipectl.jobs.profiles.measure_rows", count)
    profile = Profile("p", "test", 1, (), ())

    def rows_of(job, *, again=False, effort="fast"):
        places.append(tmp_path / f"runs{len(places)}")
        rows = profiles._with_rows(profile, job, None, effort, places[-1], again=again).rows
        assert rows is not None
        return rows.compute

    assert [rows_of(spec), rows_of(spec)] == [1.0, 1.0]
    bound = spec.launch.model_copy(update={"bind": "cores"})
    assert rows_of(spec.model_copy(update={"launch": bound})) == 2.0
    assert [rows_of(spec, again=True), rows_of(spec)] == [3.0, 3.0]
    assert rows_of(spec, effort="thorough") == 4.0
    assert not any(place.exists() for place in places)
