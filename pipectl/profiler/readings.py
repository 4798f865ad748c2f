"""Whether the samples of a job are the same at every reading and in every process, and its initial
weights each time the model is built.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from pipectl.capture.build import (
    build_model,
    evaluation_loader,
    parts_of_script,
    training_loader,
)
from pipectl.capture.digests import (
    checksum,
    held_out_digests,
    sample_digests,
    shared_samples,
    trained_on,
)
from pipectl.capture.job import CapturedJob
from pipectl.capture.model_with_loss import full_name
from pipectl.capture.python_state import plain_tensors
from pipectl.errors import PipectlError
from pipectl.hash_seed import VARIABLE
from pipectl.profile_parts import Readings
from pipectl.profiler.processes import begin_apart, start_processes
from pipectl.spec import JobSpec
from pipectl.spec.code import Snapshot, active, using

_OTHER_SEEDS = ("1", "2")
_PATIENCE_S = 60.0
_SOME, _HELD_OUT = "samples of both datasets", "held-out samples"
"""What such a process sends, in this order."""
_MEMORY_SHARE = 0.25
"""Of the free memory, for a second model."""
NOTES = {
    Readings.BY_PROCESS: "samples differ from process to process (numbered in the order of a set, "
    "or drawn by a generator of its own?): one rank reads them for all (data.read)",
    Readings.EACH: "samples differ each time they are read (drawn by a generator of its own?): one "
    "rank reads them for all (data.read), and no training can be repeated",
}
"""For the user."""


class OtherReader:
    """A process that reads some samples, too: it shares nothing with this one, and has another
    hash seed.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._received: dict[str, Any] = {}

    def compare(self, job: CapturedJob) -> Readings | None:
        """Read the same samples twice; None if they cannot be read, or the other process failed."""
        loaders = job.loader, job.evaluation_loader
        try:
            mine = sample_digests(*loaders)
            if mine != sample_digests(*loaders):
                return Readings.EACH
        except PipectlError:  # training may never come to this sample
            return None
        if (digests := self._receive(_SOME)) is None:
            return None
        return Readings.SAME if digests == mine else Readings.BY_PROCESS

    @property
    def held_out(self) -> dict[int, int] | None:
        """Indices of held-out samples that it has read, by their checksums; None if unknown."""
        found: dict[int, int] | None = self._receive(_HELD_OUT)
        return found

    def _receive(self, what: str) -> Any:
        """Return what it has read; None if it failed."""
        with suppress(EOFError, OSError):
            while what not in self._received and self._connection.poll(_PATIENCE_S):
                self._received |= self._connection.recv()
        return self._received.get(what)


def find_shared_samples(job: CapturedJob) -> tuple[tuple[int, int], ...]:
    """Return indices of held-out samples that are trained on, with those in the training data."""
    held_out = job.evaluation_loader
    if held_out is not None:
        with suppress(Exception):  # what cannot be read tells nothing
            return tuple(shared_samples(job.loader, held_out))
    return ()


def find_redrawn_samples(job: CapturedJob, other: OtherReader) -> tuple[tuple[int, int], ...]:
    """Return the same of samples that another process holds out, and this one does not.

    A third process, which has the hash seed of the other one, tells whether that makes the
    difference: all processes of a run have one.
    """
    with suppress(Exception):
        if other.held_out and (found := trained_on(job.loader, other.held_out)):
            with other_reader(job.spec) as third:
                is_redrawn = third.held_out not in (None, other.held_out)
            return tuple(found) if is_redrawn else ()
    return ()


def find_redrawn(job: CapturedJob, size: int) -> str | None:
    """Return the first parameter, buffer or other tensor of the graph that has another initial
    value when the model is built again; None if there is none, or if it is not known.

    Buffers that forwards write may begin with anything, and do not count.

    Args:
        job: nothing has changed its parameters and buffers yet.
        size: of a micro-batch.
    """
    graph, states = job.training_graph(size), job.states
    read = {state.name for place, state in graph.states.items() if graph.users.get(place)}
    size_bytes = sum(tensor.nbytes for tensor in states.values())
    if (
        job.spec.model.weights is not None
        or job.is_deferred
        or size_bytes > _MEMORY_SHARE * psutil.virtual_memory().available
    ):
        return None
    with suppress(Exception), torch.random.fork_rng(devices=[]):  # it may be built only once
        with Path(os.devnull).open("w") as silence, redirect_stdout(silence):  # it has printed it
            model = build_model(job.spec)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            is_read = full_name(name) in read - graph.written_buffers
            if is_read and not _is_equal(states[full_name(name)], tensor):
                return name
        constants, others = {*map(_identity, graph.used_constants.values())}, plain_tensors(model)
        for name, tensor in plain_tensors(job.model).items():
            known = _identity(tensor)
            if known in constants and name in others and known != _identity(others[name]):
                return name
    return None


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and checksum(one) == checksum(other)


def _identity(tensor: Tensor) -> tuple[torch.dtype, torch.Size, int]:
    return tensor.dtype, tensor.shape, checksum(tensor)


@contextmanager
def other_reader(spec: JobSpec) -> Iterator[OtherReader]:
    """Start such a process, and end it."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    # Not a daemon: a DataLoader of a script may start processes.
    process = context.Process(target=_read, args=(spec, active(), sending))
    seed = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = next(other for other in _OTHER_SEEDS if other != seed)
    try:
        start_processes([process])
    finally:
        if seed is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = seed
    sending.close()
    try:
        yield OtherReader(receiving)
    finally:
        process.kill()
        process.join()
        receiving.close()


def _read(spec: JobSpec, snapshot: Snapshot | None, sending: Connection) -> None:
    begin_apart()
    with using(snapshot):
        script = parts_of_script(spec)
        training, held_out = training_loader(spec, script), evaluation_loader(spec, script)
        sending.send({_SOME: sample_digests(training, held_out)})
        sending.send({_HELD_OUT: {} if held_out is None else held_out_digests(held_out)})
