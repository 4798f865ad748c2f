"""A second simulator, written for obviousness: no queue, no virtual clocks, nothing compiled.

It advances from one instant at which anything ends to the next. Its ways, sums and copies follow
the descriptions in docs/formats.md and the docstrings, not the code.
"""

from collections import Counter
from itertools import permutations
from math import ceil

from pipectl.cluster import ASSUMED_HOST
from pipectl.link import RowTimes, seconds_of
from pipectl.schedule import Kind, channels
from pipectl.simulate import network

TINY = 1e-9
STARTS = {Kind.SEND_START, Kind.RECEIVE_START, Kind.REDUCE_START, Kind.OFFLOAD_START}
STARTS |= {Kind.FETCH_START}
COMPUTATIONS = {kind for kind in Kind if kind.is_compute}


class Reference:
    def __init__(self, plan, cluster, programs):
        self.plan, self.cluster = plan, cluster
        self.todo = [list(program) for program in programs]
        self.left = {}  # rank -> work it still has in its current computation
        self.begun = {}  # transfer -> number of rows that started it
        self.over = {}  # transfer -> time
        self.free = {}  # part of a way -> time
        self.moving = {}  # sum -> its pieces left, when the next can move, what one holds, latency
        self.busy = [0.0] * plan.ranks
        self.now, self.met_at = 0.0, None
        self.until = {}  # rank -> when the row of a message, or what follows one, is over
        self.owed = [0.0] * plan.ranks  # rank on shared cores -> work of rows for its next one
        self.resting = {rank: self.rows(rank).begin for rank in range(plan.ranks)}
        self.last = {}  # part of a way -> when a transfer last came to it
        self.tied = False  # whether two came at once: which goes first is then left open

    def run(self):
        while True:
            while any(self.step(rank) for rank in range(self.plan.ranks)) or self.move():
                pass
            if not any(self.todo):
                return self.now
            self.advance()

    def step(self, rank):
        """Execute one row if that is possible at this instant."""
        if not self.passes(rank, self.resting.get(rank, 0.0)):
            return False
        self.resting.pop(rank, None)
        return bool(self.todo[rank]) and self.execute(rank, self.todo[rank][0])

    def execute(self, rank, action):
        if action.kind not in COMPUTATIONS:
            over = self.over.get(self.name(rank, action), float("inf")) <= self.now + TINY
            starts = action.kind in STARTS
            if not (starts or over) or not self.passes(rank, self.message_s(rank, action)):
                return False
            if starts:
                self.start(rank, action)
        elif rank not in self.left:
            if action.kind is Kind.UPDATE and not self.meet():
                return False
            self.left[rank] = self.work(rank, action) + self.owed[rank]
            self.owed[rank] = 0.0
            return True
        elif self.left[rank] > TINY:
            return False
        else:
            del self.left[rank]
            if action.kind is not Kind.UPDATE:
                self.resting[rank] = self.rows(rank).compute
        self.todo[rank].pop(0)
        return True

    def meet(self):
        """Whether all ranks have been at UPDATE at once."""
        if self.met_at is None and all(
            rows and rows[0].kind is Kind.UPDATE and rank not in self.resting
            for rank, rows in enumerate(self.todo)
        ):
            self.met_at = self.now + max(self.rows(rank).agree for rank in range(self.plan.ranks))
        return self.met_at is not None and self.met_at <= self.now + TINY

    def node(self, rank):
        return self.cluster.nodes[self.plan.node_of_rank[rank]]

    def rows(self, rank):
        return self.node(rank).device.rows or RowTimes()

    def message_s(self, rank, action):
        """What the row of a message takes of its rank's time."""
        if action.channel < 0 or channels(self.plan)[action.channel].is_local:
            return 0.0
        table = getattr(self.rows(rank), action.kind.name.lower())
        size = channels(self.plan)[action.channel].size_bytes
        return seconds_of(table, size) * self.share(action)

    def passes(self, rank, time_s):
        """Whether a rank has spent so much time of its own; on shared cores, it owes it."""
        if time_s == 0:
            return True
        node = self.plan.node_of_rank[rank]
        if self.plan.node_of_rank.count(node) > self.cluster.nodes[node].cores:
            self.owed[rank] += time_s
            return True
        if self.until.setdefault(rank, self.now + time_s) > self.now + TINY:
            return False
        del self.until[rank]
        return True

    def work(self, rank, action):
        speed = self.cluster.nodes[self.plan.node_of_rank[rank]].device.speed
        if action.kind is Kind.UPDATE:
            mine = [stage for stage in self.plan.stages if rank in stage.updating_ranks]
            return sum(stage.cost.update_s for stage in mine) / speed + self.rows(rank).end
        cost = self.plan.stages[action.stage].cost
        forward = action.kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.EVALUATE)
        weight_s = cost.backward_s / 2 if cost.weight_s is None else cost.weight_s
        segments = self.plan.stages[action.stage].segments or cost
        work = segments.forward_s if forward else segments.backward_s
        if action.kind is Kind.RECOMPUTE and segments is not cost:
            work = segments.recompute_s
        if action.kind is Kind.BACKWARD_WEIGHT:
            work = weight_s
        elif action.kind is Kind.BACKWARD_INPUT:
            work -= weight_s
        return work * self.share(action) / speed

    def share(self, action):
        if action.start >= 0:
            return (action.stop - action.start) / self.plan.micro_batch_size
        if action.micro_batch < 0:
            return 1.0
        return self.plan.micro_batch_shares[action.micro_batch]

    def name(self, rank, action):
        """What is moved: both ends of it have the same name for it."""
        if action.kind in (Kind.REDUCE_START, Kind.REDUCE_WAIT):
            return ("sum", action.stage)
        if action.kind in (Kind.OFFLOAD_START, Kind.OFFLOAD_WAIT):
            return ("out", rank, action.stage, action.micro_batch)
        if action.kind in (Kind.FETCH_START, Kind.FETCH_WAIT):
            return ("back", rank, action.stage, action.micro_batch)
        return ("message", action.channel, action.micro_batch)

    def start(self, rank, action):
        name = self.name(rank, action)
        self.begun[name] = self.begun.get(name, 0) + 1
        stage = self.plan.stages[action.stage]
        if name[0] == "sum":
            if self.begun[name] == stage.replicas:
                self.begin_sum(name, stage)
        elif name[0] == "message":
            channel = channels(self.plan)[action.channel]
            if self.begun[name] == 2:
                way = self.way(channel.source_rank, channel.target_rank)
                self.over[name] = self.pass_through(way, channel.size_bytes * self.share(action))
        else:
            node = self.cluster.nodes[self.plan.node_of_rank[rank]]
            link = node.device.host_link or ASSUMED_HOST
            direction = name[0] if link.duplex else "both"
            size = stage.kept_bytes * self.share(action)
            self.over[name] = self.pass_through([(("host", rank, direction), link)], size)

    def way(self, source, target):
        """The parts of the way between two ranks: who takes turns, and the link."""
        cluster = self.cluster
        nodes = [self.plan.node_of_rank[rank] for rank in (source, target)]
        if nodes[0] == nodes[1]:
            link = cluster.within_node
            return self.turns(link, [source, target], "within")
        switches = [cluster.nodes[node].switch for node in nodes]
        link, more = cluster.between_nodes, []
        if switches[0] != switches[1] and cluster.between_switches:
            more = self.between(cluster.between_switches, switches, source, target, "switch")
        ends = self.between(link, nodes, source, target, "node")
        return [ends[0], *more, *ends[1:]]

    def between(self, link, places, source, target, name):
        if link.interface:
            leaves = (name, places[0], "leaves" if link.duplex else "any")
            enters = (name, places[1], "enters" if link.duplex else "any")
            return [(leaves, link), (enters, link)]
        return self.turns(link, places if link.shared else [source, target], name)

    def turns(self, link, ends, name):
        return [((name, *(ends if link.duplex else sorted(ends))), link)]

    def latency(self, way):
        return sum({id(link): link.latency_s for _, link in way}.values())

    def pass_through(self, way, size):
        """Parts carry a transfer in turn, each from when the one before has begun."""
        begin = end = self.now
        for part, link in way:
            begin = self.hold(part, link.hold_s(size), begin)
            end = max(end, self.free[part])
        return end + self.latency(way)

    def hold(self, part, hold_s, begin):
        """Let a part carry something as soon as it can; returns when it begins."""
        self.tied |= abs(self.last.get(part, -1.0) - self.now) <= TINY
        self.last[part] = self.now
        begin = max(begin, self.free.get(part, 0.0))
        self.free[part] = begin + hold_s
        return begin

    def begin_sum(self, name, stage):
        """Two rounds in which every replica sends a part to every other; the busiest one counts."""
        ranks = stage.updating_ranks
        buckets = max(1, ceil(stage.cost.accumulated_bytes / vars(network)["BUCKET_BYTES"]))
        size = stage.cost.accumulated_bytes / buckets / len(ranks)
        busy_s, latencies = Counter(), [0.0]
        for source, target in permutations(ranks, 2):
            way = self.way(source, target)
            latencies.append(self.latency(way))
            sides = ["out", "in"] if all(link.duplex for _, link in way) else ["any", "any"]
            for rank, side in zip((source, target), sides, strict=True):
                busy_s[rank, side] += max(link.hold_s(size) for _, link in way)
            if self.plan.node_of_rank[source] != self.plan.node_of_rank[target]:
                for part, link in way:
                    if link.shared or link.interface:
                        busy_s[part] += link.hold_s(size)
        summing = [other.updating_ranks for other in self.plan.stages if other.replicas > 1]
        several = [rank for rank in ranks if sum(rank in each for each in summing) > 1]
        private = {part for part in busy_s if part[1] in ("out", "in", "any")}
        held = {part: s for part, s in busy_s.items() if part not in private or part[0] in several}
        pieces = min(network.MAX_PIECES, buckets)
        parts = {part: 2 * buckets * s / pieces for part, s in held.items()}
        parts[name] = 2 * buckets * max(busy_s.values()) / pieces
        self.moving[name] = pieces, self.now, parts, 2 * max(latencies)

    def move(self):
        """Move the pieces of sums that can; whether there were any."""
        ready = [name for name, (_, at, *_) in self.moving.items() if at <= self.now + TINY]
        for name in ready:
            left, _, parts, latency_s = self.moving.pop(name)
            end = max(self.hold(part, hold_s, self.now) + hold_s for part, hold_s in parts.items())
            if left > 1:
                self.moving[name] = left - 1, end, parts, latency_s
            else:
                self.over[name] = end + latency_s
        return bool(ready)

    def advance(self):
        """To the next end of a computation or a transfer."""
        rates = {}
        for rank in self.left:
            node = self.plan.node_of_rank[rank]
            computing = sum(self.plan.node_of_rank[other] == node for other in self.left)
            rates[rank] = min(1.0, self.cluster.nodes[node].cores / computing)
        ends = [self.now + self.left[rank] / rates[rank] for rank in self.left]
        ends += [time for time in self.over.values() if time > self.now + TINY]
        ends += [time for time in self.until.values() if time > self.now + TINY]
        ends += [at for _, at, *_ in self.moving.values()]
        ends += [self.met_at] if self.met_at is not None and self.met_at > self.now + TINY else []
        step = min(ends) - self.now
        for rank, rate in rates.items():
            self.left[rank] -= step * rate
            self.busy[rank] += step
        self.now += step
