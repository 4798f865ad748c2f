"""The arrays that :mod:`pipectl.planner.bounding.cut_kernels` takes, in named groups."""

from __future__ import annotations

from typing import NamedTuple

from pipectl.arrays import Integers


class Graph(NamedTuple):
    """What operators read, hold and send; names are numbers.

    Args:
        reader, first_reader: readers of operator i are ``reader[first_reader[i]:...[i + 1]]``.
        output_bytes, gradient_bytes: of every operator's messages.
        storage: name of the memory that each value lies in.
        kept_bytes: what the stage of an operator keeps of its value if that is sent.
        parameter, parameter_bytes, first_parameter: by operator, as readers.
        saved, saved_bytes, first_saved: the same.
        names: how many there are.
    """

    reader: Integers
    first_reader: Integers
    output_bytes: Integers
    gradient_bytes: Integers
    storage: Integers
    kept_bytes: Integers
    parameter: Integers
    parameter_bytes: Integers
    first_parameter: Integers
    saved: Integers
    saved_bytes: Integers
    first_saved: Integers
    names: int


class Sums(NamedTuple):
    """What partitions need, to be filled in.

    Args:
        parameter_bytes, saved_bytes: shape [partitions, stages].
        values: numbers of values that enter and leave; shape [partitions, stages, 4].
        source, target, size_bytes: transfers; of every partition activations, then gradients, each
            by rising source and target.
        first: where those of partition p begin, at 2 p and 2 p + 1; shape [2 * partitions + 1].
    """

    parameter_bytes: Integers
    saved_bytes: Integers
    values: Integers
    source: Integers
    target: Integers
    size_bytes: Integers
    first: Integers


class Scratch(NamedTuple):
    """Room for one partition.

    Args:
        stage_of: of every operator.
        head, following, target, size_bytes: lists of transfers by kind and source.
        producer, home, consumer: of every activation route.
        used: transfers and routes so far.
        stamp, arrived: where a name or stage was last seen.
        size_seen: of every name.
        member, sender, receiver: operators and routes by stage.
        first_member, first_sender, first_receiver: where those of each stage begin.
    """

    stage_of: Integers
    head: Integers
    following: Integers
    target: Integers
    size_bytes: Integers
    producer: Integers
    home: Integers
    consumer: Integers
    used: Integers
    stamp: Integers
    arrived: Integers
    size_seen: Integers
    member: Integers
    sender: Integers
    receiver: Integers
    first_member: Integers
    first_sender: Integers
    first_receiver: Integers
