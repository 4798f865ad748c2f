"""Reads the first batches of a script again, as the job reads them, and compares them."""

from __future__ import annotations

import itertools
import math
import os
import select
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from pipectl.errors import CaptureError
from pipectl.objects import restoring
from pipectl.script.hooks import Seen
from pipectl.script.order import SharedGenerators, draws_samples, keeps_processes, samplers_of
from pipectl.script.parts import Parts
from pipectl.script.program import name_of, reach
from pipectl.script.recorder import Recording
from pipectl.script.rounds import batches_of

_ANEW = (
    "begins the data anew, and the job reads on: read all batches of an epoch by one iterator "
    "(`for batch in loader`, or `batches = iter(loader)` before the loop)"
)
_LEFT_OUT = (
    "leaves out batches of the DataLoader, and the job trains on every one: leave samples out by "
    "the dataset"
)
_DRAWN_AGAIN = "is another one when it is read again: let "
_ALIKE = (
    "the dataset and the collate_fn give the same sample every time, or change by set_epoch() of "
    "the dataset alone"
)
_SAMPLED = (
    ", and the sampler ({}) the same indices: what it keeps should be numbers, lists and random "
    "generators among its attributes"
)
_CHANGED = (
    "it draws other random numbers in between (evaluation, dropout), or changes what its dataset "
    "gives (pipectl follows set_epoch() of datasets and samplers)"
)
_IN_STEPS = (
    "it draws random numbers in its steps or evaluations (dropout, noise), or its sampler draws "
    "them batch by batch; give the DataLoader a generator of its own "
    "(generator=torch.Generator().manual_seed(0))"
)
_ONCE = (
    "it reads other data by a DataLoader with persistent_workers, which draws a random number only "
    "when it is read for the first time (leave persistent_workers out of that one, or give the "
    "DataLoader of the training a generator of its own)"
)
_PATIENCE_S = 5.0
"""For an epoch of a stream."""
_DIGITS = 32


class Step(NamedTuple):
    """A step of the script.

    Args:
        number: from 1.
        recordings: of its backwards.
        epoch: 1, or 2 after the first epoch has been cut short.
    """

    number: int
    recordings: list[Recording]
    epoch: int

    @property
    def name(self) -> str:
        """In words."""
        return f"step {self.number}" if self.epoch == 1 else "the first step of a second epoch"


def drawn_between_epochs(parts: Parts, steps: Sequence[Step]) -> int:
    """Count the random numbers that the script draws before its second epoch, if they can be."""
    loading = parts.seen.loading_of(steps[-1].recordings[0])
    if loading is None or steps[-1].epoch == 1 or isinstance(parts.loader.dataset, IterableDataset):
        return parts.command.drawn_between_epochs
    return parts.dataset().order.drawn_before(loading.start) or 0


class Read(NamedTuple):
    """What the job reads otherwise than the script.

    Args:
        others: which steps of the first epoch have other samples, in words.
        reorders: why later epochs have others, or another order; empty if they do not.
        draws: whether samples draw random numbers, so that they are not compared.
        rest: samples at the end of an epoch of a stream that fill no step; None if not known.
    """

    others: str = ""
    reorders: str = ""
    draws: bool = False
    rest: int | None = 0


def read_again(parts: Parts, steps: Sequence[Step]) -> Read:
    """Read the batches of some steps as the job reads them."""
    is_stream = isinstance(parts.loader.dataset, IterableDataset)
    generators = SharedGenerators()
    with restoring(generators.restore, parts.loading.data.restore):
        words = _out_of_turn(parts.seen, steps)
        read = Read(words) if words else _compared(parts, steps, is_stream=is_stream)
        if is_stream:
            return read._replace(rest=_rest_of(parts, len(steps[0].recordings)))
        if steps[-1].epoch > 1 and not read.reorders:
            return read._replace(reorders=_of_later_epochs(parts))
        return read


def _of_later_epochs(parts: Parts) -> str:
    """Why the order of epochs that are not read here is another one; empty if it is not."""
    seen, own = parts.seen, parts.loader.generator
    known = {id(x.loader) for x in seen.loadings.values() if x.begun_after < seen.shortened}
    once = any(
        keeps_processes(each.loader) and each.loader.generator is own and key not in known
        for key, each in seen.evaluated.items()
    )
    if not (once or seen.draws_between_batches):
        return ""
    follows_shared = parts.dataset().order.follows_shared_generators()
    if seen.draws_between_batches and follows_shared:
        return _IN_STEPS
    return _ONCE if once and (follows_shared or own is not None) else ""


def _compared(parts: Parts, steps: Sequence[Step], *, is_stream: bool) -> Read:
    parts.loading.data.restore()
    if is_stream and draws_samples(parts.dataset()):
        return Read(draws=True)
    generators = SharedGenerators()
    try:
        for recording, epoch, name, read in (_streamed if is_stream else _picked)(parts, steps):
            if generators.have_drawn():  # other numbers are other samples
                return Read(draws=True)
            for path in itertools.chain(*parts.program.batch_leaves()):
                if _is_equal(read[name_of(path)], reach(recording.batch, path)):
                    continue
                if epoch:
                    return Read(reorders=_CHANGED)
                words = f"{name_of(path)} of the batch of {name} {_DRAWN_AGAIN}{_ALIKE}"
                return Read(words + "".join(map(_SAMPLED.format, _own_samplers(parts))))
    except CaptureError:
        raise
    except Exception:  # of the script's code
        return Read()
    return Read()


def _own_samplers(parts: Parts) -> list[str]:
    """The names of the samplers that the user has written."""
    kinds = (type(each) for each in samplers_of(parts.loader))
    return [kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.")]


_Again = Iterator[tuple[Recording, int, str, Mapping[str, Any]]]
"""Recordings, the numbers of their epochs from 0, the names of their steps, and what the job reads
for them."""


def _picked(parts: Parts, steps: Sequence[Step]) -> _Again:
    """Read the batches of a dataset with numbered samples."""
    data, size = parts.dataset(), parts.batch_size
    for step, recording in _recordings(steps):
        number = recording.batches[0] if len(recording.batches) == 1 else -1
        loading, epoch = parts.seen.loadings.get(number), step.epoch - 1
        if loading is None or (not epoch and loading is not parts.loading):
            continue
        first, order = parts.seen.positions[number] * size, data.order(epoch)
        data.set_epoch(epoch)
        batch = data.collate_fn([data[i] for i in order[first : first + size]])
        yield recording, epoch, step.name, {**batch["inputs"], **batch["targets"]}


def _streamed(parts: Parts, steps: Sequence[Step]) -> _Again:
    """Read as many batches of every pass of a stream as the script did."""
    data, seen = parts.dataset(), parts.seen
    batches, passes = _loader_of(parts, data, data.collate_fn), dict[int, int]()
    waiting = {each.batches[0]: (step, each) for step, each in _recordings(steps) if each.batches}
    for number, loading in seen.loadings.items():
        if any(seen.loadings[each] is loading for each in waiting):
            passes.setdefault(loading.first, 0)
            passes[loading.first] = seen.positions[number] + 1
    for epoch, (first, count) in enumerate(passes.items()):
        data.set_epoch(epoch)
        read = dict(enumerate(islice(batches, count)))
        for number, (step, recording) in waiting.items():
            batch = read.get(seen.positions[number])
            if seen.loadings[number].first == first and batch is not None:
                yield recording, epoch, step.name, {**batch["inputs"], **batch["targets"]}


def _recordings(steps: Sequence[Step]) -> Iterator[tuple[Step, Recording]]:
    return ((step, recording) for step in steps for recording in step.recordings)


def _loader_of(parts: Parts, data: Any, collate: Any) -> DataLoader[Any]:
    """What reads a stream as the loader of the script does, with random numbers of its own."""
    own = parts.loader
    return DataLoader(
        data,
        parts.batch_size,
        collate_fn=collate,
        num_workers=own.num_workers,
        drop_last=own.drop_last,
        persistent_workers=own.persistent_workers,
        generator=torch.Generator(),
    )


def _rest_of(parts: Parts, accumulation: int) -> int | None:
    """Count the samples at the end of an epoch of a stream that fill no step; None if it is too
    long to be read.

    Args:
        accumulation: batches of a step.
    """
    size = parts.batch_size
    if parts.loader.drop_last and accumulation == 1:
        return 0
    # Another process reads it: one that waits for data, in a system call even, can be ended.
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)  # threads of this process have not been copied
            os.setpgid(0, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(math.ceil(_PATIENCE_S) + 1)  # ends it if this process is killed before
            os.write(writing, str(_samples_left(parts, size * accumulation)).encode())
        finally:
            os._exit(0)  # without what the script does at its end, or a traceback
    os.close(writing)
    try:
        is_over, _, _ = select.select([reading], [], [], _PATIENCE_S)
        written = os.read(reading, _DIGITS) if is_over else b""
        return int(written) if written else None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with the processes of the loader
        os.waitpid(child, 0)
        os.close(reading)


def _samples_left(parts: Parts, of_step: int) -> int:
    """Read an epoch of a stream, and count its last samples, which fill no step."""
    parts.loading.data.restore()
    total = incomplete = 0
    for size in _loader_of(parts, parts.dataset(), len):
        total += size
        incomplete += size if size < parts.batch_size else 0
    return total % of_step or incomplete


def _out_of_turn(seen: Seen, steps: Sequence[Step]) -> str:
    """Say which step of the first epoch does not read the batch after that of the step before."""
    iteration, position = seen.loading_of(steps[0].recordings[0]), 0
    for step in (each for each in steps if each.epoch == 1):
        for recording in step.recordings:
            own = seen.loading_of(recording)
            if len(recording.batches) != 1 or own is None or iteration is None:
                return ""
            if own is not iteration:
                if not iteration.is_over and position != batches_of(iteration.loader):
                    return f"{step.name} {_ANEW}"
                iteration, position = own, 0
            if seen.positions[recording.batches[0]] != position:
                return f"{step.name} {_LEFT_OUT}"
            position += 1
    return ""


def _is_equal(read: Any, own: Any) -> bool:
    if not isinstance(read, Tensor) or not isinstance(own, Tensor) or read.shape != own.shape:
        return False
    return bool(((read == own) | ((read != read) & (own != own))).all())
