"""Puts the whole corpus to the test and writes the table of ``docs/models.md``.

Started as ``python tests/corpus/table.py [MODEL...]``; with models named, it only prints their
rows. Each model has a process of its own, so that none profits from what another left behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import catalogue
import packages
import torch
from catalogue import Entry

from pipectl.capture import CapturedJob
from pipectl.profiler import profile_job

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "equality"))

from trial import Trial

CUTS = 10
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
HEADING = """\
# Models that were tried

This page lists the models with which capture, cuts and training were tried, and how exactly results
agree. `python tests/corpus/table.py` writes it: each model is captured, profiled, cut {cuts} times
at random into 2 to 6 stages, and trained for two steps of two micro-batches through each cut.
*Equal*: losses, gradients, weights, buffers and evaluation outputs of every cut have the bits of
one stage. *User's loop*: the untouched model in plain PyTorch; within rounding if several operators
use one parameter, not compared (*random*) if random numbers are drawn. Micro-batches have {samples}
samples, images are small, one thread computes; seconds are single measurements. To run it, install
with `pip install -c constraints.txt -e '.[mpich,test,corpus]'`.

torch {torch}, {vision}, {language}; {date}.

| model | what it is here for | operators | capture (s) | profile (s) | cuts | equal | user's loop |
|---|---|--:|--:|--:|--:|---|---|
"""


def row(entry: Entry) -> dict[str, Any]:
    """Everything the table says of a model."""
    with tempfile.TemporaryDirectory() as folder:
        spec = catalogue.spec_of(entry, Path(folder) / "job.yaml")
        start = time.perf_counter()
        job = CapturedJob(spec)
        job.training_graph(catalogue.MICRO_BATCH)
        job.evaluation_graph(catalogue.MICRO_BATCH)
        capture_s = time.perf_counter() - start
        trial = Trial(job)
        unequal = [seed for seed in range(CUTS) if trial.differences(trial.cut(seed))]
        start = time.perf_counter()
        profile_job(spec)
        return {
            "name": entry.name,
            "trait": entry.trait,
            "operators": len(trial.graph.operators),
            "capture_s": capture_s,
            "profile_s": time.perf_counter() - start,
            "equal": CUTS - len(unequal),
            "plain": _plain(trial),
        }


def _plain(trial: Trial) -> str:
    if trial.draws:
        return "random"
    differences = trial.plain_differences()
    return f"within {max(differences.values()):.0e}" if differences else "equal"


def _line(found: dict[str, Any]) -> str:
    equal = "yes" if found["equal"] == CUTS else f"**{found['equal']} of {CUTS}**"
    return (
        f"| {found['name']} | {found['trait']} | {found['operators']} | {found['capture_s']:.1f} "
        f"| {found['profile_s']:.1f} | {CUTS} | {equal} | {found['plain']} |"
    )


def _in_a_process(entry: Entry) -> dict[str, Any]:
    command = [sys.executable, __file__, "--row", entry.name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _document(rows: list[str]) -> str:
    heading = HEADING.format(
        cuts=CUTS,
        samples=catalogue.MICRO_BATCH,
        torch=torch.__version__,
        vision=f"torchvision {packages.version('torchvision')}",
        language=f"transformers {packages.version('transformers')}",
        date=time.strftime("%Y-%m-%d"),
    )
    return heading + "\n".join(rows) + "\n"


def main(arguments: list[str]) -> None:
    entries = {entry.name: entry for entry in catalogue.entries()}
    if arguments[:1] == ["--row"]:
        print(json.dumps(row(entries[arguments[1]])))
        return
    rows = []
    for name in arguments or entries:
        rows.append(_line(_in_a_process(entries[name])))
        print(rows[-1], flush=True)
    if not arguments:
        DOCUMENT.write_text(_document(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
