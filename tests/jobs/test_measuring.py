"""Measuring through the cache, or in the allocation of a job, with a profiler that counts."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.batch import process
from pipectl.cluster import assumed_cluster
from pipectl.files import user_cache
from pipectl.jobs import in_job, profiles
from pipectl.jobs.output import is_fresh
from pipectl.jobs.profiles import Interrupted, keep_comparison, measure
from pipectl.jobs.rows import start_row_probe
from pipectl.link import RowTimes
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.profiler.effort import Effort
from pipectl.runs import Heartbeat, Record, RunDirectory
from pipectl.spec import dump, load, profile_key
from tests.docs.layers import LAYER_OF, PACKAGE, all_imports

PLACE, CACHE = Path("runs/tiny.profile.json"), Path("runs/.cache")


class Profiler:
    """Measures the operators of a profile; stops before one of them if told to."""

    def __init__(self, profile):
        self.profile, self.measured, self.efforts, self.stop_at = profile, [], [], None
        self.width = None

    def __call__(self, spec, device, progress, *, effort, journal, uncompared):
        self.uncompared = uncompared
        print("printed by the model")
        self.efforts.append(effort)
        self.width = os.environ.get("WIDTH")
        journal.match("abc")
        for index, operator in enumerate(self.profile.operators):
            if index == self.stop_at:
                raise KeyboardInterrupt
            if journal.find(operator.id) is None:
                self.measured.append(operator.id)
                journal.note(operator.id, {"forward_s": 0.01})
        return replace(self.profile, name=spec.name, key=profile_key(spec), device=device)


@pytest.fixture
def profiler(monkeypatch, profile):
    counting = Profiler(profile)
    monkeypatch.setattr("pipectl.profiler.profile_job", counting)
    return counting


@pytest.fixture
def spec_of(tmp_path, write_job, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = write_job("resources: {nodes: 2}")
    Path("model.py").write_text("import layers\n")
    Path("layers.py").write_text("")
    return lambda *overrides: load(job, ["model.factory=./model.py:build", *overrides])


@pytest.fixture
def measures(profiler, spec_of):
    """``measures()``: how many of six operators are measured for a job; it has a profile then."""

    def count(*overrides, **options):
        before, spec = len(profiler.measured), spec_of(*overrides)
        profile = measure(spec, PLACE, **options)
        assert profile.name == spec.name
        assert Profile.load(PLACE) == profile
        assert is_fresh(spec, profile)
        return len(profiler.measured) - before

    return count


def test_a_script_that_was_compared_for_its_job_is_compared_again_only_if_it_has_changed(
    profiler, measures, spec_of
):
    parts = [f"{name}.factory=script" for name in ("model", "loss", "data", "optimizer")]
    script = ["script.file=./train.py", *parts]
    Path("train.py").write_text("import layers")
    job = spec_of(*script)
    keep_comparison(job, ["random numbers"], time.time() - 60)  # edited meanwhile
    measures(*script)
    assert profiler.uncompared is None
    keep_comparison(job, ["random numbers"], time.time() + 60)
    for batch, (more, known) in enumerate((
        ("training.steps=7", ("random numbers",)),
        ("training.seed=1", None),
        ("script.arguments=[--lr, 1]", None),
        ("loss.factory=torch.nn:MSELoss", None),
    ), 5):  # fmt: skip
        assert measures(*script, more, f"training.batch_size={batch}") == 6
        assert profiler.uncompared == known, more
    Path("layers.py").write_text("width = 3\n")
    measures(*script)
    assert profiler.uncompared is None


def test_what_the_model_prints_is_no_answer_of_the_command(measures, capsys):
    measures()
    assert capsys.readouterr() == ("", "printed by the model\n")


def test_a_job_of_another_name_takes_a_profile_of_any_effort(measures):
    """As the job itself does, whose profile is found by its name."""
    assert measures(effort="fast") == 6
    assert measures("name=other") == 0
    assert measures("name=other", effort="normal") == 6


CHANGES = (
    *("training.batch_size=16", "pipeline.micro_batches=2", "pipeline.stages=2"),
    *("resources.tasks_per_node=2", "resources.cpus_per_task=2"),
)


def test_the_second_time_nothing_is_measured_unless_what_counts_is_another(
    profiler, measures, monkeypatch
):
    assert measures() == 6
    PLACE.unlink()
    assert measures() == 0
    assert [path.suffix for path in CACHE.iterdir() if "rows-" not in path.name] == [".json"]
    assert measures("training.steps=7", "pipeline.schedule=gpipe", "name=other") == 0
    assert measures(again=True) == 6
    assert measures(effort="fast") == measures(effort="thorough") == 6
    assert profiler.efforts == [Effort.NORMAL, Effort.NORMAL, Effort.FAST, Effort.THOROUGH]
    for change in CHANGES:
        assert [measures(change), measures(change)] == [6, 0], change
    device = Profile.load(PLACE).device
    assert (device.kind, device.threads, device.neighbours) == ("cpu", 2, 0)
    assert device.model
    assert measures(change, "launch.progress=core") == 6
    assert Profile.load(PLACE).device.threads == 1
    Path("layers.py").write_text("width = 2\n")
    assert [measures(), measures()] == [6, 0]
    for name, other in {
        "processor": lambda: "another",
        "version": lambda _package: "9.9",
        "_hash_of_measuring_code": lambda: "changed",
    }.items():
        monkeypatch.setattr(profiles, name, other)
        assert [measures(), measures()] == [6, 0], name


def test_the_cache_knows_the_files_that_measure_by_names_that_they_have():
    of_pattern = {each: set(PACKAGE.glob(each)) for each in profiles._MEASURING_CODE}
    assert [each for each, files in of_pattern.items() if not files] == []
    read = {each.target for each in all_imports() if each.file == "profile.py"}
    described = {PACKAGE / f"{part}.py" for part in read if LAYER_OF.get(part) == 1}
    assert described <= set().union(*of_pattern.values())


def test_variables_of_a_job_hold_where_it_is_measured_and_those_that_count_measure_again(
    profiler, measures, tmp_path
):
    """Those that the user's modules name, or that libraries read which compute."""
    Path("layers.py").write_text(
        "import os\nwidth = int(os.environ.get('WIDTH', os.getenv('A_KEY')))"
    )
    path = sys.path[:]
    for variables, width, count in (
        ("WIDTH: 3", "3", 6),
        ("WIDTH: 3, OTHER: 1, A_KEY: 2, HF_TOKEN: x, TMPDIR: /tmp, PYTHONHASHSEED: 0", "3", 0),
        (f"WIDTH: 4, PYTHONPATH: {tmp_path}", "4", 6),
        (f"WIDTH: 4, PYTHONPATH: {tmp_path}, OMP_PROC_BIND: close", "4", 6),
    ):
        assert measures(f"environment.variables={{{variables}}}") == count, variables
        assert profiler.width == width
        assert not os.environ.keys() & {"WIDTH", "OTHER", "OMP_PROC_BIND"}
        assert sys.path == path


def test_damaged_entries_are_measured_anew(measures):
    measures()
    (path,) = CACHE.glob("[!r]*.json")
    good = path.read_text()
    others = ({"version": 2}, {"nodes": []}, {"edges": None})
    changed = (json.dumps({**json.loads(good), **other}) for other in others)
    for text in ("", "null", good[:-30], "\0" * 100, *changed):
        path.write_text(text)
        assert [measures(), measures()] == [6, 0]


def test_an_interrupted_one_goes_on_where_it_was_if_nothing_has_changed(
    profiler, spec_of, measures
):
    def interrupted(stop_at, **options):
        profiler.stop_at = stop_at
        with pytest.raises(Interrupted) as stopped:
            measure(spec_of(), PLACE, **options)
        profiler.stop_at = None
        return stopped.value.kept

    PLACE.parent.mkdir()
    PLACE.write_text("good")
    assert interrupted(2) == 2
    assert PLACE.read_text() == "good"
    assert measures() == 4
    assert Profile.load(PLACE).device.resumed == 2
    assert interrupted(1, again=True) == 1
    assert measures() == 0
    assert measures(again=True) == 5
    assert Profile.load(PLACE).device.resumed == 1
    interrupted(2, again=True)
    Path("layers.py").write_text("width = 2\n")
    assert measures(again=True) == 6
    assert Profile.load(PLACE).device.resumed == 0


def test_the_cache_is_in_the_output_directory_where_old_files_make_room(
    profiler, spec_of, measures, monkeypatch
):
    measure(spec_of("output.directory=elsewhere"))
    assert (Path("elsewhere/.cache").is_dir(), CACHE.exists()) == (True, False)
    monkeypatch.setattr(profiles, "_MAX_CACHED", 2)
    for batch in (8, 16, 32):
        measures(f"training.batch_size={batch}")
    assert len(list(CACHE.iterdir())) == 2
    assert measures("training.batch_size=32") == 0


@pytest.mark.mpi
@pytest.mark.usefixtures("measured_rows")
def test_two_ranks_of_this_machine_measure_rows(write_job, monkeypatch, warm_python):
    monkeypatch.setattr("pipectl.jobs.rows._ROW_PATIENCE_S", 500.0)  # the machine may be busy
    monkeypatch.setattr(sys, "executable", warm_python)
    spec = load(write_job("resources: {tasks_per_node: 2}"), check_files=False)
    reports = []
    rows, assumption = start_row_probe(spec, "local", "fast", lambda *each: reports.append(each))
    assert (rows is not None, assumption) == (True, "")
    for table in (rows.send_start, rows.send_wait, rows.receive_start, rows.receive_wait):
        assert [size for size, _ in table] == [4096, 65536, 262144, 1048576]
        assert all(0 < seconds < 1 for _, seconds in table)
    assert all(0 < seconds < 1 for seconds in (rows.compute, rows.begin, rows.end))
    assert reports == [(0, 0, "measuring messages between ranks")]


def test_two_ranks_under_srun_have_as_many_cores_as_ranks_of_the_job(write_job, monkeypatch):
    commands = []

    def run(argv, **_options):
        commands.append(argv)
        return process.Completed(1, "", "no")

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    lines = "launch: {launcher: srun}", "resources: {tasks_per_node: 2, cpus_per_task: 2}"
    rows, assumption = start_row_probe(load(write_job(*lines), check_files=False), "slurm")
    assert (rows, "--cpus-per-task=2" in commands[-1]) == (None, True)
    assert assumption.endswith(" (two ranks did not start: no)")


def test_output_directories_of_a_user_share_the_times_of_rows(measures, tmp_path, monkeypatch):
    asked = []

    def start_row_probe(*arguments):
        asked.append(arguments)
        return RowTimes(), ""

    monkeypatch.setattr(profiles, "user_cache", user_cache)
    monkeypatch.setattr(profiles, "start_row_probe", start_row_probe)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measures()
    assert (measures("output.directory=elsewhere"), len(asked)) == (6, 1)
    measures("output.directory=more", "launch.bind=cores")
    measures(effort="thorough")
    assert len(asked) == 3
    measures(again=True)
    assert len(asked) == 4


MORE = "pipeline: {stages: 2, micro_batches: 4, memory_limit: 1GiB}", "resources: {nodes: 2}"
SUBMITTED = 1.7e9


@pytest.fixture
def run(tmp_path, write_job):
    """A run directory as a submission without a profile leaves it."""
    run = RunDirectory.create(tmp_path, "tiny", SUBMITTED)
    run.job.write_text(dump(load(write_job(*MORE))))
    assumed_cluster("test", [1, 1], 1, None).save(run.cluster)
    Record("tiny", "slurm", "t", SUBMITTED, ranks=2, nodes=2, steps=4).save(run.record)
    return run


@pytest.fixture
def measured(monkeypatch, profile):
    """Replaces the profiler; the list says what was measured."""
    calls = []

    def measure(spec, path, progress):
        assert Path(spec.output.directory) == path.parents[1]
        calls.append(path)
        progress(1, 3, "op0")
        replace(profile, source=f"measurement {len(calls)}").save(path)
        return Profile.load(path)

    monkeypatch.setattr("pipectl.jobs.profiles.measure", measure)
    return calls


@pytest.mark.parametrize(
    ("other_model", "checkpoint", "measurements"), [(0, 0, 1), (1, 0, 2), (1, 1, 1)]
)
def test_a_profile_and_a_plan_are_made_unless_what_is_there_is_of_this_model_or_weights_are_saved(
    run, profile, measured, monkeypatch, other_model, checkpoint, measurements
):
    """Heartbeats tell how far it is."""
    beats = []
    run.start_of(3).errors.mkdir(parents=True)
    monkeypatch.setenv("PIPECTL_START", str(run.start.path))
    monkeypatch.setattr(Heartbeat, "save", lambda beat, path: beats.append((path, beat)))
    assert in_job.main([str(run.path)]) == 0
    assert [path for path, _ in beats] == [run.start.heartbeat] * 2
    assert [beat.state for _, beat in beats] == ["profiling 33%", "planning"]
    assert [(beat.step, beat.steps, beat.attempt) for _, beat in beats] == [(0, 4, 3)] * 2
    assert json.loads((run.trace / "predicted.json").read_text())["ranks"] == 2
    plan = replace(Plan.load(run.plan), assumptions=("mine",))
    assert len(plan.stages) == 2
    plan.save(run.plan)
    if other_model:
        replace(profile, key="of another model").save(run.profile)
    if checkpoint:
        (run.checkpoints / "step-000002").mkdir()
    in_job.profile_and_plan(run)
    assert measured == [run.profile] * measurements
    assert (Plan.load(run.plan) == plan) == (measurements == 1)


def test_a_failure_is_reported_in_the_run_and_on_standard_error(run, measured, capsys):
    run.job.write_text(run.job.read_text().replace(": 1GiB\n", ": 1MiB\n"))
    assert in_job.main([str(run.path)]) == 4
    assert (run.profile.exists(), run.plan.exists()) == (True, False)
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: no feasible plan: ")
    report = json.loads((run.start.errors / "prepare.json").read_text())
    said = [report[key] for key in ("type", "message", "hint", "exit_code")]
    assert said == ["InfeasibleError", error[7:], hint.strip(), 4]


@pytest.mark.parametrize(
    ("there", "replaced"), [(None, True), (-5, True), (5, False), ("a directory", False)]
)
def test_the_profile_is_put_where_later_commands_look_if_that_can_be_and_none_is_newer(
    run, measured, there, replaced
):
    place = run.path.parent / "tiny.profile.json"
    if there == "a directory":
        place.mkdir()
    elif there is not None:
        place.write_text("another")
        os.utime(place, (SUBMITTED + there, SUBMITTED + there))
    in_job.profile_and_plan(run)
    assert run.plan.exists()
    assert (place.is_file() and place.read_text() == run.profile.read_text()) == replaced
    if replaced:
        place.write_text("of the job as it is now")
        os.utime(place, (SUBMITTED - 5, SUBMITTED - 5))
        in_job.profile_and_plan(run)
        assert place.read_text() == "of the job as it is now", "the run had its profile already"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ("processor : 0\ncpu family : 6\nmodel name : Xeon 1\nmodel name : Xeon 2", "Xeon 1"),
        ("processor : 0\nModel Name : Loongson-3C5000L", "Loongson-3C5000L"),
        ("processor : 0\ncpu : POWER9, altivec supported", "POWER9, altivec supported"),
        (
            "processor : 0\nCPU implementer : 0x41\nCPU architecture: 8\nCPU part : 0xd4f",
            "aarch64, CPU implementer 0x41, CPU part 0xd4f",
        ),
        ("vendor_id : IBM/S390", "aarch64"),
        (None, "aarch64"),
    ],
)
def test_processors_of_other_kinds_have_other_names(tmp_path, monkeypatch, fields, name):
    """Else a profile that one kind has measured would be taken for another."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    if fields is not None:
        (tmp_path / "cpuinfo").write_text(fields)
    assert profiles.processor(tmp_path / "cpuinfo") == name
