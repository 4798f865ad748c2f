"""The parts of checks.py; each prints its figures as JSON, and fails by an exception."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
JOBS = Path(os.environ["PIPECTL_GPU_JOBS"])
JOB = HERE / "job.yaml"
EMULATED = "PIPECTL_GPU_CHECKS" in os.environ
MIB = 2**20


def tell(**figures: object) -> None:
    """Print figures of this part."""
    print(json.dumps(figures), flush=True)


def pipectl(*arguments: str, may_fail: bool = False, limit_s: float | None = None) -> str:
    """Run a command in a folder of its own; returns what it prints.

    What takes longer than its limit is killed, with all that it started.
    """
    with subprocess.Popen(
        ["pipectl", *arguments],
        cwd=JOBS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=limit_s is not None,
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            said, _ = process.communicate()
            said += "\ntoo long"
    print("$ pipectl", *arguments, f"\n{said}", flush=True)
    if process.returncode and not may_fail:
        raise SystemExit(said.strip().splitlines()[-1])
    return said


def submit(*keys: str) -> None:
    """Run the job with some keys."""
    if EMULATED:  # what is measured counts for nothing
        pipectl("profile", str(JOB), "--effort", "fast", *keys)
    pipectl("submit", str(JOB), "--wait", *keys)


def setting(**keys: object) -> list[str]:
    """Options that set keys of the job; ``__`` stands for a dot."""
    pairs = (f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in keys.items())
    return [word for pair in pairs for word in ("--set", pair)]


def synchronize() -> None:
    """Wait for the accelerator."""
    torch.accelerator.synchronize()


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The median time of some work on the accelerator."""
    work()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def start() -> None:
    """Versions, the device, and whether this machine can run jobs."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    module = torch.get_device_module(device)
    name = module.get_device_name() if hasattr(module, "get_device_name") else str(device)
    tell(torch=torch.__version__, python=sys.version.split()[0], device=name)
    found = pipectl("doctor", str(JOB), may_fail=True)  # which looks for batch systems, too
    wrong = [line for line in found.splitlines() if line.startswith(("fail torch", "fail MPI"))]
    if wrong:
        raise SystemExit("\n".join(wrong))


def tests() -> None:
    """The tests that are marked for accelerators."""
    files = [
        f"tests/runtime/test_{name}.py" for name in ("streams_of_accelerators", "on_accelerators")
    ]
    options = ["-n0", "-m", "gpu", "-v", "--durations=8", "-p", "no:cacheprovider"]
    if EMULATED:  # on two cores
        options += ["-k", "streams or host_memory or numbers or tied"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *files])
    if done.returncode:
        raise SystemExit(done.returncode)


SETTINGS: dict[str, tuple[int, dict[str, object]]] = {
    "1f1b, 2 ranks": (2, {}),
    "offload to the host": (2, {"pipeline__offload": "host"}),
    "zb-h1": (2, {"pipeline__schedule": "zb-h1"}),
    "bf16": (2, {"training__precision": "bf16"}),
    "bf16 weights": (2, {"training__precision": "bf16-weights"}),
    "interleaved": (2, {"pipeline__schedule": "interleaved", "pipeline__stages": 4}),
    "backward apart": (2, {"pipeline__backward": "apart"}),
    "1f1b, 4 ranks": (4, {}),
    "float16, with a loss scale": (2, {"training__precision": "float16"}),
    "recompute": (2, {"pipeline__recompute": "all"}),
    "compiled": (2, {"training__compile": True}),
    "dropout, against one rank": (2, {"model__kwargs__dropout": 0.1}),
}
"""Ranks and keys; the most valuable ones first."""


def equality() -> None:
    """Trainings of ranks that share the accelerator against a plain loop in one process."""
    end_s = float(os.environ["PIPECTL_GPU_UNTIL"]) - 5  # by the clock of all processes
    usual: dict[str, object] = {"model__kwargs__dropout": 0.0}
    steps, wrong = tuple[str, ...](), list[str]()
    if EMULATED:
        usual |= {"model__kwargs__width": 32, "model__kwargs__layers": 3}
        steps = ("--steps", "2")
    pipectl("profile", str(JOB), "--effort", "fast", *setting(**usual))  # which most settings share

    def verify(name: str) -> str:
        ranks, keys = SETTINGS[name]
        left_s = end_s - time.monotonic()
        if EMULATED and name == "compiled":
            return "not emulated"
        if left_s < 2:
            return "NO TIME"
        keys = setting(**usual | keys)
        command = ("lab", "verify", str(JOB), *steps, "--ranks", str(ranks), *keys)
        try:
            return pipectl(*command, limit_s=min(60, left_s)).strip().splitlines()[-1]
        except SystemExit as error:
            words = str(error)
            return "TOO LONG" if words == "too long" else f"WRONG: {words}"

    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, min(4, cores // 4))) as threads:
        for name, words in zip(SETTINGS, threads.map(verify, SETTINGS), strict=True):
            tell(**{name: words})
            wrong += [name] if words.startswith(("NO TIME", "TOO LONG", "WRONG")) else []
    if wrong:
        raise SystemExit("; ".join(wrong))


def races() -> None:
    """Many steps with kernels that sleep, while every message is checked."""
    steps = 20 if EMULATED else 300
    factory = f"{HERE / 'sleeping.py'}:build"
    keys = setting(
        model={"factory": factory},
        training__steps=steps,
        pipeline__offload="host",
        environment__variables={"PIPECTL_CHECK_MESSAGES": "1"},
    )
    submit(*keys)
    tell(checked_steps=steps)


def status() -> dict[str, Any]:
    """The newest run."""
    found: dict[str, Any] = json.loads(pipectl("status", "last", "--json"))
    return found


def rows() -> None:
    """Whether recorded rows have the time of the accelerator: one rank is busy nearly always."""
    keys = setting(
        resources__tasks_per_node=1,
        training__steps=12,
        model__kwargs__width=64 if EMULATED else 1024,
    )
    submit(*keys)
    from pipectl.runs import RunDirectory
    from pipectl.timeline import Timeline

    run = status()
    timeline = Timeline.load(RunDirectory(Path(run["directory"])).measured_of(10))
    worked_s = sum(event.end_s - event.start_s for event in timeline.of_rank(0))
    tell(
        step_time_s=run["step_time_s"],
        recorded_step_s=round(timeline.end_s, 6),
        share_in_rows=round(worked_s / timeline.end_s, 3),
        efficiency=run["efficiency"],
    )


def offload() -> None:
    """Offload to the host: bytes per second in each direction, and in both at once."""
    from pipectl.runtime.device import AcceleratorDevice
    from pipectl.runtime.offload import Mover

    device = AcceleratorDevice(0).torch_device
    count = (4 if EMULATED else 512) * MIB
    vector, mover = torch.zeros(count, dtype=torch.uint8, device=device), Mover(None, device)
    places = [mover.leave([vector]).result() for _ in range(2)]  # pinned memory is allocated once
    mover.fetch(places.pop(), [count]).result()
    with timed() as out:
        places.append(mover.leave([vector]).result())
    with timed() as back:
        mover.fetch(places.pop(), [count]).result()
    with timed() as both:
        leaving, coming = mover.leave([vector]), mover.fetch(places.pop(), [count])
        leaving.result()
        coming.result()
    mover.close()
    times = {"out": count / out[0], "back": count / back[0], "both": 2 * count / both[0]}
    tell(**{f"{name}_GB_per_s": round(rate / 1e9, 2) for name, rate in times.items()})


@contextmanager
def timed() -> Iterator[list[float]]:
    """Appends the seconds that its body takes."""
    synchronize()
    found: list[float] = []
    start_s = time.perf_counter()
    yield found
    found.append(time.perf_counter() - start_s)


def messages() -> None:
    """Two ranks on the accelerator: time of messages through host memory, one way."""
    launcher = shutil.which("mpiexec")
    assert launcher is not None
    python = shutil.which("python") if EMULATED else sys.executable  # the former forks
    program = [str(python), "-m", "mpi4py", str(HERE / "messages.py")]
    done = subprocess.run([launcher, "-n", "2", *program], stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    if done.returncode:
        raise SystemExit(done.returncode)


MODELS: dict[str, dict[str, object]] = {
    "gpt, 4 x 256": {"model__kwargs__width": 256},
    "gpt, 8 x 1024": {"model__kwargs__width": 1024, "model__kwargs__layers": 8},
    "gpt, 8 x 1024, bf16": {
        "model__kwargs__width": 1024,
        "model__kwargs__layers": 8,
        "training__precision": "bf16",
    },
}


def prediction() -> None:
    """Predicted against measured step and memory."""
    models = {"gpt, 4 x 64": {"model__kwargs__width": 64}} if EMULATED else MODELS
    steps = 10 if EMULATED else 30
    for name, keys in models.items():
        submit(*setting(training__steps=steps, **keys))
        found = status()
        tell(**{name: {key: found[key] for key in ("measured_over_predicted", "peaks")}})


def overhead() -> None:
    """One rank against a plain loop over the same model, batches and optimizer."""
    width = 64 if EMULATED else 1024
    keys = setting(
        resources__tasks_per_node=1,
        pipeline__micro_batches=1,
        training__steps=40 if not EMULATED else 8,
        model__kwargs__width=width,
    )
    submit(*keys)
    ours = status()["step_time_s"]
    assert isinstance(ours, float)
    sys.path.insert(0, str(HERE.parents[1] / "configs" / "models"))
    gpt: Any = importlib.import_module("gpt")

    device = torch.accelerator.current_accelerator()
    model = gpt.build(98, 64, 4, width, 4, 0.1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    tokens, targets = torch.randint(98, (2, 8, 64)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        gpt.loss(model(tokens), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    plain = seconds(step, 20)
    tell(one_rank_s=ours, plain_loop_s=round(plain, 6), ratio=round(ours / plain, 3))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
