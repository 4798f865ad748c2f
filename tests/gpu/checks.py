"""What only a GPU can show, in ten minutes: parts in order of their value, each with a time limit.

    tests/gpu/run.sh [--emulated] [OUT]

A part is a process of its own, so that what crashes or hangs ends that part alone. It prints its
figures as JSON in its last line and fails with its words. ``results.json`` and ``results.md`` are
written after every part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from building import build

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
TOTAL_S = 600
PARTS = {  # seconds that each may take
    "start": 60,
    "tests": 120,
    "equality": 170,
    "races": 60,
    "rows": 45,
    "offload": 30,
    "messages": 45,
    "prediction": 120,
    "overhead": 45,
}


@dataclass
class Result:
    """What a part found.

    Args:
        state: ``ok``, ``failed``, or ``too long``.
        figures: by name.
        words: the end of its output, if it did not succeed.
    """

    part: str
    state: str
    seconds: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""


def run_part(part: str, limit_s: float, out: Path, environment: Mapping[str, str]) -> Result:
    """Run a part; its output is in ``OUT/PART.log``."""
    start, log = time.monotonic(), out / f"{part}.log"
    state = "ok"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "parts.py"), part],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=CHECKOUT,
            start_new_session=True,
        )
        try:
            if process.wait(limit_s):
                state = "failed"
        except subprocess.TimeoutExpired:
            state = "too long"
            os.killpg(process.pid, 9)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    figures: dict[str, Any] = {}
    for line in lines:  # what was found before a part failed counts, too
        if line.startswith('{"'):
            figures.update(json.loads(line))
    words = "" if state == "ok" else "\n".join(lines[-20:])
    return Result(part, state, round(time.monotonic() - start, 1), figures, words)


def write(results: list[Result], out: Path) -> None:
    """Write what is known so far."""
    (out / "results.json").write_text(json.dumps([asdict(each) for each in results], indent=1))
    lines = ["# On a GPU", "", "| part | state | seconds | figures |", "|---|---|---|---|"]
    for each in results:
        figures = ", ".join(f"{name} {value}" for name, value in each.figures.items())
        lines.append(f"| {each.part} | {each.state} | {each.seconds} | {figures} |")
    for each in results:
        if each.words:
            lines += ["", f"## {each.part}", "", "```", each.words, "```"]
    (out / "results.md").write_text("\n".join(lines) + "\n")


def emulate(out: Path) -> dict[str, str]:
    """Build the pretended accelerator; returns the variables that make it known."""
    site = out / "site"
    build(site)
    return {"PYTHONPATH": str(site), "PRETENDED_LATE": "1", "PIPECTL_GPU_CHECKS": "emulated"}


def main() -> None:
    """Run all parts, or those named after OUT."""
    arguments = [each for each in sys.argv[1:] if not each.startswith("-")]
    out = Path(arguments[0]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PIPECTL_GPU_OUT": str(out), "PATH": programs}
    if "--emulated" in sys.argv:
        environment |= emulate(out)
    results: list[Result] = []
    end = time.monotonic() + TOTAL_S
    for part in arguments[1:] or PARTS:
        left_s = end - time.monotonic()
        if left_s < 5:
            break
        results.append(run_part(part, min(PARTS[part], left_s), out, environment))
        print(f"{part}: {results[-1].state}, {results[-1].seconds} s", flush=True)
        write(results, out)
    sys.exit(
        any(each.state != "ok" for each in results) or len(results) < len(arguments[1:] or PARTS)
    )


if __name__ == "__main__":
    main()
