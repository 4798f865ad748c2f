"""Pipelines of equally many stages, as arrays."""

from __future__ import annotations

from typing import NamedTuple

from pipectl.arrays import Floats, Integers, Records


class Pipelines(NamedTuple):
    """Pipelines of equally many stages, as arrays for the kernels.

    Args:
        stages: shape [pipelines, stages].
        ways: messages of all partitions; their times depend on the class of their ends.
        hold_s: of a full micro-batch, by class; shape [classes, ways].
        late_s: by class.
        first: start of activations and gradients of partition p, at 2 p and 2 p + 1.
        cut: partition of every pipeline.
        class_of: class of the border between two groups, shape [groups, groups]; if replicas take
            whole micro-batches in turn, of the way between two ranks, shape [ranks, ranks].
        held: shared links that the sums of groups hold; shape [groups, MAX_PARTS].
        free_at: scratch space for when each of these is free.
    """

    stages: Records
    ways: Records
    hold_s: Floats
    late_s: Floats
    first: Integers
    cut: Integers
    class_of: Integers
    held: Records
    free_at: Floats
