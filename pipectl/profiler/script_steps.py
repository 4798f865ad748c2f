"""Tries jobs of scripts: compares the first steps with what was recorded of them, in another
process, and captures the model.
"""

from __future__ import annotations

import multiprocessing
import re
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from pipectl.capture import CapturedJob
from pipectl.capture.job import SMALLEST_EXPORT
from pipectl.errors import CaptureError
from pipectl.faults import user_line
from pipectl.profiler.effort import measured_sizes
from pipectl.profiler.processes import begin_apart, start_processes
from pipectl.profiler.trial import try_job
from pipectl.runtime.device import set_arithmetic, settle_process
from pipectl.script import Command, Parts
from pipectl.script.findings import values_of
from pipectl.script.later import Compared, compare_steps
from pipectl.script.recorder import at
from pipectl.spec import JobSpec
from pipectl.spec.code import Snapshot, active, using

_PATIENCE_S = 600.0
_PLACE = re.compile(r"\.py:\d+")
"""Of a message that names a line."""


def compare_script(spec: JobSpec) -> Compared | None:
    """Compare the script of a job, if the job has its loss.

    Raises:
        CaptureError: the script computes its loss in another way in a later step.
    """
    if spec.script is None or not spec.loss.is_of_script:
        return None
    schedule = spec.lr_scheduler
    own_schedule = schedule is not None and not schedule.is_of_script
    return compare_in_process(
        Command.of(spec), own_schedule=own_schedule or not spec.optimizer.is_of_script
    )


def values_of_script(job: CapturedJob, compared: Compared | None) -> dict[str, Any]:
    """Return what ``init`` would write into the job for its script; empty if that is not known.

    Args:
        compared: None if the script and its arguments are those that ``init`` has seen.
    """
    if job.script is None or compared is None or job.spec.beside_script:
        return {}
    with suppress(Exception):  # of the script's code, too; said where the job is tried
        return values_of(job.script, compared)
    return {}


def uncompared_of(compared: Compared | None) -> tuple[str, ...]:
    """Return what could not be compared, in words."""
    if compared is None or not compared.reason:
        return ()
    where = f" ({at(compared.place)})" if compared.place is not None else ""
    return (compared.sentence + where,)


def try_capture(spec: JobSpec, parts: Parts) -> None:
    """Capture the model of a job as its profile does, and look at its data.

    Args:
        parts: of the script, which has run in this process.

    Raises:
        CaptureError: the profile would refuse the job, with a line of the script.
    """
    settle_process(spec.threads)
    set_arithmetic(spec.training)
    size = measured_sizes(spec)[0]
    try:
        job = CapturedJob(spec, script=parts)
        job.training_graph(max(size, SMALLEST_EXPORT))
        least, _ = job.smallest(size)
        job.check_epoch(None if spec.pipeline.micro_batches is None else size, least)
        job.check_shapes(max(size, least))
        try_job(job, max(size, least), torch.device("cpu"))
    except CaptureError as error:
        if _PLACE.search(error.message):
            raise
        is_of_data = error.message.startswith("data")
        place = parts.loading.place if is_of_data else parts.program.entries[0].place
        raise CaptureError(f"{at(place)}: {error.message}", hint=error.hint) from error


def compare_in_process(command: Command, *, own_schedule: bool = False) -> Compared:
    """Do the same as :func:`~pipectl.script.later.compare_steps` in a process of its own: a script
    may set what can be set only once in a process.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    # Not a daemon: a DataLoader may start processes.
    process = context.Process(target=_compare, args=(command, own_schedule, active(), sending))
    start_processes([process])
    sending.close()
    found: Compared | CaptureError = Compared(0, "the process that compares ended too early")
    try:
        with suppress(EOFError, OSError):
            if receiving.poll(_PATIENCE_S):
                found = receiving.recv()
            else:
                found = Compared(0, f"its first steps took more than {_PATIENCE_S / 60:g} minutes")
    finally:
        process.kill()
        process.join()
        receiving.close()
    if isinstance(found, CaptureError):
        raise found
    return found


def _compare(
    command: Command, own_schedule: bool, snapshot: Snapshot | None, sending: Connection
) -> None:
    begin_apart()
    with using(snapshot):
        try:
            sending.send(compare_steps(command, own_schedule=own_schedule))
        except CaptureError as error:
            sending.send(error)
        except Exception as error:  # of the script's code, which is called to compare it
            words = f"{type(error).__name__}: {error}{user_line(error.__traceback__)}"
            sending.send(Compared(0, words))
