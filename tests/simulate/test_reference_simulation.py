"""The simulator against a second one, written for obviousness: no queue, no virtual clocks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.plan import StageCost
from pipectl.schedule import Kind, channels, lower
from pipectl.simulate import simulate

TINY = 1e-9


class Reference:
    """Advances time from one instant at which anything ends to the next."""

    def __init__(self, plan, cluster):
        self.plan, self.cluster = plan, cluster
        self.todo = [list(lower(plan, rank).body) for rank in range(plan.ranks)]
        self.left = {}  # rank -> work it still has in its current computation
        self.ends_begun = {}  # (channel, micro-batch) -> number of ends that started it
        self.arrival = {}  # (channel, micro-batch) -> time
        self.link_free = {}
        self.now, self.met = 0.0, False

    def run(self):
        while True:
            while any(self.step(rank) for rank in range(self.plan.ranks)):
                pass
            if not any(self.todo):
                return self.now
            self.advance()

    def step(self, rank):
        """Execute one row if that is possible at this instant."""
        if not self.todo[rank]:
            return False
        action = self.todo[rank][0]
        message = (action.channel, action.micro_batch)
        if action.kind in (Kind.SEND_START, Kind.RECEIVE_START):
            self.ends_begun[message] = self.ends_begun.get(message, 0) + 1
            if self.ends_begun[message] == 2:
                self.move(message)
        elif action.kind in (Kind.SEND_WAIT, Kind.RECEIVE_WAIT):
            if self.arrival.get(message, float("inf")) > self.now + TINY:
                return False
        elif rank not in self.left:
            if action.kind is Kind.UPDATE and not self.meet():
                return False
            self.left[rank] = self.work(rank, action)
            return True
        elif self.left[rank] > TINY:
            return False
        else:
            del self.left[rank]
        self.todo[rank].pop(0)
        return True

    def meet(self):
        """Whether all ranks have been at UPDATE at once."""
        self.met = self.met or all(rows and rows[0].kind is Kind.UPDATE for rows in self.todo)
        return self.met

    def work(self, rank, action):
        speed = self.cluster.device(rank).speed
        if action.kind is Kind.UPDATE:
            return sum(self.cost(s).update_s for s in self.plan.stages_of_rank(rank)) / speed
        cost = self.cost(action.stage)
        work = cost.forward_s if action.kind is Kind.FORWARD else cost.backward_s
        return work * self.plan.micro_batch_shares[action.micro_batch] / speed

    def cost(self, stage):
        return self.plan.stages[stage].cost

    def move(self, message):
        channel = channels(self.plan)[message[0]]
        ends = channel.source_rank, channel.target_rank
        nodes = tuple(self.cluster.node_of_rank[rank] for rank in ends)
        link = self.cluster.link(*ends)
        name = ("within", *ends) if nodes[0] == nodes[1] else ("between", *nodes)
        if not link.duplex:
            name = (name[0], *sorted(name[1:]))
        size = channel.size_bytes * self.plan.micro_batch_shares[message[1]]
        begin = max(self.now, self.link_free.get(name, 0.0))
        self.link_free[name] = begin + size / link.bandwidth_bytes_per_s
        self.arrival[message] = begin + link.transfer_s(size)

    def advance(self):
        """To the next end of a computation or a message."""
        rates = {}
        for rank in self.left:
            node = self.cluster.node_of_rank[rank]
            busy = sum(self.cluster.node_of_rank[other] == node for other in self.left)
            rates[rank] = min(1.0, self.cluster.nodes[node].cores / busy)
        ends = [self.now + self.left[rank] / rates[rank] for rank in self.left]
        ends += [time for time in self.arrival.values() if time > self.now + TINY]
        step = min(ends) - self.now
        for rank, rate in rates.items():
            self.left[rank] -= step * rate
        self.now += step


def random_case(pipeline, seed):
    """A random plan and cluster; random figures, so that hardly two things happen at once."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
    ranks, stages = sum(sizes), draw.randint(1, 6)
    depth = sorted((draw.randint(1, 6) for _ in range(stages)), reverse=True)
    skips = [(0, (1, 2), True)] if stages > 2 and draw.random() < 0.5 else []
    micro_batches = draw.randint(1, 7)
    costs = [
        StageCost(draw.uniform(0.5, 2), draw.uniform(1, 4), draw.uniform(0, 1), 0, 0, 0)
        for _ in range(stages)
    ]
    plan = pipeline(
        stages,
        micro_batches,
        schedule=draw.choice(["gpipe", "1f1b"]),
        warm_up=depth,
        ranks=[draw.randrange(ranks) for _ in range(stages)],
        node_of_rank=[node for node, size in enumerate(sizes) for _ in range(size)],
        costs=costs,
        size_bytes=draw.randint(0, 100),
        skips=skips,
        micro_batch_size=4,
        batch_size=4 * micro_batches - draw.randint(0, 3),
    )
    nodes = tuple(
        Node(f"n{index}", size, draw.randint(1, size), Device("cpu", draw.uniform(0.5, 2)))
        for index, size in enumerate(sizes)
    )
    links = [Link(draw.uniform(0, 1), draw.uniform(20, 200), draw.random() < 0.5) for _ in range(2)]
    return plan, Cluster("c", "test", nodes, *links)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_both_simulators_agree(pipeline, seed):
    plan, cluster = random_case(pipeline, seed)
    assert simulate(plan, cluster).step_time_s == pytest.approx(
        Reference(plan, cluster).run(), rel=1e-6
    )
