"""What only a GPU can show, in ten minutes: parts in order of their value, each with a time limit.

    tests/gpu/run.sh [--emulated] [OUT]

A part is a process of its own, so that what crashes or hangs ends that part alone. It prints its
figures as lines of JSON, as soon as it knows them, and fails with its words. ``results.json`` and
``results.md`` are written after every part. The limits of all parts together fit into the total.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil

from tests.gpu.building import build

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
TOTAL_S = 595
PARTS = {  # seconds that each may take
    "start": 30,
    "tests": 95,
    "equality": 205,
    "races": 50,
    "rows": 40,
    "overhead": 40,
    "offload": 25,
    "messages": 30,
    "prediction": 75,
}


@dataclass
class Result:
    """What a part found.

    Args:
        state: ``ok``, ``failed``, ``too long``, or ``no time`` if it was not begun.
        figures: by name.
        words: the end of its output, if it did not succeed.
    """

    part: str
    state: str
    seconds: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""


def run_part(part: str, limit_s: float, out: Path, environment: Mapping[str, str]) -> Result:
    """Run a part, whose output goes to the end of ``OUT/parts.log``; what it leaves is killed."""
    start, before = time.monotonic(), {*psutil.Process().children(recursive=True)}
    with (out / "parts.log").open("a+", errors="replace") as log:
        print(f"\n=== {part}", file=log, flush=True)
        begin = log.tell()
        process = subprocess.Popen(
            [sys.executable, str(HERE / "parts.py"), part],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, "PIPECTL_GPU_UNTIL": str(start + limit_s)},
            cwd=CHECKOUT,
        )
        code = wait(process.pid, limit_s)
        state = "too long" if code is None else "failed" if code else "ok"
        for left in {*psutil.Process().children(recursive=True)} - before:
            with suppress(psutil.NoSuchProcess):
                left.kill()
        if code is None:
            code = wait(process.pid, limit_s=10)
        process.returncode = code
        log.seek(begin)
        lines = log.read().splitlines()
    figures: dict[str, Any] = {}
    for line in lines:  # what was found before a part failed counts, too
        if line.startswith('{"'):
            figures.update(json.loads(line))
    words = "" if state == "ok" else "\n".join(lines[-20:])
    return Result(part, state, round(time.monotonic() - start, 1), figures, words)


def wait(pid: int, limit_s: float) -> int | None:
    """The exit code of a process; None if it takes too long.

    Orphans are waited for, too: jobs that have ended must not look alive to those who ask for them.
    """
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if not ended:
            time.sleep(0.02)
    return None


def adopt() -> None:
    """Become the parent of orphans: jobs outlive the command that submits them."""
    set_child_subreaper = 36
    if ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0):
        raise OSError("this system has no subreapers")


def write(results: list[Result], out: Path) -> None:
    """Write what is known so far."""
    (out / "results.json").write_text(json.dumps([asdict(each) for each in results], indent=1))
    lines = ["# On a GPU", "", "| part | state | seconds | figures |", "|---|---|---|---|"]
    for each in results:
        figures = "; ".join(f"{name}: {value}" for name, value in each.figures.items())
        lines.append(f"| {each.part} | {each.state} | {each.seconds} | {figures} |")
    for each in results:
        if each.words:
            lines += ["", f"## {each.part}", "", "```", each.words, "```"]
    (out / "results.md").write_text("\n".join(lines) + "\n")


def emulate() -> dict[str, str]:
    """Build the pretended accelerator; returns the variables that make it known.

    Commands and ranks are forks of a Python that has loaded torch, as in the tests: two cores would
    import it for most of the ten minutes.
    """
    site = Path(mkdtemp(prefix="pipectl-site-"))
    build(site)
    os.environ |= {"PYTHONPATH": str(site), "PRETENDED_LATE": "1"}
    sys.path.insert(0, str(HERE.parent))
    tests = importlib.import_module("conftest")
    shared = {tests.SHARED: mkdtemp(prefix="pipectl-"), tests.TESTS_PID: str(os.getpid())}
    os.environ |= shared
    python = Path(tests.warm_server("python", site=site))
    program = python.with_name("pipectl")
    program.write_text(f'#!/bin/sh\nexec {python} -m pipectl "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    return {"PATH": path, "PIPECTL_GPU_CHECKS": "emulated"}


def main() -> None:
    """Run all parts, or those named after OUT."""
    arguments = [each for each in sys.argv[1:] if not each.startswith("-")]
    out = Path(arguments[0]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + TOTAL_S
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    jobs = mkdtemp(prefix="pipectl-gpu-")
    # Unbuffered: what a part has said is in its log when it is killed.
    os.environ |= {"PIPECTL_GPU_JOBS": jobs, "PATH": programs, "PYTHONUNBUFFERED": "1"}
    (out / "parts.log").unlink(missing_ok=True)
    adopt()
    emulated = emulate() if "--emulated" in sys.argv else {}
    environment = {**os.environ, **emulated}
    results: list[Result] = []
    for part in arguments[1:] or PARTS:
        left_s = end - time.monotonic()
        if left_s < 5:
            results.append(Result(part, "no time", 0.0))
        else:
            results.append(run_part(part, min(PARTS[part], left_s), out, environment))
        print(f"{part}: {results[-1].state}, {results[-1].seconds} s", flush=True)
        write(results, out)
    shutil.rmtree(jobs)
    sys.exit(any(each.state != "ok" for each in results))


if __name__ == "__main__":
    main()
