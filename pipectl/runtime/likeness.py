"""Whether the replicas of a stage still hold the same weights, to the bit.

They sum the same gradients and make the same updates; where a node computes wrongly, or user code
does something of its own on each rank, they drift apart, and nothing else would show it. Compared
are sums of the bits as whole numbers, one a parameter, among the replicas of a stage alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture.step import own_name
from pipectl.errors import WorkerError
from pipectl.runtime.waiting import barrier, wait

_WORD = 8


def check_alike(
    group: MPI.Comm, ranks: Sequence[int], stage: int, step: int, weights: Mapping[str, Tensor]
) -> None:
    """Compare the weights of one stage's replicas; collective among them.

    Args:
        group: of the replicas, in their order.
        ranks: of the replicas.
        weights: by full name, the same on all.

    Raises:
        WorkerError: on a replica that differs from most, naming all that do and the first
            parameter; the others wait until that has ended the job.
    """
    mine = np.array([checksum(tensor) for tensor in weights.values()], dtype=np.int64)
    everyone = np.empty((group.size, mine.size), dtype=np.int64)
    wait([group.Iallgather(mine, everyone)])
    apart = (everyone != everyone[0]).any(axis=0).nonzero()[0]
    if not len(apart):
        return
    first = int(apart[0])
    odd = odd_ones_out(everyone[:, first].tolist())
    if group.rank == odd[0]:
        name = own_name(list(weights)[first])
        raise _difference(name, stage, step, [ranks[index] for index in odd], ranks)
    barrier(group)


def checksum(tensor: Tensor) -> int:
    """The sum of a tensor's bits, read as whole numbers, modulo 2 ** 64."""
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % _WORD:
        octets = octets.clone()
    words = octets.numel() // _WORD * _WORD
    total = int(octets[:words].view(torch.int64).sum()) + int(octets[words:].sum())
    return (total + 2**63) % 2**64 - 2**63


def odd_ones_out(found: Sequence[int]) -> list[int]:
    """Who differs from what most have; all, where no value is more common than another."""
    (common, count), *others = Counter(found).most_common()
    if others and others[0][1] == count:
        return list(range(len(found)))
    return [index for index, value in enumerate(found) if value != common]


def _difference(
    name: str, stage: int, step: int, odd: Sequence[int], ranks: Sequence[int]
) -> WorkerError:
    if len(odd) == len(ranks):
        who = f"which of ranks {_listed(ranks)} is right cannot be told"
    else:
        who = f"rank {_listed(odd)} differs from the others of ranks {_listed(ranks)}"
    return WorkerError(
        f"step {step}: the replicas of stage {stage} no longer hold the same weights: {name!r}; "
        f"{who}",
        cure="a model, loss or optimizer that does something else on every rank does this, and so "
        "does a node that computes wrongly; pipectl resume goes on from the last checkpoint, "
        "before which replicas were compared, too",
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
