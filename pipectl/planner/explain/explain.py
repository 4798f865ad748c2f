"""The explanation of a plan: its bottleneck, the next best plans, and gains of changes.

Every answer comes from a new plan, made for the changed cluster or request and simulated, so a
change without a gain is reported as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.request import COMPARED, Expired, Planner, PlanRequest
from pipectl.profile import Profile
from pipectl.units import plural

NOTHING = 1e-3
"""Smaller shares of the step count as no gain."""
MAX_ALTERNATIVES = 4
GIB = 2**30
STOPPED = "not tried: planning was stopped"


@dataclass(frozen=True)
class Offer:
    """The gain of a change.

    Args:
        change: in words, e.g. ``one more node``.
        step_s: of the best plan with the change; None if it cannot be tried.
        reason: why it cannot be tried; empty if it can.
    """

    change: str
    step_s: float | None = None
    reason: str = ""

    def gain(self, step_s: float) -> float:
        """Share of the step that is saved; 0 if none is."""
        if self.step_s is None or not step_s:
            return 0.0
        saved = 1 - self.step_s / step_s
        return saved if saved >= NOTHING else 0.0

    def to_json(self, step_s: float) -> dict[str, Any]:
        """The documented object; its gain is a share of ``step_s``."""
        return {
            "step_time_s": self.step_s,
            "change": self.change,
            "reason": self.reason or None,
            "gain": self.gain(step_s),
        }


@dataclass(frozen=True)
class Alternative:
    """Another plan and how it differs from the chosen one."""

    difference: str
    plan: Plan


@dataclass(frozen=True)
class Explanation:
    """The next best plans, and the gains of changes."""

    alternatives: tuple[Alternative, ...]
    offers: tuple[Offer, ...]


def explain(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    planner: Planner,
    others: Iterable[Plan] = (),
    expired: Expired = lambda: False,
    *,
    can_add_nodes: bool = True,
) -> Explanation:
    """Explain the best plan of a request.

    Args:
        planner: made the plan; called again for every change.
        others: other plans of the same request that the search has judged.
        expired: once it returns true, remaining changes are left out of the explanation.
        can_add_nodes: whether more nodes than the cluster has are an option.
    """

    def while_time(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
        if expired():
            raise OutOfTimeError(STOPPED)
        return planner(profile, cluster, request)

    subject = _Subject(plan, profile, cluster, request, while_time)
    best: dict[str, Plan] = {}
    for other in (*others, *_variations(subject)):
        words = difference(plan, other)
        known = best.get(words)
        if words and (known is None or other.predicted_step_s < known.predicted_step_s):
            best[words] = other
    ranked = sorted(best.items(), key=lambda item: (item[1].predicted_step_s, item[0]))
    return Explanation(
        alternatives=tuple(Alternative(*each) for each in ranked[:MAX_ALTERNATIVES]),
        offers=tuple(_offers(subject, can_add_nodes=can_add_nodes)),
    )


@dataclass(frozen=True)
class _Subject:
    """A plan and the inputs that it was made from."""

    plan: Plan
    profile: Profile
    cluster: Cluster
    request: PlanRequest
    planner: Planner

    def again(self, cluster: Cluster | None = None, **changes: Any) -> Plan:
        """The best plan for a changed cluster or request."""
        request = replace(self.request, **changes)
        return self.planner(self.profile, cluster or self.cluster, request)

    def offer(self, change: str, cluster: Cluster | None = None, **changes: Any) -> Offer:
        """The offer of a change."""
        try:
            return Offer(change, self.again(cluster, **changes).predicted_step_s)
        except (InfeasibleError, OutOfTimeError) as error:
            return Offer(change, reason=error.message)


def _offers(subject: _Subject, *, can_add_nodes: bool) -> Iterator[Offer]:
    """The offers of all changes, each with a new plan.

    Links are doubled, because a fixed amount would not compare: 1 GB/s is eight networks of
    1 Gbit/s, and little for one of 200 Gbit/s.
    """
    plan, cluster, request = subject.plan, subject.cluster, subject.request
    nodes, limit = len(cluster.nodes), request.memory_limit_bytes
    if can_add_nodes:
        yield subject.offer("one more node", cluster.with_nodes(nodes + 1))
    change = "1 GiB more for every rank"
    if limit is None and all(node.device.memory_bytes is None for node in cluster.nodes):
        yield Offer(change, reason="nothing: memory is not limited")
    else:
        more = None if limit is None else limit + GIB
        yield subject.offer(change, cluster.with_more_memory(GIB), memory_limit_bytes=more)
    if cluster.ranks > 1:
        where = "between nodes" if nodes > 1 else "within the node"
        yield subject.offer(f"links {where} twice as fast", cluster.with_faster_links(2.0))
    count = 2 * plan.micro_batches
    if count > request.batch_size:
        reason = f"the batch has only {plural(request.batch_size, 'sample')}"
        yield Offer(f"{count} micro-batches", reason=reason)
    else:
        yield subject.offer(f"{count} micro-batches", micro_batches=count)
    if request.replicas == 1 and cluster.ranks > 1:
        yield subject.offer("stages with replicas", replicas=None)


def _variations(subject: _Subject) -> Iterator[Plan]:
    """The best plans with another value of one open choice."""
    plan, request = subject.plan, subject.request
    if request.listed is not None:
        return
    changes: list[dict[str, Any]] = []
    if request.fixed_stages is None:
        changes += [{"stages": n} for n in _near(len(plan.stages), subject.cluster.ranks)]
    if request.schedule is None and request.warm_up is None:
        changes += [{"schedule": s.name} for s in COMPARED if s.name != plan.schedule]
    if request.micro_batches is None:
        changes += [{"micro_batches": n} for n in _near(plan.micro_batches, request.batch_size)]
    for each in changes:
        with suppress(InfeasibleError, OutOfTimeError):
            yield subject.again(**each)


def _near(number: int, most: int) -> Sequence[int]:
    """One less and one more, or half and twice a number above 4, from 1 to ``most``."""
    near = {number - 1, number + 1} if number <= 4 else {number // 2, 2 * number}
    return sorted(each for each in near if 1 <= each <= most)


def difference(plan: Plan, other: Plan) -> str:
    """How ``other`` differs from a plan, in words; empty if in no decision that has a name."""
    parts = []
    if len(other.stages) != len(plan.stages):
        parts.append(plural(len(other.stages), "stage"))
    if other.schedule != plan.schedule:
        parts.append(f"schedule {other.schedule}")
    if other.micro_batches != plan.micro_batches:
        count = plural(other.micro_batches, "micro-batch")
        parts.append(f"{count} of {other.micro_batch_size}")
    if not parts and other.stages != plan.stages:
        parts.append("other cuts")
    elif not parts and other.warm_up != plan.warm_up:
        parts.append("another warm-up")
    return ", ".join(parts)
