"""``cluster.json``: nodes, device kinds and links. Measured, or assumed and said so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import inf
from typing import Any, ClassVar, NamedTuple

from pipectl.errors import DataFileError
from pipectl.fields import Count, DataFile, Positive, read_fields
from pipectl.link import Link, RowTimes

ASSUMED_WITHIN = Link(latency_s=20e-6, bandwidth_bytes_per_s=2e9, assumed=True)
"""Shared memory, if nobody measured."""
ASSUMED_BETWEEN = Link(latency_s=50e-6, bandwidth_bytes_per_s=1.1e9, assumed=True)
"""Ethernet of 10 Gbit/s, if nobody measured."""
ASSUMED_HOST = Link(latency_s=10e-6, bandwidth_bytes_per_s=10e9, assumed=True)
"""A device's way to its host's memory, if nobody measured: PCIe 3.0 with 16 lanes."""
ASSUMED_DISK = Link(latency_s=100e-6, bandwidth_bytes_per_s=1e9, assumed=True)
"""A rank's way to a disk of its node and back, if nobody measured."""


class OffloadTarget(StrEnum):
    """Where what stages offload waits: memory of their host, or a disk of their node."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class Device:
    """What one rank computes with.

    Args:
        speed: relative to the device the profile was measured on.
        memory_bytes: of one rank; None if unknown.
        host_link: the rank's way to the memory of its host, for offloading; None if unknown.
        disk_link: its way to a disk of its node, likewise.
        rows: what its program takes besides computing; None if unknown, and taken as nothing.
        peak_flops_per_s: most floating-point operations per second, as its maker says.
    """

    kind: str
    speed: Positive = 1.0
    memory_bytes: int | None = None
    host_link: Link | None = None
    disk_link: Link | None = None
    rows: RowTimes | None = None
    peak_flops_per_s: Positive | None = None

    def offload_link(self, target: OffloadTarget) -> Link:
        """The way of what is offloaded; an assumed one if nobody measured."""
        if target is OffloadTarget.DISK:
            return self.disk_link or ASSUMED_DISK
        return self.host_link or ASSUMED_HOST


@dataclass(frozen=True)
class Node:
    """A machine.

    Args:
        ranks: ranks it hosts.
        cores: how many of its ranks can compute at once without slowing each other.
        switch: name of the switch it is connected to; None if all nodes share one.
    """

    name: str
    ranks: Count
    cores: Count
    device: Device
    switch: str | None = None

    @staticmethod
    def complete_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields, with defaults for what a file may leave out."""
        return {"cores": fields.get("ranks"), **fields}


@dataclass(frozen=True)
class Cluster(DataFile):
    """Machines and the links within and between them.

    Ranks are numbered node by node (block distribution).

    Args:
        source: where the figures are from, for people.
        assumed: whether the figures are guesses rather than measurements.
        allreduce: (ranks, bytes, seconds) of sums over the first ranks, as replicas make them.
        key: hash of what it was measured for; None if it comes from elsewhere.
        between_switches: the way from one switch to another, which a message between nodes of
            different switches takes besides ``between_nodes``; None if it costs nothing.
    """

    cure: ClassVar[str] = (
        "see docs/formats.md; pipectl profile --links measures one, and without one it is assumed "
        "from resources:"
    )
    name: str
    source: str
    nodes: tuple[Node, ...]
    within_node: Link
    between_nodes: Link
    assumed: bool = False
    allreduce: tuple[tuple[int, int, float], ...] = ()
    key: str | None = None
    between_switches: Link | None = None

    @cached_property
    def node_of_rank(self) -> tuple[int, ...]:
        """Index of the node of every rank."""
        return tuple(index for index, node in enumerate(self.nodes) for _ in range(node.ranks))

    def peak_flops_per_s(self, nodes: Sequence[int]) -> float | None:
        """Most floating-point operations per second of ranks on these nodes; None if unknown."""
        peaks = self._peaks
        return None if peaks is None else sum(peaks[node] for node in nodes)

    @cached_property
    def _peaks(self) -> tuple[float, ...] | None:
        """Peak of a rank, per node."""
        values = [node.device.peak_flops_per_s for node in self.nodes]
        peaks = tuple(peak for peak in values if peak is not None)
        return peaks if len(peaks) == len(values) else None

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What is assumed of the parts that are used."""
        if self.assumed:
            return (f"cluster {self.name!r} is assumed, not measured",)
        switches = len({node.switch for node in self.nodes}) > 1
        links = (
            ("within a node", self.within_node, any(node.ranks > 1 for node in self.nodes)),
            ("between nodes", self.between_nodes, len(self.nodes) > 1),
            ("between switches", self.between_switches, switches),
        )
        return tuple(
            f"the link {name} is assumed, not measured"
            for name, link, is_used in links
            if is_used and link is not None and link.assumed
        )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(node.ranks for node in self.nodes)

    def link(self, source_rank: int, target_rank: int) -> Link:
        """The link between two ranks, or, for two nodes, that to their switches."""
        same = self.node_of_rank[source_rank] == self.node_of_rank[target_rank]
        return self.within_node if same else self.between_nodes

    def device(self, rank: int) -> Device:
        """The device of a rank."""
        return self.nodes[self.node_of_rank[rank]].device

    @property
    def widest_link(self) -> Link:
        """The link between nodes, or within the only one."""
        return self.between_nodes if len(self.nodes) > 1 else self.within_node

    def memory_of(self, rank: int, limit_bytes: float | None) -> float:
        """Bytes that a rank may take: the smaller of a limit and its device's memory."""
        limits = (limit_bytes, self.device(rank).memory_bytes)
        return min((limit for limit in limits if limit is not None), default=inf)

    def with_rows(self, rows: RowTimes | None) -> Cluster:
        """The cluster with a profile's times of rows for the devices that have none."""
        if rows is None or all(node.device.rows is not None for node in self.nodes):
            return self
        nodes = tuple(
            replace(node, device=replace(node.device, rows=node.device.rows or rows))
            for node in self.nodes
        )
        return replace(self, nodes=nodes)

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object."""
        document = super().to_json()
        links = {name: document.pop(name) for name in _Links._fields if name in document}
        return {**document, "links": links}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, file: str = "cluster") -> Cluster:
        """A cluster from its JSON object; see :meth:`load`."""
        links = read_fields(_Linked, document, file=file, cure=cls.cure).links
        fields = {**document, "source": document.get("source") or "unknown", **links._asdict()}
        cluster = super().from_json(fields, file=file)
        if not cluster.nodes:
            raise DataFileError(f"{file}: nodes: a cluster needs at least one", cure=cls.cure)
        return cluster


class _Links(NamedTuple):
    within_node: Link
    between_nodes: Link
    between_switches: Link | None = None


class _Linked(NamedTuple):
    links: _Links


def assumed_cluster(
    name: str, ranks_per_node: Sequence[int], cores_per_node: int, memory_bytes: int | None
) -> Cluster:
    """A cluster nobody measured, of nodes that differ in nothing but their ranks."""
    device = Device("cpu", memory_bytes=memory_bytes)
    nodes = (
        Node(f"node{index}", ranks, cores_per_node, device)
        for index, ranks in enumerate(ranks_per_node)
    )
    return Cluster(
        name=name,
        source="assumed: shared memory within a node, 10 Gbit/s between nodes",
        nodes=tuple(nodes),
        within_node=ASSUMED_WITHIN,
        between_nodes=ASSUMED_BETWEEN,
        assumed=True,
    )
