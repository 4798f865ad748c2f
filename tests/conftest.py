"""Builders that several test folders share, and how tests are spread over processes."""

import fcntl
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from multiprocessing import spawn
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from pipectl.lanes import routes
from pipectl.link import RowTimes
from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.schedule import default_warm_up

settings.register_profile("busy machines", deadline=None)
settings.load_profile("busy machines")

gc.disable()
"""Until all tests are there: what is imported stays, and looking through it takes seconds."""
os.environ["OMP_NUM_THREADS"] = "1"
"""Several processes share the cores; threads that wait for each other would keep them busy."""
os.environ["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
"""Ranks that wait within MPICH then leave their cores to those that they wait for."""
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
"""Whoever asks for GPUs otherwise begins CUDA, which is then of no use to forks."""
# Else each process that a test starts would compile what it imports, and each run all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
PYTHON, ENVIRONMENT = sys.executable, {**os.environ}
"""As they are before a test changes them."""
SHARED, TESTS_PID = "PIPECTL_TESTS", "PIPECTL_TESTS_PID"
"""Where the environment names the folder of all processes of a run of tests, and the first one."""
WARM = Path(__file__).parent / "warm"
TOGETHER = ("tests/slurm/", "tests/capture/", "tests/equality/")
"""Folders whose files share what takes long to make, so one process runs them."""
LONG = (
    "tests/runtime/checkpoint/test_resumed_runs.py",
    "tests/runtime/test_equal_trainings.py",
    "tests/runtime/test_readings.py",
    "tests/docs/test_pages_that_run.py",
)
"""Further files that are begun first, because one process runs each for minutes."""
WAITING = "tests/watch/"
"""The tests of this folder wait for most of their time."""

ROWS = RowTimes(compute=5e-5, begin=1e-3, end=1e-3)
"""Of profiles that tests make; tests/warm/server.py has the same."""
COST = StageCost(
    forward_s=1.0,
    backward_s=2.0,
    update_s=0.0,
    parameter_bytes=0,
    optimizer_bytes=0,
    saved_bytes=0,
)


def make_plan(
    stages: int = 4,
    micro_batches: int = 8,
    *,
    schedule: str = "1f1b",
    warm_up: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    node_of_rank: Sequence[int] | None = None,
    costs: Sequence[StageCost] | None = None,
    size_bytes: int = 0,
    skips: Sequence[tuple[int, tuple[int, ...], bool]] = (),
    batch_size: int | None = None,
    micro_batch_size: int = 1,
    memory_limit_bytes: int | None = None,
) -> Plan:
    """A chain of stages, one a rank unless ``ranks`` says otherwise.

    Args:
        skips: further values: producing stage, stages of its uses, whether a gradient comes back.
    """
    ranks = list(ranks or range(stages))
    return Plan(
        name="pipeline",
        fingerprint=None,
        schedule=schedule,
        warm_up=tuple(
            warm_up or default_warm_up(schedule, stages, micro_batches, ranks=len(set(ranks)))
        ),
        batch_size=batch_size or micro_batches * micro_batch_size,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        stages=tuple(
            Stage((f"n{index}",), (ranks[index],), costs[index] if costs else COST)
            for index in range(stages)
        ),
        transfers=_transfers(stages, skips, size_bytes),
        node_of_rank=tuple(node_of_rank or [0] * (max(ranks) + 1)),
        memory_limit_bytes=memory_limit_bytes,
    )


def _transfers(
    stages: int, skips: Sequence[tuple[int, tuple[int, ...], bool]], size_bytes: int
) -> tuple[Transfer, ...]:
    """Of a chain: each stage to the next, and further values."""
    values = [(stage, (stage + 1,), True) for stage in range(stages - 1)] + list(skips)
    return tuple(
        Transfer(*lane, size_bytes)
        for producer, uses, has_gradient in values
        for lane in routes(producer, uses, has_gradient=has_gradient)
    )


@pytest.fixture(autouse=True)
def signals_as_a_shell_leaves_them() -> Iterator[None]:
    """A run of the tests in the background ignores some, and so would all that tests start."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_measuring_of_rows(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Profiles have the same times of rows: two ranks would measure them for seconds.

    Tests with the argument ``measured_rows`` measure them.
    """
    if "measured_rows" not in request.fixturenames:
        monkeypatch.setattr("pipectl.jobs.profiles.start_row_probe", lambda *_: (ROWS, ""))
        monkeypatch.setattr("pipectl.jobs.profiles.user_cache", lambda _: None)


@pytest.fixture(autouse=True)
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What multiprocessing spawns is forked from a Python that has loaded torch.

    Tests of what such a process shares with its parent use ``sys.executable``.
    """
    monkeypatch.setattr(spawn, "get_executable", lambda: os.fsencode(warm_server("python")))


@pytest.fixture(autouse=True)
def no_code_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process profiles jobs that belong together; not here."""
    monkeypatch.setattr("pipectl.spec.code._loaded", {})


@pytest.fixture
def measured_rows() -> None:
    """See ``no_measuring_of_rows``."""


@pytest.fixture(scope="session")
def snapshot() -> Callable[[Path, str], None]:
    """``snapshot(file, text)``: they are the same; ``make golden`` writes the text there."""

    def compare(file: Path, text: str) -> None:
        if os.environ.get("PIPECTL_GOLDEN") == "write":
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, "utf-8")
        assert text == file.read_text("utf-8"), f"{file} differs; if that is intended: make golden"

    return compare


@pytest.fixture(scope="session")
def pipeline() -> Callable[..., Plan]:
    """:func:`make_plan`."""
    return make_plan


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of ``-n auto``: tests of real ranks wait for each other a good deal."""
    return min(8, 2 * len(os.sched_getaffinity(0)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Processes take whole files, or folders that stay together, in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder that all processes of a run share."""
    if SHARED not in os.environ:  # else a run of tests has begun this process
        os.environ[SHARED] = tempfile.mkdtemp(prefix="pipectl-")  # the names of sockets are short
        os.environ[TESTS_PID] = str(os.getpid())
        config.add_cleanup(partial(shutil.rmtree, os.environ[SHARED]))


def warm_server(name: str, *modules: str, site: Path | None = None) -> str:
    """A Python whose ``-m MODULE`` is a fork of one that has loaded torch, see tests/warm.

    The first process of a run that asks for it starts it.

    Args:
        modules: whose work is done for all that is started in this way.
        site: where pipectl is installed, if not here.
    """
    folder = Path(os.environ[SHARED], name)
    python, launcher = folder / "python", Path(sys.prefix) / "bin" / "mpiexec"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            python.write_text(f"#!{PYTHON} -IS\n{(WARM / 'client.py').read_text()}")
            python.chmod(0o755)
            if launcher.exists():  # jobs look for it beside Python
                (folder / "mpiexec").write_text(f'#!/bin/sh\nexec {quote(str(launcher))} "$@"\n')
                (folder / "mpiexec").chmod(0o755)
            command = [PYTHON, WARM / "server.py", folder, *modules]
            # As the processes of a job: a fork hashes as what it was forked from.
            known = {name: os.environ[name] for name in (SHARED, TESTS_PID)}
            path = {"PYTHONPATH": str(site)} if site else {}
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                cwd=WARM,
                env={**ENVIRONMENT, **known, "PYTHONHASHSEED": "0", **path},
            )
            STARTED.append(server)
            assert server.stdout is not None
            answer = server.stdout.readline()
            assert answer in (b"ready\n", b"CUDA has begun\n")
            if answer != b"ready\n":
                python.write_text(f'#!/bin/sh\nexec {quote(PYTHON)} "$@"\n')
    return str(python)


STARTED: list[subprocess.Popen[bytes]] = []
"""They end with the run of tests."""


@pytest.fixture(scope="session")
def warm_python() -> str:
    """See :func:`warm_server`.

    What a test proves of how processes start, of their memory or of who their parent is, it proves
    with ``sys.executable``.
    """
    return warm_server("python")


@pytest.fixture(scope="session")
def warm_python_of() -> Callable[..., str]:
    """``warm_python_of(name, *modules)``: see :func:`warm_server`."""
    return warm_server


@pytest.fixture(scope="session")
def mpiexec() -> str:
    """The launcher that came with pipectl, else that of the machine."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert found, "no mpiexec: pip install mpich"
    return found


@pytest.fixture(scope="session")
def launch(
    request: pytest.FixtureRequest, mpiexec: str
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``launch(ranks, *arguments)``: Python under mpiexec; with 0 ranks, one process without it.

    The processes are forks of one that has loaded torch; with ``fresh=True`` they are started as
    jobs start them, with ``python=`` by that program.
    """

    def start(
        ranks: int,
        *arguments: object,
        timeout: float = 500,
        fresh: bool = False,
        python: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        python = sys.executable if fresh else python or request.getfixturevalue("warm_python")
        command = [python, "-m", "mpi4py", *map(str, arguments)]
        return subprocess.run(
            [mpiexec, "-n", str(ranks), *command] if ranks else command,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return start


@pytest.fixture(scope="session")
def work(launch: Callable[..., Any]) -> Callable[..., Any]:
    """``work(ranks, run)``: the worker on a run directory; see ``launch``."""
    worker = ("-m", "pipectl.runtime.worker", "--run")
    return lambda ranks, run, **how: launch(ranks, *worker, run.path, **how)


@pytest.fixture(scope="session")
def train(launch: Callable[..., Any]) -> Callable[..., None]:
    """``train(*runs)``: all of them to their end; one launch for those of as many ranks."""
    program = Path(__file__).parent / "runtime" / "ranks_in_turn.py"

    def start(*runs: Any) -> None:
        ranks_of = {run.path: Plan.load(run.plan).ranks for run in runs}
        for ranks in sorted({*ranks_of.values()}):
            paths = [path for path, count in ranks_of.items() if count == ranks]
            done = launch(ranks if ranks > 1 else 0, program, *paths)
            assert done.returncode == 0, done.stderr

    return start


EQUALITY = Path(__file__).parent / "equality" / "models.py"
REAL = {
    **dict.fromkeys(("gpt", "tied"), (f"{EQUALITY}:token_loss", f"{EQUALITY}:Tokens")),
    **dict.fromkeys(("cnn", "dense"), ("torch.nn:CrossEntropyLoss", f"{EQUALITY}:Images")),
}
"""Loss and data of the models of the equality tests."""


@pytest.fixture(scope="session")
def spec_maker(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Callable[..., Any]]:
    """``spec_maker(file)(model, loss=, data=, **sections)``: a job with the models of a file.

    Names with a colon are in other files; gpt, tied, cnn and dense are those of the equality tests.
    ``kwargs``, ``materialize``, ``opaque`` and ``weights`` are those of the model.
    """
    import yaml

    from pipectl.spec import load

    def maker(models: Path) -> Callable[..., Any]:
        def factory(name: Any, kwargs: dict[str, Any] | None = None) -> Any:
            if isinstance(name, dict) or name == "model":
                return name
            return {"factory": name if ":" in name else f"{models}:{name}", "kwargs": kwargs or {}}

        def make(model: str, *, loss: str = "", data: Any = "", **more: Any) -> Any:
            usual = REAL.get(model, ("torch.nn:CrossEntropyLoss", "Vectors"))
            options = {k: more.pop(k) for k in ("materialize", "opaque", "weights") if k in more}
            place = f"{EQUALITY}:{model}" if model in REAL else model
            document = {
                "version": 1,
                "name": "job",
                "site_defaults": False,
                "model": {**factory(place, more.pop("kwargs", None)), **options},
                "loss": factory(loss or usual[0], more.pop("loss_kwargs", None)),
                "data": factory(data or usual[1]),
                "training": {"steps": 1, "batch_size": 8},
                **more,
            }
            path = tmp_path_factory.mktemp("spec") / "job.yaml"
            path.write_text(yaml.safe_dump(document))
            return load(path)

        return make

    return maker


@pytest.fixture(scope="session")
def profile_of() -> Callable[[Any], Any]:
    """``profile_of(spec)``: as if for one rank without neighbours; once per model and run of tests.

    Other data of the same shapes, and other optimizers, would change its times alone, which are
    those of two rounds; what stages take besides their operators is not measured. It does not know
    whether other processes read the same samples, and tries nothing else of the job: ranks show
    what they refuse.
    """
    from pipectl.jobs.profiles import this_device
    from pipectl.profile import Profile
    from pipectl.profile_parts import SplitBackward, StageOverhead
    from pipectl.profiler import effort, profile_job
    from pipectl.profiler.fit import Fit

    overhead = StageOverhead(2e-5, 1e-5, 1e-5, 2e-5, 1e-5, 1e-5)
    fit = Fit(overhead, (1.0, 1.0), 0.0, SplitBackward())
    twice = effort.Rounds(2, 2, 1e-6)
    unread = SimpleNamespace(compare=lambda _: None)

    def profile(spec: Any) -> Any:
        alone = spec.resources.model_copy(update={"tasks_per_node": 1})
        spec = spec.model_copy(update={"resources": alone})
        precision, sizes = spec.training.precision, effort.measured_sizes(spec, effort.Effort.FAST)
        job = f"{spec.script!r} {spec.model!r} {spec.loss!r} {precision}"
        key = f"{job} {sizes} {alone.gpus_per_node}"
        file = Path(os.environ[SHARED]) / f"{sha256(key.encode()).hexdigest()}.json"
        if not file.exists():  # no process has measured it yet
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(effort._LIMITS, effort.Effort.FAST, (twice, twice, None))
                patch.setattr("pipectl.profiler.job.other_reader", lambda _: nullcontext(unread))
                patch.setattr("pipectl.profiler.job._Profiling._fit", lambda *_: fit)
                for tried in ("try_job", "try_metrics"):
                    patch.setattr(f"pipectl.profiler.job.{tried}", lambda *_: None)
                profile_job(spec, this_device(spec), effort=effort.Effort.FAST).save(file)
        return Profile.load(file)

    return profile


@pytest.fixture(scope="session")
def run_in(profile_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """``run_in(folder, spec)``: a run directory with job, profile and plan."""
    from pipectl.cluster import assumed_cluster
    from pipectl.jobs.planning import plan_job
    from pipectl.runs import RunDirectory
    from pipectl.spec import dump

    def make(folder: Path, spec: Any) -> Any:
        profile, ranks = profile_of(spec), spec.resources.ranks
        run = RunDirectory.create(folder, spec.name, 0.0)
        run.job.write_text(dump(spec))
        profile.save(run.profile)
        cluster = assumed_cluster("here", [ranks], ranks, None)
        plan_job(spec, profile, cluster).save(run.plan)
        return run

    return make


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, Any]]:
    """``contents(checkpoint)``: every tensor and number in it, to be compared to the bit.

    Raises:
        DataFileError: a file of it is damaged.
    """

    def read(directory: Path) -> dict[str, Any]:
        from safetensors import safe_open

        from pipectl.runtime import checkpoint

        manifest = checkpoint.load(directory).manifest
        found: dict[str, Any] = {"updates": manifest.updates, "scale": manifest.loss_scale}
        for shard in manifest.shards:
            with safe_open(directory / shard.file, "np") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    tensor = file.get_tensor(name)
                    found[name] = tensor.shape, str(tensor.dtype), tensor.tobytes()
                found |= json.loads((file.metadata() or {}).get("optimizer", "{}"))
        return found

    return read


def pytest_collection_finish() -> None:
    """What is there now is garbage at no time."""
    gc.freeze()
    gc.enable()


def scope_of(nodeid: str) -> str:
    """The file of a test, or the folder that stays together."""
    shared = (folder for folder in TOGETHER if nodeid.startswith(folder))
    return next(shared, nodeid.partition("::")[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first: folders that stay together, files with tests that take minutes,
    those that start ranks or wait, then those that compute for seconds.

    At the end, short files then keep all processes of ``pytest -n`` at work.
    """
    marked = {
        marker: {scope_of(item.nodeid) for item in items if item.get_closest_marker(marker)}
        for marker in ("mpi", "slow")
    }

    def place(item: pytest.Item) -> tuple[bool, ...]:
        scope = scope_of(item.nodeid)
        return (
            scope not in TOGETHER,
            scope not in LONG,
            scope not in marked["mpi"] and not scope.startswith(WAITING),
            scope not in marked["slow"],
        )

    items.sort(key=place)
