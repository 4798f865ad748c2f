"""Puts the whole corpus to the test and writes the table of ``docs/models.md``.

Started as ``python tests/corpus/table.py [MODEL...]``; with models named, it only prints their
rows. Each model has a process of its own, so that none profits from what another left behind.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import torch

from pipectl.capture import CapturedJob
from pipectl.jobs.profiles import this_device
from pipectl.profiler import profile_job
from tests.corpus import catalogue
from tests.corpus.trial import Trial

CUTS = 10
ENTRIES = {entry.name: entry for entry in catalogue.entries()}
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


def row(name: str) -> str:
    """The line of a model."""
    entry = ENTRIES[name]
    with tempfile.TemporaryDirectory() as folder:
        spec = catalogue.spec_of(entry, Path(folder) / "job.yaml")
        start = time.perf_counter()
        job = CapturedJob(spec)
        job.training_graph(catalogue.MICRO_BATCH)
        job.evaluation_graph(catalogue.MICRO_BATCH)
        capture_s = time.perf_counter() - start
        trial = Trial(job)
        count = sum(not trial.differences(trial.cut(seed)) for seed in range(CUTS))
        start = time.perf_counter()
        profile_job(spec, this_device(spec))
        profile_s = time.perf_counter() - start
    equal = "yes" if count == CUTS else f"**{count} of {CUTS}**"
    plain = "random"
    if not trial.draws:
        differences = trial.plain_differences()
        plain = f"within {max(differences.values()):.0e}" if differences else "equal"
    operators = len(trial.graph.operators)
    figures = f"{operators} | {capture_s:.1f} | {profile_s:.1f} | {CUTS} | {equal} | {plain}"
    return f"| {name} | {entry.trait} | {figures} |"


def main(names: list[str]) -> None:
    rows = []
    for name in names or ENTRIES:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rows.append(pool.submit(row, name).result())
        print(rows[-1], flush=True)
    if not names:
        heading = HEADING.format(
            cuts=CUTS,
            samples=catalogue.MICRO_BATCH,
            torch=torch.__version__,
            vision=f"torchvision {version('torchvision')}",
            language=f"transformers {version('transformers')}",
            date=time.strftime("%Y-%m-%d"),
        )
        DOCUMENT.write_text(heading + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
