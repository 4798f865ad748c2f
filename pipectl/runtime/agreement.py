"""Checks before the start: all ranks run the same job, with the same versions and model.

All checks are collective and end alike on all ranks: ranks that continued with different programs
would wait for each other forever. The compared values travel in one ``allgather`` before any other
message, so that another version of pipectl, which compares other values, differs too instead of
hanging.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl import __version__
from pipectl.capture import CapturedJob
from pipectl.capture.digests import checksum, sample_digests
from pipectl.capture.model_with_loss import own_name
from pipectl.errors import MismatchError, PipectlError
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.profile_parts import SEEDED_HINT, Readings
from pipectl.runtime.nodes import grouped, node_name
from pipectl.runtime.waiting import gather_all, waiting
from pipectl.schedule import program_hash
from pipectl.spec import JobSpec
from pipectl.torch_api import current_accelerator
from pipectl.units import format_ranges

Identity = Mapping[str, str]
"""What must be the same on all ranks: versions by name, contents of files as hashes."""
_NODE = "node"
_FILES = ("job.yaml", "plan.json")
_ACCELERATOR_HINT = (
    "the job asks for accelerators on every node (resources.gpus_per_node): make sure that the "
    "batch system and the launcher give every rank one and that torch supports it, or set it to 0"
)


def check_alike(communicator: MPI.Comm, spec: JobSpec, plan: Plan) -> None:
    """Compare the versions and files of all ranks with those of the first.

    Raises:
        MismatchError: on all ranks, naming what differs, where, and both sides of it.
    """
    with waiting():
        ranks = communicator.allgather(identity(spec, plan))
    alike = [_comparable(other) for other in ranks]
    differing = [rank for rank, other in enumerate(alike) if other != alike[0]]
    if not differing:
        return
    (rank, *_), (first, other) = differing, (ranks[0], ranks[differing[0]])
    if alike[0].keys() != alike[rank].keys():
        difference = f"rank {rank}{_more(differing)} runs another pipectl than rank 0"
    else:
        words = "; ".join(
            f"another {name}" if name in _FILES else f"{name} {other[name]}, not {first[name]}"
            for name in alike[0]
            if other[name] != first[name]
        )
        where = f"rank {rank} on {other[_NODE]}{_more(differing)}"
        difference = f"{where} has {words}, as rank 0 on {first[_NODE]} has"
    raise MismatchError(
        difference,
        hint="give all nodes the same environment and the same files, and start the job again",
    )


def identity(spec: JobSpec, plan: Plan) -> Identity:
    """The values that ranks compare; versions first, since files may differ because of them."""
    return {
        "pipectl": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "job.yaml": hashlib.sha256(spec.model_dump_json().encode()).hexdigest(),
        "plan.json": program_hash(plan),
        _NODE: node_name(),
    }


def neighbours_of(communicator: MPI.Comm) -> list[list[int]]:
    """The ranks of every node, by the batch system's node names; nodes by their first rank."""
    return list(grouped(gather_all(communicator, node_name())).values())


def check_accelerators(communicator: MPI.Comm) -> None:
    """Check that all ranks see accelerators of the same type, such as ``cuda``. Collective.

    Raises:
        MismatchError: on all ranks, if none sees an accelerator, or naming those that see another
            type than rank 0, or none.
    """
    mine = current_accelerator()
    types = gather_all(communicator, (mine.type if mine else "", node_name()))
    differing = [rank for rank, (kind, _) in enumerate(types) if kind != types[0][0]]
    if differing:
        (first, first_node), (other, node) = types[0], types[differing[0]]
        raise MismatchError(
            f"rank {differing[0]} on {node}{_more(differing)} sees {_accelerator(other)}, "
            f"but rank 0 on {first_node} sees {_accelerator(first)}",
            hint=_ACCELERATOR_HINT,
        )
    if not types[0][0]:
        raise MismatchError(
            "no rank sees an accelerator, but the job asks for some (resources.gpus_per_node)",
            hint=_ACCELERATOR_HINT,
        )


def check_unshared(communicator: MPI.Comm, device: torch.device) -> None:
    """Refuse ranks that share an accelerator if the job has one per rank. Collective.

    Raises:
        MismatchError: on all ranks, naming the first two.
    """
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    mine = None if properties is None else getattr(properties(device), "uuid", None)
    places = gather_all(communicator, None if mine is None else (node_name(), str(mine)))
    shared = sharing_ranks(places)
    if shared:
        first, second = shared
        raise MismatchError(
            f"ranks {first} and {second} share an accelerator, but the job has "
            "one for each rank of a node (resources.gpus_per_node)",
            hint="let the launcher show every rank all accelerators of its node, or each its own "
            "(for example by srun --gpus-per-task=1)",
        )


def sharing_ranks(places: Sequence[Hashable | None]) -> tuple[int, int] | None:
    """The first two ranks in the same place.

    Args:
        places: of every rank; None if unknown.
    """
    ranks: dict[Hashable, int] = {}
    for rank, place in enumerate(places):
        if place is not None and ranks.setdefault(place, rank) != rank:
            return ranks[place], rank
    return None


def _accelerator(kind: str) -> str:
    return f"an accelerator of type {kind}" if kind else "no accelerator"


def misplaced(nodes: Sequence[Sequence[int]], node_of_rank: Sequence[int]) -> str:
    """How the real nodes differ from those of the plan, in words; empty if they do not.

    The results do not depend on it, but messages take other links than predicted.

    Args:
        nodes: ranks of every node.
        node_of_rank: of the plan.
    """
    for real, wanted in zip(nodes, grouped(node_of_rank).values(), strict=False):
        if list(real) != wanted:
            return (
                f"a node has the ranks {format_ranges(real)}, where the plan counts on "
                f"{format_ranges(wanted)}: the step may take longer than predicted. "
                "Have the launcher fill one node after the other (block distribution)"
            )
    return ""


def check_graph(communicator: MPI.Comm, job: CapturedJob, plan: Plan, profile: Profile) -> None:
    """Compare the graph captured by every rank with the planned one.

    Raises:
        MismatchError: on all ranks, naming the first operator that differs.
    """
    graph = job.training_graph(plan.micro_batch_size)
    signatures = {operator.id: operator.signature or "" for operator in profile.operators}
    mine = graph.difference(plan.fingerprint, signatures), node_name()
    differences = gather_all(communicator, mine)
    others = [rank for rank, (difference, _) in enumerate(differences) if difference is not None]
    drawn = ""
    if profile.readings in (Readings.EACH, Readings.BY_PROCESS):
        drawn = "samples differ from reading to reading: give them all one shape (padding), or "
        drawn += "name lengths to pad to under data.buckets; else "
    if len(others) == len(differences):
        raise MismatchError(
            f"plan.json was made for a different model: {differences[0][0]}",
            hint=f"{drawn}profile and plan the job again; its model, or the shape of its batches, "
            "has changed since. If each batch is padded to its longest sample, name lengths to pad "
            "to under data.buckets",
        )
    if others:
        difference, node = differences[others[0]]
        raise MismatchError(
            f"rank {others[0]} on {node}{_more(others)} has a different model from the other "
            f"ranks and plan.json: {difference}",
            hint=f"{drawn}check that all nodes see the same files, package versions and variables",
        )


def check_data(
    communicator: MPI.Comm, job: CapturedJob, profile: Profile
) -> list[list[int]] | None:
    """Compare a few samples of the training data that every rank reads; collective.

    Only if processes outside of MPI have read the same ones: otherwise differences are expected.

    Returns:
        Their checksums; None if they were not compared, or could not be read.

    Raises:
        MismatchError: on all ranks, naming the first that reads other samples than rank 0.
    """
    if profile.readings is not Readings.SAME:
        return None
    mine: list[list[int]] | None = None
    with suppress(PipectlError):  # training may never come to this sample
        mine = sample_digests(job.loader)
    found = gather_all(communicator, (mine, node_name()))
    differing = [rank for rank, (digests, _) in enumerate(found) if digests != found[0][0]]
    if differing and all(digests is not None for digests, _ in found):
        raise MismatchError(
            f"data: rank {differing[0]} on {found[differing[0]][1]}{_more(differing)} reads other "
            "samples than rank 0",
            hint="leave out what divides the data by rank (or worker of a launcher): pipectl gives "
            "every rank its part of each batch; or check that all nodes see the same files",
        )
    return mine


def check_initial(
    communicator: MPI.Comm, values: Mapping[str, Tensor], constants: Mapping[str, str]
) -> None:
    """Compare the initial values of tensors that several ranks hold. Collective.

    Args:
        values: those of this rank: parameters and buffers by full name, and constants.
        constants: words for each of these, by its key in ``values``.

    Raises:
        MismatchError: on all ranks, naming the first that differs and two ranks.
    """
    mine = {name: checksum(tensor) for name, tensor in values.items()}
    first: dict[str, tuple[int, int]] = {}
    for rank, found in enumerate(gather_all(communicator, mine)):
        for name, digest in found.items():
            other, known = first.setdefault(name, (rank, digest))
            if digest != known:
                what = constants.get(name) or f"the initial value of {own_name(name)!r}"
                raise MismatchError(
                    f"model: {what} is another on rank {rank} "
                    f"than on rank {other}, which both hold it",
                    hint=SEEDED_HINT,
                )


def _comparable(answer: object) -> Identity:
    """Without values that may differ. Another version of pipectl may send any other object."""
    if not isinstance(answer, Mapping):
        return {}
    return {name: value for name, value in answer.items() if name != _NODE}


def _more(ranks: Sequence[int]) -> str:
    return f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
