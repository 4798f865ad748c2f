"""How the data divide into steps and micro-batches, and which sizes these have."""

from __future__ import annotations

from dataclasses import dataclass

from mpi4py import MPI

from pipectl.capture import CapturedJob
from pipectl.capture.data import Batches, Loader, split_batch
from pipectl.errors import CaptureError, MismatchError
from pipectl.plan import Plan
from pipectl.runtime.waiting import gather_all


@dataclass(frozen=True)
class Division:
    """Of training and held-out data.

    Attributes:
        batches: of the training data.
        sizes: every micro-batch size that training will meet, largest first.
        evaluation_samples: size of the held-out data, if there are any.
        evaluation_size: samples of an evaluated micro-batch, but for the last.
        evaluation_sizes: every size that evaluation will meet, largest first.
    """

    batches: Batches
    sizes: tuple[int, ...]
    evaluation_samples: int | None
    evaluation_size: int
    evaluation_sizes: tuple[int, ...]

    @classmethod
    def of(
        cls, job: CapturedJob, plan: Plan, held_out: Loader | None, communicator: MPI.Comm
    ) -> Division:
        """Divide them; collective.

        Raises:
            MismatchError: ranks find different numbers of samples.
            CaptureError: the data fill no batch, or evaluation would not end.
        """
        spec = job.spec
        samples = _agreed("data", job.loader.samples, communicator)
        held_out_samples = None
        if held_out is not None:
            held_out_samples = _agreed("evaluation.data", held_out.samples, communicator)
        batches = Batches(samples, spec.training.batch_size, spec.data.drop_last)
        _check(batches, spec.training.batch_size)
        evaluated = spec.evaluation.batch_size if spec.evaluation is not None else None
        evaluation_size = evaluated or plan.micro_batch_size
        return cls(
            batches,
            _sizes(batches, plan.micro_batch_size),
            held_out_samples,
            evaluation_size,
            _evaluation_sizes(held_out, evaluation_size),
        )


def _agreed(key: str, samples: int | None, communicator: MPI.Comm) -> int | None:
    """The number of samples, which must be the same on all ranks."""
    counts = gather_all(communicator, samples)
    if any(count != counts[0] for count in counts):
        raise MismatchError(
            f"{key}: the ranks find different numbers of samples: {sorted(set(counts), key=str)}",
            cure="check that all nodes see the same files",
        )
    return samples


def _check(batches: Batches, batch_size: int) -> None:
    if not any(True for _ in batches.of_epoch()):
        raise CaptureError(
            f"data: {batches.samples} samples fill no batch of {batch_size}",
            cure="make the batch smaller, or set data.drop_last: false",
        )


def _sizes(batches: Batches, micro_batch_size: int) -> tuple[int, ...]:
    lengths = {len(positions) for positions in batches.of_epoch()}
    found = {size for length in lengths for size in split_batch(length, micro_batch_size)}
    return tuple(sorted({*found, micro_batch_size}, reverse=True))


def _evaluation_sizes(held_out: Loader | None, size: int) -> tuple[int, ...]:
    if held_out is None:
        return ()
    if held_out.samples is None:
        raise CaptureError(
            "evaluation.data: is iterable, so that its end is not known",
            cure="use a data set with __len__ and __getitem__ for evaluation",
        )
    return tuple(sorted(set(split_batch(held_out.samples, size)), reverse=True))
