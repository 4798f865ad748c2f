"""Micro-batch sizes to measure."""

from __future__ import annotations

from pipectl.profiler.effort import Effort
from pipectl.spec import JobSpec

_MICRO_BATCHES_PER_STAGE = 2


def measured_sizes(spec: JobSpec, effort: Effort = Effort.NORMAL) -> tuple[int, ...]:
    """The sizes, that of the profile first: the asked one, or several for the planner to choose.

    These then reach from single samples to the whole batch, each a fixed factor above the last.
    """
    batch = spec.training.batch_size
    if spec.pipeline.micro_batches is not None:
        return (-(-batch // spec.pipeline.micro_batches),)
    stages = spec.pipeline.stages or spec.resources.ranks
    base = max(1, -(-batch // (_MICRO_BATCHES_PER_STAGE * stages)))
    factor = effort.size_factor
    if factor is None:
        return tuple(dict.fromkeys((base, max(1, base // 4))))
    below = [base // factor**power for power in range(1, base.bit_length())]
    above = [base * factor**power for power in range(1, batch.bit_length())]
    further = {1, batch, *(size for size in (*below, *above) if 1 <= size <= batch)}
    return (base, *sorted(further - {base}))
