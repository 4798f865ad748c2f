"""``cluster.json``: nodes, devices and links, with measured or assumed figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, ClassVar, NamedTuple

from pipectl.errors import DataFileError
from pipectl.fields import Count, DataFile, Positive, read_fields
from pipectl.link import Link, RowTimes
from pipectl.older_python import StrEnum

MAX_RANKS = 2**17
"""Maximum number of ranks; the largest machines have fewer accelerators."""
TOO_MANY_RANKS = f"{{:,}} ranks; pipectl plans for at most {MAX_RANKS:,}"
ASSUMED_WITHIN = Link(latency_s=20e-6, bandwidth_bytes_per_s=2e9, assumed=True)
"""Assumed link within a node: shared memory."""
ASSUMED_BETWEEN = Link(latency_s=50e-6, bandwidth_bytes_per_s=1.1e9, assumed=True)
"""Assumed link between nodes: 10 Gbit/s Ethernet."""
ASSUMED_HOST = Link(latency_s=10e-6, bandwidth_bytes_per_s=10e9, assumed=True)
"""Assumed link from a device to host memory: PCIe 3.0 with 16 lanes."""
ASSUMED_DISK = Link(latency_s=100e-6, bandwidth_bytes_per_s=1e9, assumed=True)
"""Assumed link from a rank to a local disk."""
_UNLIMITED_BYTES_PER_S = 1e18


class OffloadTarget(StrEnum):
    """Where stages offload to: host memory or a local disk of the node."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class Device:
    """The device of one rank.

    Args:
        kind: name of the kind of device, e.g. ``cpu``.
        speed: relative to the device that the profile was measured on.
        memory_bytes: memory per rank. If None, that of the accelerator that the profile was
            measured on, which its ranks share; unlimited on CPUs.
        host_link: link between a rank's memory and its host's, for offload; 10 GB/s and 10 us if
            None.
        disk_link: link to a local disk, for offload: what one rank gets while all use it; 1 GB/s
            and 100 us if None.
        rows: time of program rows in addition to computation; that of the profile if None.
        peak_flops_per_s: peak floating-point operations per second of a rank, as stated by the
            manufacturer; ``plan``, ``status`` and ``report`` then show the share that is reached
            (MFU). If None, that of a common accelerator, for the precision of the job.
    """

    kind: str
    speed: Positive = 1.0
    memory_bytes: int | None = None
    host_link: Link | None = None
    disk_link: Link | None = None
    rows: RowTimes | None = None
    peak_flops_per_s: Positive | None = None

    def offload_link(self, target: OffloadTarget) -> Link:
        """Return the link to the offload target, or an assumed link if it was not measured."""
        if target is OffloadTarget.DISK:
            return self.disk_link or ASSUMED_DISK
        return self.host_link or ASSUMED_HOST


@dataclass(frozen=True)
class Node:
    """A compute node.

    Args:
        name: name of the node.
        ranks: number of ranks on the node.
        cores: number of ranks that can compute at the same time without slowing each other down;
            all if None.
        device: the device of each of its ranks.
        switch: name of the node's switch; nodes without one share a switch.
        shares: share of the device's speed that each of its ranks gets, if other processes use the
            node; empty: each gets all of it.
    """

    name: str
    ranks: Count
    cores: Count
    device: Device
    switch: str | None = None
    shares: tuple[Positive, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each rank, at the speed that the rank gets."""
        shares = self.shares or (1.0,) * self.ranks
        return tuple(
            self.device if share == 1.0 else replace(self.device, speed=share * self.device.speed)
            for share in shares
        )

    @staticmethod
    def complete_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields with defaults for those that a file may omit."""
        return {"cores": fields.get("ranks"), **fields}


@dataclass(frozen=True)
class Cluster(DataFile):
    """The nodes of a cluster and the links within and between them.

    Ranks are numbered node by node (block distribution).

    Args:
        name: name of the cluster.
        source: origin of the figures, shown to users.
        nodes: the nodes; all together have the ranks of the job, at most 131,072.
        within_node, between_nodes: in ``links``: link between two ranks of a node, and of two
            nodes.
        between_switches: in ``links``: link between two switches, which a message between nodes of
            different switches passes in addition to ``between_nodes``; None if it costs nothing.
        assumed: whether the figures are assumptions rather than measurements; ``plan`` says so.
        allreduce: (ranks, bytes, seconds) of float32 sums over the first ranks. They are used if
            gradients are summed over as many ranks that are spread over nodes in the same way;
            otherwise two rounds are estimated in which each of n ranks sends every other 1/n of the
            bytes.
        key: hash of what the measurement depends on; None for a file from elsewhere.
    """

    hint: ClassVar[str] = (
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
        """Node index of each rank."""
        return tuple(index for index, node in enumerate(self.nodes) for _ in range(node.ranks))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The device of each rank, at the speed that the rank gets."""
        return tuple(device for node in self.nodes for device in node.devices)

    def devices_of(self, node_of_rank: Sequence[int]) -> Sequence[Device]:
        """Return the device of each rank of a plan, given the ranks' nodes."""
        if node_of_rank == self.node_of_rank:  # as the planner numbers them, for every simulation
            return self.devices
        devices = [iter(node.devices) for node in self.nodes]
        return [next(devices[node]) for node in node_of_rank]

    def peak_flops_per_s(self, nodes: Sequence[int]) -> float | None:
        """Return the total peak FLOP/s of ranks on these nodes; None if unknown."""
        peaks = self._peaks
        return None if peaks is None else sum(peaks[node] for node in nodes)

    @cached_property
    def _peaks(self) -> tuple[float, ...] | None:
        """Peak FLOP/s per rank, for each node."""
        values = [node.device.peak_flops_per_s for node in self.nodes]
        peaks = tuple(peak for peak in values if peak is not None)
        return peaks if len(peaks) == len(values) else None

    @property
    def is_crowded(self) -> bool:
        """Whether some node has more ranks than can compute at the same time."""
        return any(node.ranks > node.cores for node in self.nodes)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences that name the assumed links that are in use."""
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
        """Return the link between two ranks: the one within their node or between nodes."""
        same = self.node_of_rank[source_rank] == self.node_of_rank[target_rank]
        return self.within_node if same else self.between_nodes

    def device(self, rank: int) -> Device:
        """Return the device of a rank."""
        return self.devices[rank]

    @property
    def widest_link(self) -> Link:
        """The link between nodes, or the link within the node if there is only one."""
        return self.between_nodes if len(self.nodes) > 1 else self.within_node

    def memory_of(self, rank: int, limit_bytes: float | None) -> float:
        """Return the bytes that a rank may use: the minimum of the limit and its memory."""
        limits = (limit_bytes, self.device(rank).memory_bytes)
        return min((limit for limit in limits if limit is not None), default=inf)

    def with_rows(self, rows: RowTimes | None) -> Cluster:
        """Return the cluster with ``rows`` set on the devices that have no row times."""
        if rows is None or all(node.device.rows is not None for node in self.nodes):
            return self
        return self._with_devices(lambda device: replace(device, rows=device.rows or rows))

    def with_figures(self, peak_flops_per_s: float | None, memory_bytes: int | None) -> Cluster:
        """Return the cluster with these figures of a rank on the devices that have none."""

        def complete(device: Device) -> Device:
            return replace(
                device,
                peak_flops_per_s=device.peak_flops_per_s or peak_flops_per_s,
                memory_bytes=device.memory_bytes or memory_bytes,
            )

        return self._with_devices(complete)

    def with_nodes(self, count: int) -> Cluster:
        """Return the first ``count`` nodes; if there are fewer, the last one is repeated."""
        last = self.nodes[-1]
        more = (replace(last, name=f"{last.name}+{index}") for index in range(1, count + 1))
        return replace(self, nodes=(*self.nodes, *more)[:count])

    def with_ranks(self, count: int) -> Cluster:
        """Return the nodes of the first ``count`` ranks; there are at least as many."""
        nodes: list[Node] = []
        for node in self.nodes:
            if count > 0:
                ranks = min(count, node.ranks)
                nodes.append(replace(node, ranks=ranks, shares=node.shares[:count]))
            count -= node.ranks
        return replace(self, nodes=tuple(nodes))

    def with_more_memory(self, more_bytes: int) -> Cluster:
        """Return the cluster with more memory per device, where the memory is known."""

        def larger(device: Device) -> Device:
            memory = device.memory_bytes
            return device if memory is None else replace(device, memory_bytes=memory + more_bytes)

        return self._with_devices(larger)

    def with_memory_limit(self, limit_bytes: int) -> Cluster:
        """Return the cluster whose devices have this memory, or what they have if that is less."""

        def limited(device: Device) -> Device:
            memory = device.memory_bytes
            return replace(device, memory_bytes=min(memory or limit_bytes, limit_bytes))

        return self._with_devices(limited)

    def with_unlimited_memory(self) -> Cluster:
        """Return the cluster with unlimited memory per device."""
        return self._with_devices(lambda device: replace(device, memory_bytes=None))

    def with_bandwidth(self, bytes_per_s: float) -> Cluster:
        """Return the cluster with this bandwidth on every link; latencies stay, and sums follow
        from the links."""

        def changed(link: Link) -> Link:
            return replace(
                link, bandwidth_bytes_per_s=bytes_per_s, timings=(), assumed=False, observed=None
            )

        return replace(self._with_links(changed), allreduce=())

    def with_slower_links(self, factor: float) -> Cluster:
        """Return the cluster on which every message and sum takes ``factor`` times as long; 0 makes
        them free."""
        sums = tuple((ranks, size, time_s * factor) for ranks, size, time_s in self.allreduce)
        changed = self._with_links(lambda link: _slower(link, factor))
        return replace(changed, allreduce=sums if factor else ())

    def with_slower_assumed_links(self, within: float, between: float) -> Cluster:
        """Return the cluster on which messages on links without measurements take longer.

        Args:
            within, between: factors within a node, and between nodes and switches; 0 makes them
                free.
        """

        def changed(link: Link, factor: float) -> Link:
            return _slower(link, factor) if self.assumed or link.assumed else link

        switches = self.between_switches
        return replace(
            self,
            within_node=changed(self.within_node, within),
            between_nodes=changed(self.between_nodes, between),
            between_switches=switches and changed(switches, between),
        )

    def with_faster_links(self, factor: float) -> Cluster:
        """Return the cluster with ``factor`` times the bandwidth and the same latencies.

        The latency of measured sums is the time of the smallest.
        """
        least: dict[int, float] = {}
        for ranks, _, time_s in self.allreduce:
            least[ranks] = min(time_s, least.get(ranks, time_s))
        sums = tuple(
            (ranks, size, least[ranks] + (time_s - least[ranks]) / factor)
            for ranks, size, time_s in self.allreduce
        )
        changed = self._with_links(lambda link: _faster(link, factor))
        return replace(changed, allreduce=sums)

    def _with_devices(self, changed: Callable[[Device], Device]) -> Cluster:
        nodes = (replace(node, device=changed(node.device)) for node in self.nodes)
        return replace(self, nodes=tuple(nodes))

    def _with_links(self, changed: Callable[[Link], Link]) -> Cluster:
        switches = self.between_switches
        return replace(
            self,
            within_node=changed(self.within_node),
            between_nodes=changed(self.between_nodes),
            between_switches=None if switches is None else changed(switches),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON object."""
        document = super().to_json()
        links = {name: document.pop(name) for name in _Links._fields if name in document}
        return {**document, "links": links}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, file: str = "cluster") -> Cluster:
        """Read a cluster from its JSON object; see :meth:`load`."""
        links = read_fields(_Linked, document, file=file, hint=cls.hint).links
        fields = {**document, "source": document.get("source") or "unknown", **links._asdict()}
        cluster = super().from_json(fields, file=file)
        if not cluster.nodes:
            raise DataFileError(f"{file}: nodes: a cluster needs at least one", hint=cls.hint)
        for index, node in enumerate(cluster.nodes):
            if len(node.shares) not in (0, node.ranks):
                raise DataFileError(
                    f"{file}: nodes[{index}].shares: {len(node.shares)} for {node.ranks} ranks",
                    hint="give one number per rank of the node, or leave shares out",
                )
        if cluster.ranks > MAX_RANKS:
            raise DataFileError(
                f"{file}: nodes: {TOO_MANY_RANKS.format(cluster.ranks)}",
                hint="describe the nodes of one job only, and check ranks of each",
            )
        return cluster


def _slower(link: Link, factor: float) -> Link:
    bandwidth = link.bandwidth_bytes_per_s / factor if factor else _UNLIMITED_BYTES_PER_S
    return replace(
        link,
        latency_s=link.latency_s * factor,
        bandwidth_bytes_per_s=bandwidth,
        timings=tuple((size, time_s * factor) for size, time_s in link.timings) if factor else (),
    )


def _faster(link: Link, factor: float) -> Link:
    latency_s = link.latency_s
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor,
        timings=tuple(
            (size, latency_s + max(0.0, time_s - latency_s) / factor)
            for size, time_s in link.timings
        ),
    )


class _Links(NamedTuple):
    within_node: Link
    between_nodes: Link
    between_switches: Link | None = None


class _Linked(NamedTuple):
    links: _Links


def assumed_cluster(
    name: str, ranks_per_node: Sequence[int], cores_per_node: int, memory_bytes: int | None
) -> Cluster:
    """Return an unmeasured cluster of nodes that differ only in their number of ranks."""
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
